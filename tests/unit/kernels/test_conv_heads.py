"""The convolution and heads of gated DeltaNet against torch's, its pieces against whole sequences, and gradients."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.kernels.delta_rule.conv_heads import (
    EPS,
    Heads,
    conv_heads_backward_reference,
    conv_heads_backward_triton,
    conv_heads_packed,
    conv_heads_reference,
    conv_heads_slots,
    conv_heads_triton,
)
from octetrl.kernels.delta_rule.state import SlotRows
from octetrl.shapes.delta_rule import DeltaShape
from tests.unit.kernels.delta_cases import bounds_of, poisoned_state
from tests.unit.kernels.fused_row_cases import normal

SHAPE = DeltaShape(key_heads=2, value_heads=3, key_size=16, value_size=32)
LENGTHS = (70, 1, 2, 31)


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return normal(sum(LENGTHS), SHAPE.channels, dtype=dtype), normal(SHAPE.channels, 4, seed=1, dtype=dtype)


def _formula(x: Tensor, weight: Tensor) -> Heads:
    """One sequence by torch's convolution."""
    conv = F.conv1d(F.pad(x.T[None], (3, 0)), weight[:, None], groups=len(weight))
    q, k, v = F.silu(conv[0].T).split([32, 32, 96], 1)
    q, k = (y.view(-1, 2, 16) for y in (q, k))
    q, k = (y / (y.square().sum(-1, keepdim=True) + EPS).sqrt() for y in (q, k))
    return Heads(q / 4, k, v.view(-1, 3, 32))


def _exact(x: Tensor, weight: Tensor) -> Heads:
    return Heads(*map(torch.cat, zip(*(_formula(part, weight) for part in x.split(LENGTHS)), strict=True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_torch(dtype: torch.dtype) -> None:
    x, weight = _inputs(dtype)
    got = conv_heads_packed(x, weight, bounds_of(*LENGTHS), max(LENGTHS), SHAPE)
    for mine, want in zip(got, _exact(x.double(), weight.double()), strict=True):
        assert mine.dtype == dtype and mine.is_contiguous()
        torch.testing.assert_close(mine.double(), want, rtol=1e-5 if dtype == torch.float32 else 2**-8, atol=1e-6)


@pytest.mark.parametrize(("longest", "conv_rows"), [(1, 10), (3, 12), (40, 10)])
def test_pieces_have_the_bits_of_whole_sequences(longest: int, conv_rows: int) -> None:
    x, weight = _inputs(torch.bfloat16)
    bounds = bounds_of(*LENGTHS).tolist()
    whole = conv_heads_packed(x, weight, bounds_of(*LENGTHS), max(LENGTHS), SHAPE)
    state, draw = poisoned_state(5, torch.bfloat16, SHAPE, conv_rows), random.Random(longest)
    at = [0] * len(LENGTHS)
    while at != list(LENGTHS):
        counts = [min(draw.randint(0, longest), length - a) for length, a in zip(LENGTHS, at, strict=True)]
        token_N = torch.cat([torch.arange(b + a, b + a + n) for b, a, n in zip(bounds, at, counts, strict=False)])
        rows = SlotRows(bounds_of(*counts), torch.tensor([3, 0, 4, 1]), torch.tensor(at), max(counts))
        for got, want in zip(conv_heads_slots(x[token_N], weight, rows, state, SHAPE), whole, strict=True):
            assert torch.equal(got, want[token_N])
        at = [a + n for a, n in zip(at, counts, strict=True)]


def test_wrong_drafts_leave_nothing_and_idle_rows_are_zero() -> None:
    x, weight = _inputs(torch.bfloat16)
    state = poisoned_state(2, torch.bfloat16, SHAPE, SHAPE.conv_rows(3))

    def run(of: Tensor, first: int, slot: int) -> Heads:
        rows = SlotRows(bounds_of(len(of)), torch.tensor([slot]), torch.tensor([first]), len(of))
        return conv_heads_slots(of, weight, rows, state, SHAPE)

    whole = conv_heads_packed(x[:20], weight, bounds_of(20), 20, SHAPE)
    run(x[:15], 0, 1)
    run(torch.cat([x[15:16], 1 + x[16:18]]), 15, 1)
    before = state.conv.clone()
    assert not any(part.any() for part in run(x[:2], 3, -1))
    assert torch.equal(state.conv.view(torch.int16), before.view(torch.int16))
    assert all(torch.equal(got, want[16:19]) for got, want in zip(run(x[16:19], 16, 1), whole, strict=True))


@pytest.mark.parametrize("run", [conv_heads_reference, conv_heads_triton])
@pytest.mark.parametrize("pieces", [(150, 41), (63, 37, 28, 5, 58), (192,)])
def test_a_slot_goes_back_to_the_start_of_its_last_chunk(pieces: tuple[int, ...], run: Any) -> None:
    x, weight = normal(200, SHAPE.channels, dtype=torch.bfloat16), _inputs(torch.bfloat16)[1]
    state = poisoned_state(1, torch.bfloat16, SHAPE)

    def of(first: int, end: int) -> Heads:
        rows = SlotRows(bounds_of(end - first), torch.tensor([0]), torch.tensor([first]), end - first)
        return run(x[first:end], weight, rows.cu_seqlens_B1, SHAPE, rows, state)

    for first, count in zip(accumulate((0, *pieces)), pieces, strict=False):
        of(first, first + count)
    whole = run(x, weight, bounds_of(200), SHAPE)
    assert all(torch.equal(mine, theirs[128:]) for mine, theirs in zip(of(128, 200), whole, strict=True))


def test_gradients_equal_autograd_in_float64() -> None:
    x, weight = (y.requires_grad_() for y in _inputs(torch.float32))
    heads = conv_heads_packed(x, weight, bounds_of(*LENGTHS), max(LENGTHS), SHAPE)
    gradients = [normal(*part.shape, seed=seed, dtype=torch.float32) for seed, part in enumerate(heads, 5)]
    x64, weight64 = (y.detach().double().requires_grad_() for y in (x, weight))
    want = torch.autograd.grad(_exact(x64, weight64), (x64, weight64), [y.double() for y in gradients])
    got = torch.autograd.grad(heads, (x, weight), gradients)
    for mine, exact in zip(got, want, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def test_kernels_are_near_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last two tokens belong to no sequence; the second sequence's slot is idle."""
    monkeypatch.setattr("octetrl.kernels.delta_rule.conv_heads.PROGRAMS", 2)
    lengths = (18, 1, 2, 9)
    x, weight = normal(32, SHAPE.channels, dtype=torch.float32), _inputs(torch.float32)[1]
    inputs = x, weight, bounds_of(*lengths), SHAPE
    want = conv_heads_reference(*inputs)
    torch.testing.assert_close(conv_heads_triton(*inputs), want, rtol=1e-5, atol=1e-6)
    gradients = [normal(*part.shape, seed=seed, dtype=torch.float32) for seed, part in enumerate(want, 5)]
    got, exact = (run(*gradients, *inputs) for run in (conv_heads_backward_triton, conv_heads_backward_reference))
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)
    states = [poisoned_state(5, torch.float32, SHAPE) for _ in range(2)]
    for first, counts in (([0, 0, 0, 0], lengths), ([18, 0, 2, 9], (1, 1, 1, 1))):  # longer than conv, and decode
        rows = SlotRows(bounds_of(*counts), torch.tensor([3, -1, 0, 4]), torch.tensor(first), max(counts))
        in_slots = x[: sum(counts)], weight, rows.cu_seqlens_B1, SHAPE, rows
        ours, theirs = conv_heads_triton(*in_slots, states[0]), conv_heads_reference(*in_slots, states[1])
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert torch.equal(states[0].conv.view(torch.int32), states[1].conv.view(torch.int32))
