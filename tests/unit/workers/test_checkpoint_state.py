"""What several workers save: the same number goes on to the bit, and any other has the same weights and moments.

So do workers that share a model: the same groups go on to the bit, and one worker has the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from octetrl.config.schema import (
    EngineConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    Recipe,
    RouterConfig,
    TrainerConfig,
)
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_from_shards
from octetrl.models.row_shards import RowShards
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.models.weight_files import SINGLE
from octetrl.records import PackedBatch
from octetrl.shapes.presets import preset_config
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.trainer import checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import pack
from octetrl.trainer.peers import ALONE, Peers
from octetrl.workers.worker import Worker
from tests.grid import run_grid, smallest_shape
from tests.objectives import objective
from tests.parity.shapes import TINY, UNUSUAL
from tests.parity.short_run import worker_of
from tests.parity.sides import PRECISIONS
from tests.saved_checkpoint import save_checkpoint
from tests.team import run_team
from tests.unit.trainer.tiny_trainer import random_samples, supervised

SPEC = replace(TINY["qwen3"], hidden_size=72, intermediate_size=200, vocab_size=301)  # several blocks, short last ones
# Experts whose rows are no multiples of 128, with a correction bias.
MOE = spec_from_config(
    preset_config("tiny-mla-moe") | {"num_hidden_layers": 2, "moe_intermediate_size": 40, "vocab_size": 301}
)
OSS = replace(UNUSUAL["gpt-oss"], vocab_size=301, intermediate_size=48)  # as its experts have
SHARED = smallest_shape("qwen3", 2)
PARTS = "parts"  # where workers write their files before they are those of a checkpoint
ALGORITHMS: dict[str, dict[str, Any]] = {  # else SFT
    "ppo": {"name": "ppo"},
    "reference": {"kl_coefficient": 0.1, "reference_every": 2},
    "shared": {},
}


def worker(peers: Peers, kind: str) -> Worker:
    """`kind`: an algorithm, a precision, `lora`, `moe` or `gpt-oss`. After `shared` of workers that share a model."""
    of_group, _, what = kind.rpartition(" ")
    recipe = Recipe(
        model=ModelConfig(
            preset="tiny",
            init="random",
            context_length=SPEC.max_positions,
            lora=LoraConfig(rank=4) if what == "lora" else None,
        ),
        fp8=PRECISIONS["bf16" if what in ("bf16", "lora") else "fp8_full" if of_group else "fp8"],
        algorithm=objective(**ALGORITHMS.get(of_group or what, {"name": "sft"})),
        trainer=TrainerConfig(
            optimizer=OptimizerConfig(
                lr=1e-3 if of_group else 1e-2, states="8bit" if what in ("fp8", "moe") else "float32"
            ),
            tokens_per_micro_batch=64,
            router=RouterConfig(bias_rate=0.01 if what == "moe" else 0.0),
        ),
        engine=EngineConfig(kv_cache_tokens=1 << 12, max_batch=4),
        steps=9,
    )
    spec = {"moe": MOE, "gpt-oss": OSS}.get(what, SHARED if of_group else SPEC)
    one = worker_of(recipe, spec, "cpu", peers)
    if one.needs_calibration:
        one.calibrate([[1, 2, 3, 4]])
    return one


def step(one: Worker, number: int) -> str:
    """An update and its publishing; the digest of what the engine then holds."""
    samples = random_samples(8, number, policy_version=None)
    if one.recipe.algorithm.name == "sft":
        samples = supervised(samples)
    whole: PackedBatch = pack(samples, one.layout, "token")
    share = one.peers.share
    own = tuple(minibatch[share.rank :: share.count] for minibatch in whole.minibatches)
    return one.publish(one.train(replace(whole, minibatches=own)).policy_version).weights_digest


def save(folder: Path, workers: list[Worker]) -> Path:
    def write(place: Path) -> list[WrittenFile]:
        return [file for one in workers for file in one.write_state(place, copied=True)]

    assert [one.copy_state() for one in workers] == [None] * len(workers)
    return save_checkpoint(folder, 2, {}, write_more=write)


def saved_by(team: list[Any], folder: Path) -> Path:
    """The checkpoint of what the workers have written: the third of what each returned."""

    def write(place: Path) -> list[WrittenFile]:
        for file in (folder / PARTS).iterdir():
            file.rename(place / file.name)
        return [file for returned in team for file in returned[2]]

    return save_checkpoint(folder / "saved", 2, {}, write_more=write)


def resumed(path: Path, kind: str, peers: Peers) -> tuple[dict[str, Tensor], str, dict[str, Tensor]]:
    """The state of a checkpoint, and what a further step makes of it."""
    one = worker(peers, kind)
    one.load(checkpoint.load(path), 2)
    assert one.policy_version == 2
    return owned(one), step(one, 3), owned(one)


def begun(folder: Path, kind: str, peers: Peers) -> tuple[Worker, dict[str, Tensor], list[WrittenFile], str, Any]:
    """Saves after step 2 and runs step 3 before the copy is written. Last: the KV scales that were saved."""
    one = trained(kind, peers)
    before, scales = owned(one), one.kv_scales
    assert one.copy_state() is None
    digest = step(one, 3)
    (folder / PARTS).mkdir(exist_ok=True)
    return one, before, one.write_state(folder / PARTS, copied=True), digest, scales


def trained(kind: str, peers: Peers) -> Worker:
    one = worker(peers, kind)
    for number in (1, 2):
        step(one, number)
    return one


def owned(one: Worker) -> dict[str, Tensor]:
    """Copies of the rows of weights and state that this worker owns, critic and all, with the codes that it has."""
    state = one.trainer.state()
    found = {f"weight/{name}": tensor for name, tensor in state.weights.items()} | dict(state.optimizer)
    if one.trainer.critic is not None:
        critic = one.trainer.critic.state()
        found |= {f"critic weight/{name}": tensor for name, tensor in critic.weights.items()}
        found |= {f"critic {name}": tensor for name, tensor in critic.optimizer.items()}
    models = {"codes": one.trainer_model}
    if one.trainer.reference.model is not None:
        models["codes of the reference"] = one.trainer.reference.model
    for what, model in models.items():
        found |= {f"{what} {name}": linear.codes.view(torch.uint8) for name, linear in model.float8_linears()}
        found |= {f"{what} {name}": held for name, held in model.named_parameters() if name.endswith("correction_bias")}
    return {name: tensor.clone() for name, tensor in found.items()}


def whole_of(parts: list[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The rows of all workers, joined; what is on every worker must be equal there."""
    names = dict.fromkeys(name for part in parts for name in part)
    joined: dict[str, Tensor] = {}
    for name in names:
        own = [part[name] for part in parts if name in part]
        if name.startswith("codes") or own[0].dim() == 0:
            assert all(torch.equal(own[0], other) for other in own), name
            joined[name] = own[0]
        else:
            joined[name] = torch.cat(own)
    return joined


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def loaded(path: Path, kind: str, count: int) -> dict[str, Tensor]:
    def work(peers: Peers) -> dict[str, Tensor]:
        one = worker(peers, kind)
        one.load(checkpoint.load(path), 2)
        return owned(one)

    return whole_of(list(run_team(count, work)) if count > 1 else [work(ALONE)])


@pytest.mark.parametrize("kind", ["bf16", "fp8", "lora", "ppo", "moe", "reference"])
def test_a_run_goes_on_from_what_any_number_of_workers_saved(kind: str, tmp_path: Path) -> None:
    """Two own all rows. In `bf16` two others own them again, and save nothing."""
    count = 4 if kind == "bf16" else 2
    team: list[Any] = run_team(count, partial(begun, tmp_path, kind), owners=2, deadline_seconds=60)
    path = saved_by(team, tmp_path)
    assert len([*path.glob("state-*-of-00002.safetensors")]) == 2
    for one, other in zip(team, team[2:], strict=False):
        same(one[1], other[1])
    assert not (path / SINGLE).exists() and RowShards.find(path) is not None
    saved = whole_of([before for _, before, *_ in team[:2]])
    again = run_team(count, partial(resumed, path, kind), owners=2, deadline_seconds=60)
    for (one, _, _, digest, _), (_, other, state) in zip(team, again, strict=True):
        assert digest == other
        same(owned(one), state)
    same(loaded(path, kind, 1), saved)
    same(loaded(path, kind, 3), saved)
    alone = trained(kind, ALONE)
    path = save(tmp_path / "one", [alone])
    assert RowShards.find(path) is None
    same(loaded(path, kind, 3), owned(alone))


# ---------------------------------------------------------------- workers that share a model


def assert_parts_of(
    whole: Mapping[str, Tensor], part: Mapping[str, Tensor], rank: int, lora: LoraConfig | None
) -> None:
    """`whole`: all that one worker owns; `part`: of a worker that has rows of the model."""
    cut = cut_rows_of(SHARED.cut(TensorCut(rank, 2)), lora)
    assert whole.keys() == part.keys()
    for name, tensor in part.items():
        rows, theirs = cut.get(name.partition("/")[2] or name.removeprefix("codes ") + ".weight"), whole[name]
        if rows is not None and tensor.dim():
            size = sum(one.rows for one in rows.pieces) / tensor.shape[0]  # of 8-bit moments' exponents: 128 elements
            bounds = [(round(one.whole / size), round((one.whole + one.rows) / size)) for one in rows.pieces]
            theirs = torch.cat([theirs[first:stop] for first, stop in bounds])
        assert torch.equal(tensor, theirs), name


@pytest.mark.parametrize("what", ["bf16", "fp8", "lora"])
def test_the_same_groups_go_on_and_one_worker_has_the_same_state(what: str, tmp_path: Path) -> None:
    kind, lora = f"shared {what}", LoraConfig(rank=4) if what == "lora" else None
    team: list[Any] = run_grid(1, 2, partial(begun, tmp_path, kind))
    path = saved_by(team, tmp_path)
    for (_, state, _, digest, _), (again, other, _) in zip(
        team, run_grid(1, 2, partial(resumed, path, kind)), strict=True
    ):
        assert digest == other
        same(state, again)
    alone = worker(ALONE, kind)
    alone.load(checkpoint.load(path), 2)
    whole = owned(alone)
    for rank, (_, state, *_) in enumerate(team):
        assert_parts_of(whole, state, rank, lora)
    if what == "fp8":
        parts = [scales.scale_LS.unflatten(1, (2, -1)) for *_, scales in team]  # K's heads, then V's
        assert alone.kv_scales is not None
        assert torch.equal(alone.kv_scales.scale_LS, torch.cat(parts, dim=2).flatten(1))
    path = save(tmp_path / "alone", [alone])
    for rank, (state, *_) in enumerate(run_grid(1, 2, partial(resumed, path, kind))):
        assert_parts_of(whole, state, rank, lora)


def test_one_worker_saves_its_own_rows_where_files_would_be_copies(tmp_path: Path) -> None:
    """gpt-oss's matrices of experts are turned in its files; the export turns them, a shard at a time."""
    one = trained("gpt-oss", ALONE)
    before = owned(one)
    path = save(tmp_path, [one])
    assert not (path / SINGLE).exists()
    loaded, _, _ = resumed(path, "gpt-oss", ALONE)
    same(loaded, before)
    shards = RowShards.find(path)
    assert shards is not None
    save_from_shards(shards, tmp_path / "export")
    turned = load_file(tmp_path / "export" / SINGLE)["model.layers.1.mlp.experts.down_proj"]
    ours = one.trainer_model.get_parameter("layers.1.mlp.experts.down_proj.weight").detach()
    assert torch.equal(turned.mT.flatten(0, 1), ours)
