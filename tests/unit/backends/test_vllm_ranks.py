"""Ranks of a tensor-parallel vLLM: what each holds, what they draw, and how they start. The ranks are threads.

What a rank must hold is cut here from what a vLLM with the whole model holds, by vLLM's own rules
(`ColumnParallelLinear`, `RowParallelLinear`, `VocabParallelEmbedding`).
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.names import attention_name
from octetrl.backends.vllm.ranks import checksum, step_together, together
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig
from octetrl.engine.weights import weight_set
from octetrl.fp8.kv_scales import KVScales
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec
from octetrl.shapes.tensor_cut import TensorCut
from octetrl.system.errors import UserError
from octetrl.trainer.peers import ALONE, Peers, serve_store
from octetrl.trainer.tensor_peers import GridPeers, TensorPeers
from octetrl.workers.build_engine import fewest_tokens
from tests.grid import run_grid, smallest_shape
from tests.parity.sides import PRECISIONS, draw_weights
from tests.unit.backends.setting import Letters, drain, request
from tests.unit.backends.vllm_double import VllmDouble, tensors_of

QWEN = replace(smallest_shape("qwen3", 2), num_layers=2, tied_embeddings=False)
CASES: dict[str, tuple[ModelSpec, int, Fp8Config]] = {
    "bf16": (QWEN, 2, PRECISIONS["bf16"]),
    "fp8_full": (QWEN, 2, PRECISIONS["fp8_full"]),
    "fp8 rollout": (QWEN, 2, Fp8Config(rollout=True)),
    "biases": (replace(smallest_shape("llama", 2), qkv_bias=True, o_bias=True), 2, PRECISIONS["fp8"]),
    "tied, four ranks": (replace(smallest_shape("qwen3", 4), tied_embeddings=True), 4, PRECISIONS["fp8"]),
    "the first share is narrower": (replace(QWEN, vocab_size=8200), 2, PRECISIONS["bf16"]),
}


class Rank:
    """One worker's part of a model with drawn weights, and its rank of vLLM over a double."""

    def __init__(self, spec: ModelSpec, fp8: Fp8Config, peers: Peers) -> None:
        policy = precision_policy(spec, fp8)
        cut = TensorCut(peers.group.rank, peers.group.size)
        self.spec, self.ranks = spec.cut(cut), peers.group if isinstance(peers, GridPeers) else None
        self.peers = peers
        how: dict[str, Any] = {"device": "cpu", "backend": "emulated", "group": peers.group}
        self.model = Decoder(self.spec, policy, "train", dtype=torch.bfloat16, **how)
        draw_weights(self.model, 3)
        self.scales = scales_of(spec, cut) if policy.kv_mode == "calibrated" else None
        self.double = VllmDouble(held_by(spec, policy, cut.size), vocab_size=spec.vocab_size)
        self.adapter = VllmBackend(
            self.double,
            spec=self.spec,
            policy=policy,
            tokenizer=Letters(),
            config=EngineConfig(page_size=16, max_batch=4),
            context_length=64,
            ranks=self.ranks,
        )

    def publish(self, version: int = 0) -> str:
        scales = None if self.scales is None else replace(self.scales, policy_version=version)
        self.adapter.put_weights(weight_set(self.model, version, scales))
        return self.adapter.weights_digest(covers_all=True)

    @property
    def held(self) -> dict[str, Tensor]:
        return {name: one.detach().view(torch.uint8) for name, one in self.double.model.named_parameters()}


def held_by(spec: ModelSpec, policy: PrecisionPolicy, size: int) -> Any:
    shapes = Decoder(spec, policy, "train", device="meta", backend="emulated", dtype=torch.bfloat16)
    return tensors_of(spec, policy, {name: one.detach() for name, one in shapes.named_parameters()}, size)


def scales_of(spec: ModelSpec, cut: TensorCut) -> KVScales:
    """Head 0 of K has 1, head 1 has 2 and so on; V has the tenth of that. This worker's heads."""
    heads = torch.arange(1.0, spec.num_kv_heads + 1).chunk(cut.size)[cut.rank]
    return KVScales(torch.cat([heads, heads / 10]).repeat(spec.num_layers, 1), 0)


def on_rank(name: str, whole: Tensor, spec: ModelSpec, rank: int, size: int) -> Tensor:
    """vLLM's part of a parameter, which is given as bytes."""
    if "qkv_proj" in name or "gate_up_proj" in name:
        parts = [spec.q_size, spec.kv_size, spec.kv_size] if "qkv" in name else [spec.intermediate_size] * 2
        rows = [one * whole.shape[0] // sum(parts) for one in parts]
        return torch.cat([part.chunk(size)[rank] for part in whole.split(rows)])
    if "embed_tokens" in name or "lm_head" in name:
        return whole.chunk(size)[rank]
    if ("o_proj" in name or "down_proj" in name) and whole.dim() > 1:
        return whole.chunk(size, 1)[rank]
    return whole


@pytest.mark.parametrize(("spec", "size", "fp8"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("bucket", [1 << 26, 50_000])
def test_each_rank_holds_vllms_part_of_our_bytes(
    bucket: int, spec: ModelSpec, size: int, fp8: Fp8Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octetrl.backends.vllm.weights.BUCKET_BYTES", bucket)
    received: list[int] = []

    def measured(verb: Callable[[TensorPeers, Tensor], Tensor]) -> Callable[[TensorPeers, Tensor], Tensor]:
        def call(group: TensorPeers, given: Tensor) -> Tensor:
            found = verb(group, given)
            received.append(found.nbytes)
            return found

        return call

    for name in ("stack", "exchange"):
        monkeypatch.setattr(TensorPeers, name, measured(getattr(TensorPeers, name)))
    alone = Rank(spec, fp8, ALONE)
    alone.publish()
    expected = alone.held
    for name, whole in expected.items():
        if "embed_tokens" in name or "lm_head" in name:
            assert whole[: spec.vocab_size].any() and not whole[spec.vocab_size :].any(), "padding is zero"

    def publish(peers: Peers) -> tuple[str, str, dict[str, Tensor]]:
        rank = Rank(spec, fp8, peers)
        return rank.publish(), rank.publish(1), rank.held

    found = run_grid(1, size, publish)
    for rank, (digest, later, held) in enumerate(found):
        assert digest != later and held.keys() == expected.keys()
        for name, whole in expected.items():
            assert torch.equal(held[name], on_rank(name, whole, spec, rank, size)), f"{name} on rank {rank}"
    assert len({digest for digest, *_ in found}) == size, "each has other bytes"
    assert max(received) <= bucket


def test_a_head_has_its_scales_where_it_is() -> None:
    def publish(peers: Peers) -> list[list[float]]:
        rank = Rank(replace(QWEN, num_kv_heads=4, num_heads=4), PRECISIONS["fp8_full"], peers)
        rank.publish()
        rank.adapter.wake()
        modules = dict(rank.double.model.named_modules())
        layers = [modules[attention_name(layer)] for layer in range(QWEN.num_layers)]
        return [[float(one._k_scale), one._v_scale_float, float(one._q_scale)] for one in layers]

    first, second = run_grid(1, 2, publish)
    assert first == [[2.0, pytest.approx(0.2), 1.0]] * 2, "the largest of heads 0 and 1"
    assert second == [[4.0, pytest.approx(0.4), 1.0]] * 2


def test_sound_ranks_draw_what_one_draws_and_cancel_together() -> None:
    def work(peers: Peers) -> list[tuple[str, tuple[int, ...]]]:
        rank = Rank(QWEN, PRECISIONS["bf16"], peers)
        rank.publish()
        with rank.adapter.session() as session:
            for name in ("kept", "cancelled"):
                session.submit(request(name))
            session.events()
            session.cancel("cancelled")
            events = drain(session)
        return [(one.request_id, one.completion.token_ids) for one in events if one.completion is not None]

    alone = work(ALONE)
    assert run_grid(1, 2, work) == [alone, alone] and {name for name, _ in alone} == {"kept"}


def test_several_requests_are_aborted_in_one_order() -> None:
    """vLLM frees the pages of several in the order of a set, which differs between processes."""
    rank = Rank(QWEN, PRECISIONS["bf16"], ALONE)
    rank.publish()
    asked: list[list[str]] = []
    rank.double.abort_request = asked.append  # type: ignore[assignment, method-assign]
    with rank.adapter.session() as session:
        session.submit(request("a"))
    assert asked == [["a#0"], ["a#1"]]


def test_work_without_other_ranks_is_done_alone() -> None:
    assert together(None, "x", lambda: 5) == 5
    output = SimpleNamespace(outputs=[], finished=True)
    assert step_together(None, lambda: [output]) == [output]


# ---------------------------------------------------------------- how they start


def test_all_ranks_have_the_smallest_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(peers: Peers) -> int:
        assert isinstance(peers, GridPeers)
        return fewest_tokens(peers.group, 1000 + 16 * peers.group.rank)

    assert run_grid(1, 2, work) == [1000, 1000]
    hosts = iter(["one", "two"])
    monkeypatch.setattr("octetrl.workers.build_engine.socket.gethostname", lambda: next(hosts))
    with pytest.raises(UserError, match=r"keeps the workers that share a model on one machine, and these are on "):
        run_grid(1, 2, work)


IN_A_PROCESS = """
import sys
import torch
from octetrl.trainer.peers import join_store
from octetrl.trainer.shards import Share
from octetrl.trainer.tensor_peers import connect_grid

here = torch.device("cpu")
peers = connect_grid(join_store(sys.argv[1]), Share(int(sys.argv[2]), 4), 2, here, deadline_seconds=300)
peers.group.join_default_group()
seen = torch.tensor([int(sys.argv[2])])
torch.distributed.all_reduce(seen)
beside = peers.sum(torch.tensor([1.0]), "beside")
limit = int(torch.distributed.group.WORLD._get_backend(here).options._timeout.total_seconds())
print(torch.distributed.get_rank(), torch.distributed.get_world_size(), int(seen), int(beside), limit)
"""


def test_each_group_of_workers_has_a_default_group_of_its_own() -> None:
    """vLLM's world. Groups of our own, which have none, go on beside it."""
    store, address = serve_store("127.0.0.1")
    command = [sys.executable, "-c", IN_A_PROCESS, address]
    started = [
        subprocess.Popen([*command, str(worker)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for worker in range(4)
    ]
    told = [one.communicate(timeout=120) for one in started]
    assert [out.strip() for out, _ in told] == ["0 2 1 2 300", "1 2 1 2 300", "0 2 5 2 300", "1 2 5 2 300"], told
    del store


def test_a_group_on_the_cpu_has_one_channel() -> None:
    def work(peers: Peers) -> bool:
        return isinstance(peers.group, TensorPeers) and peers.group.commands is peers.group

    assert run_grid(1, 2, work) == [True, True]


def errors_of(work: Callable[[Rank], object], fp8: str = "fp8_full") -> list[str]:
    """What `work` raises on each of two ranks."""

    def on_one(peers: Peers) -> str:
        rank = Rank(QWEN, PRECISIONS.get(fp8, Fp8Config(rollout=True)), peers)
        rank.publish()
        with pytest.raises((RuntimeError, ValueError, UserError)) as error:
            work(rank)
        return f"{type(error.value).__name__}: {error.value}"

    return run_grid(1, 2, on_one)


def damaged(name: str) -> Callable[[Rank], object]:
    """A byte of a parameter changes on the second rank alone."""

    def work(rank: Rank) -> object:
        if rank.spec.tensor.rank == 1:
            dict(rank.double.model.named_parameters())[name].data.view(torch.uint8)[1].bitwise_xor_(1)
        return rank.adapter.weights_digest()

    return work


def without_scale(rank: Rank) -> None:
    if rank.spec.tensor.rank == 1:
        delattr(getattr(rank.double.model.model.layers, "0").self_attn.o_proj, "weight_scale_inv")  # type: ignore[union-attr]
    rank.publish(1)


def with_other_padding(rank: Rank) -> None:
    if rank.spec.tensor.rank == 1:
        head = rank.double.model.lm_head
        head.weight = torch.nn.Parameter(torch.zeros(4160, QWEN.hidden_size, dtype=torch.bfloat16))  # type: ignore[union-attr]
    rank.publish(1)


def with_nan(rank: Rank) -> None:
    if rank.spec.tensor.rank == 1:
        with torch.no_grad():
            rank.model.layers[1].mlp.down_proj.weight[5, 7] = math.nan  # type: ignore[union-attr]
    rank.publish(1)


def quantized_as_on_a_gpu(weight: Tensor, *arguments: Any, **options: Any) -> Quantized:
    """A value that is not finite makes its scale NaN, and is refused later."""
    made = quantize_weight(weight.nan_to_num(), *arguments, **options)
    return made if bool(weight.isfinite().all()) else Quantized(made.codes, torch.full_like(made.scale, math.nan))


def with_a_scale_of_zero(rank: Rank) -> None:
    if rank.spec.tensor.rank == 1:
        assert rank.scales is not None
        rank.scales.scale_LS[1, 0] = 0.0
    rank.publish(1)


def with_a_scale_changed(rank: Rank) -> None:
    rank.adapter.wake()
    if rank.spec.tensor.rank == 1:
        rank.double.model.get_submodule(attention_name(1))._k_scale.fill_(9.0)  # type: ignore[union-attr, operator]
    rank.adapter.weights_digest()


def with_a_scale_rounded(rank: Rank) -> None:
    if rank.spec.tensor.rank == 1:
        attention = rank.double.model.get_submodule(attention_name(1))
        attention.register_buffer("_v_scale", torch.ones((), dtype=torch.bfloat16))
    rank.adapter.wake()


def that_cannot_sleep(rank: Rank) -> None:
    def assertion(level: int) -> None:
        raise RuntimeError("memory was not freed")

    if rank.spec.tensor.rank == 1:
        rank.double.sleep = assertion  # type: ignore[assignment, method-assign]
    rank.adapter.sleep()


def without_memory(rank: Rank) -> None:
    def full(tags: list[str]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    if rank.spec.tensor.rank == 1:
        rank.double.wake_up = full  # type: ignore[assignment, method-assign]
    rank.adapter.wake()


@pytest.mark.parametrize(
    ("work", "fp8", "expected"),
    [
        (damaged("model.layers.1.mlp.down_proj.weight"), "fp8_full", "layers.1.mlp.down_proj' differs from the"),
        (damaged("model.layers.0.self_attn.o_proj.weight_scale_inv"), "fp8_full", "layers.0.attention.o_proj' differs"),
        (damaged("lm_head.weight"), "bf16", "'lm_head.weight' differs from the trainer's at policy version 0"),
        (damaged("model.layers.1.mlp.down_proj.weight"), "fp8 rollout", "are not those of policy version 0 any more"),
        (without_scale, "fp8_full", "no parameter 'model.layers.0.self_attn.o_proj.weight_scale_inv'"),
        (with_other_padding, "bf16", "vLLM's 'lm_head.weight' is ("),
        (with_nan, "fp8 rollout", "layers.1.mlp.down_proj"),
        (with_a_scale_of_zero, "fp8_full", "KV scales: a scale is not above 0"),
        (with_a_scale_changed, "fp8_full", "vLLM's scales of K, V and Q in layer 1 are [9.0, "),
        (with_a_scale_rounded, "fp8_full", "vLLM's scales of K, V and Q in layer 1 are "),
        (that_cannot_sleep, "bf16", "memory was not freed"),
    ],
    ids=[
        *("codes", "scales", "vocabulary", "codes made here", "layout", "padding", "NaN", "KV scale"),
        *("KV scale changed", "KV scale rounded", "sleep"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(
    work: Callable[[Rank], object], fp8: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octetrl.backends.vllm.weights.quantize_weight", quantized_as_on_a_gpu)
    first, second = errors_of(work, fp8)
    assert expected in second
    assert expected in first and first.startswith("RuntimeError: vLLM's rank 1: ")


def test_memory_that_one_rank_lacks_is_one_line_on_all() -> None:
    first, second = errors_of(without_memory)
    assert first == second and first.startswith("UserError: engine.backend: vLLM's kv_cache do not fit beside")


def drawn_by(rank: Rank, change: Callable[[VllmDouble], object]) -> str:
    """What a session raises if the second rank's vLLM changes after two steps."""
    with pytest.raises(RuntimeError) as error, rank.adapter.session() as session:
        session.submit(request("a"))
        session.submit(request("b"))
        for _ in range(2):
            session.events()
        if rank.spec.tensor.rank == 1:
            change(rank.double)
        drain(session)
    assert not rank.double.requests, "what was unfinished is cancelled on all ranks"
    return str(error.value)


def other_tokens(double: VllmDouble) -> None:
    for one in double.requests:
        one.params = replace(one.params, seed=99)


def failing(double: VllmDouble) -> None:
    def step() -> Any:
        raise RuntimeError("vLLM's core has died")

    double.step = step  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (other_tokens, ["vLLM's 2 ranks have sampled different tokens in one step, so they would run different"] * 2),
        (failing, ["vLLM's rank 1: vLLM's core has died", "vLLM's core has died"]),
    ],
)
def test_a_rank_that_leaves_the_others_ends_the_session_on_all(
    change: Callable[[VllmDouble], object], expected: list[str]
) -> None:
    def work(peers: Peers) -> str:
        rank = Rank(QWEN, PRECISIONS["bf16"], peers)
        rank.publish()
        return drawn_by(rank, change)

    for found, begin in zip(run_grid(1, 2, work), expected, strict=True):
        assert found.startswith(begin)


def test_the_checksum_tells_whose_tokens_are_whose_and_what_has_finished() -> None:
    def drawn(*requests: tuple[list[int], bool]) -> int:
        return checksum([SimpleNamespace(outputs=[SimpleNamespace(token_ids=t)], finished=f) for t, f in requests])

    assert drawn(([1], False), ([2], False)) == drawn(([1], False), ([2], False))
    others = [drawn(([1], False), ([2], True)), drawn(([1, 2], False), ([], False)), drawn(([1], False))]
    assert len({drawn(([1], False), ([2], False)), *others}) == 4


def test_an_error_without_text_has_its_name_on_the_other_ranks() -> None:
    def work(peers: Peers) -> str:
        def fail() -> None:
            if peers.group.rank == 1:
                raise KeyError

        with pytest.raises((RuntimeError, KeyError)) as error:
            together(peers.group, "load", fail)  # type: ignore[arg-type]
        return str(error.value)

    assert run_grid(1, 2, work)[0] == "vLLM's rank 1: KeyError"
