"""The gated delta rule: equal bits of a row in every way to compute it, transformers' functions, and gradients."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)
from triton.runtime import interpreter

from octetrl.kernels.delta_rule.delta_rule_chunks import delta_rule_chunks
from octetrl.kernels.delta_rule.delta_rule_packed import (
    delta_rule_packed,
    delta_rule_packed_backward_reference,
    delta_rule_packed_reference,
    delta_rule_packed_triton,
)
from octetrl.kernels.delta_rule.delta_rule_packed_backward import delta_rule_packed_backward_triton
from octetrl.kernels.delta_rule.delta_rule_reference import load_slots
from octetrl.kernels.delta_rule.delta_rule_rows import delta_rule_rows
from octetrl.kernels.delta_rule.delta_rule_slots import delta_rule_slots_reference, delta_rule_slots_triton
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows, copy_slot, join_planes, split_planes
from octetrl.shapes.delta_rule import DeltaShape
from tests.unit.kernels.delta_cases import SHAPE, bounds_of, delta_inputs, poisoned_state, recurrence

LENGTHS = (150, 1, 64, 65)


def _rows(firsts: list[int], counts: list[int], slots: list[int], one_chunk: bool = False) -> SlotRows:
    return SlotRows(bounds_of(*counts), torch.tensor(slots), torch.tensor(firsts), max(counts), one_chunk)


def _by_pieces(inputs: tuple[Tensor, ...], state: DeltaState, slots: list[int], longest: int, seed: int) -> Tensor:
    """o of the sequences of LENGTHS, which advance independently by random pieces."""
    bounds, draw = bounds_of(*LENGTHS).tolist(), random.Random(seed)
    out, at = torch.full_like(inputs[2], torch.nan), [0] * len(LENGTHS)
    while at != list(LENGTHS):
        counts = [min(draw.randint(0, longest), length - a) for length, a in zip(LENGTHS, at, strict=True)]
        token_N = torch.cat([torch.arange(b + a, b + a + n) for b, a, n in zip(bounds, at, counts, strict=False)])
        out[token_N] = delta_rule_slots_reference(*(x[token_N] for x in inputs), _rows(at, counts, slots), state)
        at = [a + n for a, n in zip(at, counts, strict=True)]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_and_single_rows_have_the_bits_of_whole_sequences(dtype: torch.dtype) -> None:
    inputs = delta_inputs(sum(LENGTHS), dtype=dtype)
    whole = delta_rule_packed_reference(*inputs, bounds_of(*LENGTHS))
    for seed, longest in enumerate((1, 5, 90)):
        state = poisoned_state(6, dtype)
        assert torch.equal(_by_pieces(inputs, state, [4, 0, 5, 2], longest, seed), whole)
        assert state.chunk[[4, 0, 5, 2], 0, 0].tolist() == [2, 0, 0, 1]
    first = LENGTHS[0]
    alone = delta_rule_packed_reference(*(x[:first] for x in inputs), bounds_of(first))
    assert torch.equal(alone, whole[:first])


def test_rows_of_siblings_drafts_and_repeated_forwards() -> None:
    """A copied slot goes on like its source; rows are overwritten by position, also where a chunk has just ended."""
    inputs = delta_inputs(140, dtype=torch.bfloat16)
    others = delta_inputs(140, dtype=torch.bfloat16, seed=1)
    whole = delta_rule_packed_reference(*inputs, bounds_of(140))
    state = poisoned_state(3, torch.bfloat16)

    def run(of: tuple[Tensor, ...], first: int, end: int, slot: int) -> Tensor:
        return delta_rule_slots_reference(*(x[first:end] for x in of), _rows([first], [end - first], [slot]), state)

    run(inputs, 0, 60, 2)
    for target in (0, 1):
        copy_slot(DeltaState(*(kept[None] for kept in state)), 2, target)
    run(others, 60, 64, 0)  # drafts, one of them the chunk's last row
    assert torch.equal(run(inputs, 60, 64, 0), whole[60:64])
    for _ in range(2):  # the second time nothing enters the state again
        assert torch.equal(run(inputs, 64, 65, 0), whole[64:65])
    assert torch.equal(run(inputs, 60, 140, 1), whole[60:])
    assert not torch.equal(run(others, 60, 140, 2), whole[60:])


def test_idle_rows_are_zero_and_write_nothing() -> None:
    inputs = delta_inputs(3, dtype=torch.bfloat16)
    state = poisoned_state(2, torch.bfloat16)
    before = [kept.clone() for kept in state]
    out = delta_rule_slots_reference(*inputs, _rows([0, 7, 0], [1, 1, 1], [-1, -1, 1]), state)
    assert not out[:2].any() and torch.equal(
        out[2:], delta_rule_packed_reference(*(x[2:] for x in inputs), bounds_of(1))
    )
    assert all(torch.equal(x[0].view(torch.uint8), y[0].view(torch.uint8)) for x, y in zip(state, before, strict=True))


def test_rows_that_do_not_follow_are_refused() -> None:
    state = poisoned_state(1, torch.float32)
    with pytest.raises(AssertionError, match="do not follow"):
        delta_rule_slots_reference(*delta_inputs(1), _rows([64], [1], [0]), state)


def test_equals_transformers() -> None:
    q, k, v, g, beta = inputs = delta_inputs(200)
    group = SHAPE.value_heads // SHAPE.key_heads
    q, k = (x.repeat_interleave(group, 1) for x in (q * SHAPE.key_size**0.5, k))
    got = delta_rule_packed_reference(*inputs, bounds_of(200))
    for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        theirs, _ = function(*(x[None] for x in (q, k, v, g, beta)), initial_state=None, output_final_state=False)
        torch.testing.assert_close(got, theirs[0], rtol=0, atol=3e-7)


def test_bf16_is_near_float64() -> None:
    """Rounding the exact output alone costs 0.0017 of its norm."""
    inputs, bounds = delta_inputs(200, dtype=torch.bfloat16), bounds_of(130, 70)
    exact = recurrence(*inputs, bounds)
    error = delta_rule_packed_reference(*inputs, bounds).double() - exact
    assert error.norm() < 0.004 * exact.norm()


def test_gradients_equal_autograd_in_float64() -> None:
    bounds = bounds_of(131, 1, 64)
    inputs = [x.requires_grad_() for x in delta_inputs(196)]
    do = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(7))
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = torch.autograd.grad(recurrence(*exact_inputs, bounds), exact_inputs, do.double())
    got = torch.autograd.grad(delta_rule_packed(*inputs, bounds, 131), inputs, do)
    for gradient, want in zip(got, exact, strict=True):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-5)


def test_planes_are_the_float32() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.0, 3.4e38, 1e-42], dtype=torch.float32)
    bits = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).int()
    x = torch.cat([special, bits.view(torch.float32)])
    high, low = split_planes(x)
    is_nan = x.isnan()
    assert torch.equal(join_planes(high, low)[~is_nan].view(torch.int32), x[~is_nan].view(torch.int32))
    assert high[is_nan].isnan().all() and join_planes(high, low)[is_nan].isnan().all()
    ordinary = x[x.abs() < 1e38]
    assert (
        (split_planes(ordinary)[0].double() - ordinary.double()).abs() <= ordinary.double().abs() * 2**-8 + 1e-40
    ).all()


# ---------------------------------------------------------------- kernels

FEW = DeltaShape(key_heads=1, value_heads=2, key_size=16, value_size=16)


@pytest.fixture
def rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter truncates to BF16. With the right rounding, kernels have the bits of the references here."""
    convert = interpreter._convert_float

    def rounding(data: np.ndarray, source: tl.dtype, target: tl.dtype, mode: object) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = data.view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounding)


def _error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.usefixtures("rounded_to_nearest")
def test_training_kernels_are_near_the_references() -> None:
    bounds, inputs = bounds_of(66, 1, 5), delta_inputs(72, FEW, torch.bfloat16)
    q, k, v, g, beta = inputs
    do = torch.randn(v.shape, generator=torch.Generator().manual_seed(7)).bfloat16()
    chunks = delta_rule_chunks(q, k, g, beta, bounds, FEW)
    out, kept = delta_rule_rows(q, k, v, beta, bounds, chunks, FEW, keep=True)
    assert kept is not None
    gradients = delta_rule_packed_backward_triton(do, *inputs, bounds, FEW, chunks, kept)
    assert torch.equal(delta_rule_packed_triton(*inputs, bounds), out)
    assert _error(out, delta_rule_packed_reference(*inputs, bounds)) < 1e-3
    for gradient, want in zip(gradients, delta_rule_packed_backward_reference(do, *inputs, bounds), strict=True):
        assert _error(gradient, want) < 0.01


@pytest.mark.usefixtures("rounded_to_nearest")
@pytest.mark.parametrize(
    ("firsts", "counts", "one_chunk", "shape"),
    [
        ([60, 0, 64], [6, 0, 2], False, FEW),  # pieces: one ends a chunk, one starts one
        ([60, 0, 64], [3, 1, 1], True, FEW),  # decode, with drafts; a chunk enters the state
        ([70, 0, 64], [1, 1, 1], True, DeltaShape(1, 2, 128, 128)),
    ],
)
def test_kernels_of_slots_are_near_the_references(
    firsts: list[int], counts: list[int], one_chunk: bool, shape: DeltaShape
) -> None:
    inputs, slots = delta_inputs(200, shape, torch.bfloat16), [2, 0, 3]
    theirs = poisoned_state(4, torch.bfloat16, shape)
    before = sum(firsts)
    delta_rule_slots_reference(*(x[:before] for x in inputs), _rows([0, 0, 0], firsts, slots), theirs)
    ours = DeltaState(*(kept.clone() for kept in theirs))
    rows = [x[before : before + sum(counts)] for x in inputs]
    got = delta_rule_slots_triton(*rows, _rows(firsts, counts, slots, one_chunk), ours)
    assert _error(got, delta_rule_slots_reference(*rows, _rows(firsts, counts, slots), theirs)) < 1e-3
    assert torch.equal(ours.chunk[2:], theirs.chunk[2:])
    mine, exact = (load_slots(x, torch.tensor([2, 3])) for x in (ours, theirs))
    assert _error(mine.s, exact.s) < 1e-3
    for name in ("k", "d", "gamma"):
        assert _error(getattr(mine, name)[:, :, :1], getattr(exact, name)[:, :, :1]) < 1e-3
