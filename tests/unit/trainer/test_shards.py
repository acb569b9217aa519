"""Shards together are the whole: in rows, and in every bit of the optimizer's update."""

from __future__ import annotations

from itertools import chain, pairwise
from math import prod

import pytest
import torch
from torch import Tensor, nn

from lab.exchanges import MODELS, PAGE, count_exchanges, table
from octetrl.config.cluster import ClusterConfig, owners_of
from octetrl.config.schema import OptimizerConfig
from octetrl.kernels.optimizer import adamw
from octetrl.trainer.optimizer import Optimizer
from octetrl.trainer.peers import Alone
from octetrl.trainer.shards import BLOCK_ROWS, Share, cut_rows

# Columns that are no multiple of 128, a last block of rows that is short, vectors, LoRA's A, one row.
SHAPES = {
    "embedding.weight": (515, 72),
    "layers.0.attention.qkv_proj.weight": (896, 7),
    "layers.0.mlp.up_proj.weight": (300, 112),
    "layers.0.attention.qkv_proj.bias": (896,),
    "layers.0.mlp.up_proj.lora.a": (2, 4, 72),
    "score.weight": (1, 72),
    "norm.weight": (72,),
}


def test_the_rows_of_all_workers_are_all_rows_in_order_and_balanced() -> None:
    layer = [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (4096,), (128,)]
    shapes = [(32_003, 896), *layer * 3, (130, 576), (5, 3584), (2, 16, 4096)]
    for count in (1, 2, 3, 4, 7, 8):
        owned = [0] * count
        for shape, cut in zip(shapes, cut_rows(shapes, count), strict=True):
            assert cut[0].start == 0 and cut[-1].stop == shape[0]
            assert all(one.stop == other.start for one, other in pairwise(cut))
            assert all(rows.start % BLOCK_ROWS == 0 for rows in cut if rows.stop > rows.start)
            for rank, (start, stop) in enumerate(cut):
                owned[rank] += (stop - start) * prod(shape[1:])
        assert max(owned) - min(owned) <= BLOCK_ROWS * 12_288, count


def test_a_parameter_without_dimensions_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"no rows to share; give it the shape \[1\]"):
        cut_rows([(4, 4), ()], 2)


class Unconnected(Alone):
    """A worker that exchanges nothing."""

    def __init__(self, share: Share) -> None:
        self.share = share


def parameters(dtype: torch.dtype, device: str = "cpu") -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: nn.Parameter(tensor.to(device, dtype)) for name, tensor in drawn.items()}


def updated(config: OptimizerConfig, share: Share, dtype: torch.dtype, device: str = "cpu") -> dict[str, Tensor]:
    """Weights, moments and masters after three steps. Rows of other workers stay as they were."""
    named = parameters(dtype, device)
    optimizer = Optimizer(named.items(), config, seed=3, peers=Unconnected(share))
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        for parameter in named.values():
            size = 10 ** torch.randn(parameter.shape, generator=generator)
            parameter.backward((torch.randn(parameter.shape, generator=generator) * size).to(device, dtype))
        optimizer._clip = torch.tensor(0.37, device=device)
        optimizer.step(1e-2)
    state = {name: tensor for name, tensor in optimizer.state_tensors().items() if name != "step_count"}
    return {f"weight/{slot.name}": slot.weight for slot in optimizer.slots} | state


@pytest.mark.parametrize("states", ["float32", "bfloat16", "8bit"])
@pytest.mark.parametrize(
    ("master", "dtype"),
    [
        ("float32", torch.bfloat16),
        ("stochastic_rounding", torch.bfloat16),
        ("float32", torch.float32),
    ],
)
def test_shards_have_the_bits_of_the_whole(
    states: str, master: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "PIECE_ELEMENTS", 1 << 12)  # several pieces a shard
    config = OptimizerConfig(states=states, master=master, weight_decay=0.1, offload=True)
    whole = updated(config, Share(), dtype)
    assert all(torch.equal(whole[f"weight/{name}"], one) is False for name, one in parameters(dtype).items())
    for count in (2, 3, 4):
        shards = [updated(config, Share(rank, count), dtype) for rank in range(count)]
        assert set(chain(*shards)) == set(whole)
        for name, tensor in whole.items():
            together = torch.cat([shard[name] for shard in shards if name in shard])
            assert together.dtype == tensor.dtype and torch.equal(together, tensor), (name, count)


def test_more_than_16_workers_own_rows_in_groups() -> None:
    assert [owners_of(count) for count in (1, 2, 15, 16)] == [1, 2, 15, 16]
    found = {count: owners_of(count) for count in (17, 18, 20, 24, 34, 36, 64, 96, 1000, 1024)}
    assert found == {17: 17, 18: 9, 20: 10, 24: 8, 34: 34, 36: 12, 64: 16, 96: 16, 1000: 8, 1024: 16}
    assert [ClusterConfig(gpus=64, tensor_parallel=size).num_owners for size in (1, 2, 8)] == [16, 16, 8]


def test_collectives_and_padding_of_many_workers() -> None:
    """What docs/scale.md says, counted in the code that runs. 64, 96 and 1,024 workers have groups of the same size."""
    few = count_exchanges("qwen3-8b", 24)
    assert (few.owners, few.published, few.summed) == (8, 94, 2 * 163) and few.padding <= 1.01
    counts = {model: count_exchanges(model, 64) for model in MODELS}
    for model, one in counts.items():
        assert one.owners == owners_of(96) == owners_of(1024) and one.published <= 300 and one.padding <= 1.01, model
    page = PAGE.read_text(encoding="utf-8")
    assert all(line in page for line in table({(model, n): counts[model] for n in (64, 96, 1024) for model in MODELS}))
