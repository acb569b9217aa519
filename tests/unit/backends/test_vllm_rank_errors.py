"""Errors of one rank of a tensor-parallel vLLM: all ranks raise them, and none waits for the others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.backends.vllm.names import attention_name
from octetrl.backends.vllm.ranks import checksum, together
from octetrl.config.schema import Fp8Config
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.system.errors import UserError
from octetrl.trainer.peers import Peers
from tests.grid import run_grid
from tests.parity.sides import PRECISIONS
from tests.unit.backends.setting import drain, request
from tests.unit.backends.test_vllm_ranks import QWEN, Rank
from tests.unit.backends.vllm_double import VllmDouble


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
