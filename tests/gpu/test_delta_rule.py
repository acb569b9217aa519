"""Gated DeltaNet on a GPU, at the sizes of published models: whole sequences, pieces, decode, drafts and captured
graphs have the same bits. Kernels are near the plain form, and gradients near float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.delta_rule.conv_heads import (
    conv_heads_backward,
    conv_heads_backward_reference,
    conv_heads_packed,
    conv_heads_reference,
    conv_heads_slots,
)
from octetrl.kernels.delta_rule.decay_and_beta import decay_and_beta, decay_and_beta_reference
from octetrl.kernels.delta_rule.delta_rule_packed import (
    delta_rule_packed,
    delta_rule_packed_backward_reference,
    delta_rule_packed_reference,
)
from octetrl.kernels.delta_rule.delta_rule_slots import delta_rule_slots
from octetrl.kernels.delta_rule.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_backward,
    gated_rms_norm_backward_reference,
    gated_rms_norm_reference,
)
from octetrl.kernels.delta_rule.state import DeltaState, SlotRows
from octetrl.shapes.delta_rule import DeltaShape
from tests.gpu.compare import captured, differing
from tests.unit.kernels.delta_cases import bounds_of, delta_inputs, poisoned_state, recurrence

pytestmark = pytest.mark.gpu

MOE_35B, DENSE_27B = DeltaShape(16, 32, 128, 128), DeltaShape(16, 48, 128, 128)
LENGTHS = (300, 1, 64, 129, 200)
SLOTS = (3, 0, 6, 5, 1)
BF16 = torch.bfloat16


def _on_gpu(inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return [x.cuda() for x in inputs]


def _state(shape: DeltaShape, conv_rows: int = 10) -> DeltaState:
    return DeltaState(*(kept.cuda() for kept in poisoned_state(7, BF16, shape, conv_rows)))


def _rows(firsts: list[int], counts: list[int], *, one_chunk: bool = False, slots: tuple[int, ...] = SLOTS) -> SlotRows:
    tensors = (bounds_of(*counts), torch.tensor(slots), torch.tensor(firsts))
    return SlotRows(*(x.cuda() for x in tensors), max(counts), one_chunk)


def _tokens(firsts: list[int], counts: list[int]) -> Tensor:
    starts = bounds_of(*LENGTHS).tolist()
    spans = [torch.arange(s + a, s + a + n) for s, a, n in zip(starts, firsts, counts, strict=False)]
    return torch.cat(spans).cuda()


def _plan(seed: int, longest: int, decode_from: float) -> list[tuple[list[int], list[int], bool]]:
    """Calls that bring every sequence to its end: random pieces, then decode with up to three rows of a chunk."""
    draw, at, plan = random.Random(seed), [0] * len(LENGTHS), []
    while at != list(LENGTHS):
        decode = sum(at) >= decode_from * sum(LENGTHS)
        counts = [min(draw.randint(0, 3 if decode else longest), n - a) for n, a in zip(LENGTHS, at, strict=True)]
        if decode:
            counts = [min(count, 64 - a % 64) for count, a in zip(counts, at, strict=True)]
        plan.append((list(at), counts, decode))
        at = [a + count for a, count in zip(at, counts, strict=True)]
    return [call for call in plan if sum(call[1])]


@pytest.mark.parametrize("shape", [MOE_35B, DENSE_27B], ids=["35b", "27b"])
def test_pieces_and_decode_have_the_bits_of_whole_sequences(shape: DeltaShape) -> None:
    inputs = _on_gpu(delta_inputs(sum(LENGTHS), shape, BF16))
    whole = delta_rule_packed(*inputs, bounds_of(*LENGTHS).cuda(), max(LENGTHS))
    for seed, longest, decode_from in ((0, 150, 0.5), (1, 40, 0.9), (2, 0, 0.0)):
        state, out = _state(shape), torch.full_like(whole, torch.nan)
        for firsts, counts, decode in _plan(seed, longest, decode_from):
            token_N = _tokens(firsts, counts)
            some, rows = [x[token_N] for x in inputs], _rows(firsts, counts, one_chunk=decode)
            out[token_N] = delta_rule_slots(*some, rows, state)
        assert differing([out], [whole]) == 0
    alone = delta_rule_packed(*(x[: LENGTHS[0]] for x in inputs), bounds_of(LENGTHS[0]).cuda(), LENGTHS[0])
    assert differing([alone], [whole[: LENGTHS[0]]]) == 0


def test_many_sequences_idle_rows_and_captured_graphs_change_no_bit() -> None:
    """100 sequences decode side by side from positions around a chunk's end; some slots are idle."""
    shape, prefix, steps = MOE_35B, 60, 10
    inputs = _on_gpu(delta_inputs(100 * (prefix + steps), shape, BF16))
    bounds = bounds_of(*[prefix + steps] * 100).cuda()
    want = delta_rule_packed(*inputs, bounds, prefix + steps).unflatten(0, (100, -1))
    by_sequence = [x.unflatten(0, (100, -1)) for x in inputs]
    state = DeltaState(*(kept.cuda() for kept in poisoned_state(100, BF16, shape)))
    slots = torch.randperm(100, generator=torch.Generator().manual_seed(0)).cuda()
    fill = SlotRows(bounds_of(*[prefix] * 100).cuda(), slots, torch.zeros_like(slots), prefix)
    delta_rule_slots(*(x[:, :prefix].flatten(0, 1).contiguous() for x in by_sequence), fill, state)
    idle = torch.arange(100, device="cuda") % 7 == 0
    first, some = torch.full_like(slots, prefix), [x[:, prefix].contiguous() for x in by_sequence]
    rows = SlotRows(bounds_of(*[1] * 100).cuda(), torch.where(idle, -1, slots), first, 1, one_chunk=True)
    before = [kept.clone() for kept in state]
    delta_rule_slots(*some, rows, state)
    for kept, old in zip(state, before, strict=True):
        kept.copy_(old)
    graph, out = captured(lambda: delta_rule_slots(*some, rows, state))
    for step in range(steps):
        first.fill_(prefix + step)
        for x, source in zip(some, by_sequence, strict=True):
            x.copy_(source[:, prefix + step])
        graph.replay()
        assert not out[idle].any() and differing([out[~idle]], [want[~idle, prefix + step]]) == 0


@pytest.mark.parametrize("shape", [MOE_35B], ids=["35b"])
def test_kernels_are_near_the_plain_form_and_gradients_near_float64(shape: DeltaShape) -> None:
    bounds = bounds_of(131, 1, 64).cuda()
    inputs = [x.requires_grad_() for x in _on_gpu(delta_inputs(196, shape, BF16))]
    out = delta_rule_packed(*inputs, bounds, 131)
    plain = [x.detach() for x in inputs]
    assert relative_error(out.detach(), delta_rule_packed_reference(*plain, bounds)) < 0.003
    do = torch.randn(out.shape, generator=torch.Generator("cuda").manual_seed(7), device="cuda").to(BF16)
    got = torch.autograd.grad(out, inputs, do)
    exact_inputs = [x.double().requires_grad_() for x in plain]
    exact = torch.autograd.grad(recurrence(*exact_inputs, bounds.cpu()), exact_inputs, do.double())
    of_plain = delta_rule_packed_backward_reference(do, *plain, bounds)
    for gradient, other, want in zip(got, of_plain, exact, strict=True):
        assert relative_error(other, want) < 0.003
        assert relative_error(gradient, want) < 0.01
    repeated = torch.autograd.grad(delta_rule_packed(*inputs, bounds, 131), inputs, do)
    assert differing(repeated, got) == 0


@pytest.mark.parametrize("shape", [MOE_35B], ids=["35b"])
def test_convolution(shape: DeltaShape) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    wide = torch.randn(sum(LENGTHS), shape.channels + 64, generator=generator, device="cuda").to(BF16)
    x, weight = wide[:, : shape.channels], torch.randn(shape.channels, 4, generator=generator, device="cuda").to(BF16)
    bounds = bounds_of(*LENGTHS).cuda()
    whole = conv_heads_packed(x, weight, bounds, max(LENGTHS), shape)
    plain = conv_heads_reference(x, weight, bounds, shape)
    for got, want in zip(whole, plain, strict=True):
        assert relative_error(got, want) < 1e-3
    for seed, longest, decode_from in ((0, 150, 0.5), (2, 0, 0.0)):
        state, out = _state(shape, shape.conv_rows(3)), [torch.full_like(part, torch.nan) for part in whole]
        for firsts, counts, _ in _plan(seed, longest, decode_from):
            token_N = _tokens(firsts, counts)
            for part, rows_of in zip(
                out, conv_heads_slots(x[token_N], weight, _rows(firsts, counts), state, shape), strict=True
            ):
                part[token_N] = rows_of
        assert differing(out, whole) == 0
    gradients = [torch.randn(part.shape, generator=generator, device="cuda").to(BF16) for part in whole]
    got = conv_heads_backward(*gradients, x, weight, bounds, max(LENGTHS), shape)
    exact = conv_heads_backward_reference(*(y.float() for y in gradients), x.float(), weight.float(), bounds, shape)
    assert all(relative_error(mine, want) < 0.006 for mine, want in zip(got, exact, strict=True))


def test_gated_norm_and_decays() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    dy, o, z = (torch.randn(300, 32, 128, generator=generator, device="cuda").to(BF16) for _ in range(3))
    weight = 1 + 0.1 * torch.randn(128, generator=generator, device="cuda").to(BF16)
    whole = gated_rms_norm(o, z, weight, 1e-6)
    assert relative_error(whole, gated_rms_norm_reference(o, z, weight, 1e-6)) < 1e-3
    assert differing([gated_rms_norm(o[7:8], torch.cat([z, z], 1)[7:8, 32:], weight, 1e-6)], [whole[7:8]]) == 0
    exact = gated_rms_norm_backward_reference(*(x.float() for x in (dy, o, z, weight)), 1e-6)
    got = gated_rms_norm_backward(dy, o, z, weight, 1e-6)
    assert all(relative_error(mine, want) < 0.004 for mine, want in zip(got, exact, strict=True))
    a, b = torch.randn(300, 64, generator=generator, device="cuda").split(32, 1)
    rates = torch.randn(2, 32, generator=generator, device="cuda").unbind()
    decays = decay_and_beta(9 * a, b, *rates)
    for mine, want in zip(decays, decay_and_beta_reference(9 * a, b, *rates), strict=True):
        torch.testing.assert_close(mine, want, rtol=3e-6, atol=1e-30)
    assert differing([x[5:6] for x in decays], decay_and_beta(9 * a[5:6], b[5:6], *rates)) == 0
