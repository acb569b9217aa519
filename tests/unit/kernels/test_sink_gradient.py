"""Sinks of attention against a softmax with one score more: values, gradients, any start of the merge, the kernels."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention import attention_reference
from octetrl.kernels.attention.attention_packed import attention_packed
from octetrl.kernels.attention.sink_gradient import sink_gradient_reference, sink_gradient_triton
from tests.unit.kernels.attention_cases import cu_seqlens_of, random_qkv

SCALE, LENGTHS = 0.2, [1, 331, 33]


def with_sinks(q, k, v, sinks, window):
    """float64, one sequence at a time."""
    outs = []
    for q_s, k_s, v_s in zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True):
        group = q_s.shape[1] // k_s.shape[1]
        k_s, v_s = (x.repeat_interleave(group, 1) for x in (k_s, v_s))
        age = torch.arange(len(q_s))[:, None] - torch.arange(len(q_s))
        scores = torch.einsum("thd,shd->hts", q_s, k_s) * SCALE
        scores = scores.masked_fill((age < 0) | (age >= window), -torch.inf)
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q_s), 1)], -1)
        outs.append(torch.einsum("hts,shd->thd", scores.softmax(-1)[..., :-1], v_s))
    return torch.cat(outs)


@pytest.mark.parametrize("window", [40, 1000])
def test_values_and_gradients_are_float64s(window, monkeypatch):
    """Chunks of one tile. A sink may be far above or below all scores."""
    monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)
    sinks = torch.tensor([-40.0, 0.3, 2.0, 30.0])
    inputs = [x.contiguous().requires_grad_() for x in (*random_qkv(LENGTHS, 2, 2, 32, torch.float32), sinks)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    want = with_sinks(*exact, window)
    out = attention_packed(*inputs[:3], cu_seqlens_of(LENGTHS), 331, SCALE, window=window, sinks_H=inputs[3])
    assert relative_error(out, want) < 1e-6
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(want, exact, dout.double())
    for got, gradient in zip(torch.autograd.grad(out, inputs, dout), expected, strict=True):
        assert (got.double() - gradient).norm() < 1e-5 * max(gradient.norm(), dout.double().norm())
    assert expected[3].abs().min() > 0 or window == 40


def test_a_frozen_sink_has_no_gradient():
    q, k, v = (x.requires_grad_() for x in random_qkv(LENGTHS, 1, 2, 16, torch.bfloat16))
    sinks = torch.zeros(2, dtype=torch.bfloat16)
    attention_packed(q, k, v, cu_seqlens_of(LENGTHS), 331, SCALE, sinks_H=sinks).sum().backward()
    assert q.grad is not None and sinks.grad is None


@pytest.mark.parametrize(("tokens", "head_size"), [(1, 16), (130, 64), (300, 80), (0, 64)])
def test_the_gradients_kernel_is_near_the_reference(tokens, head_size):
    generator = torch.Generator().manual_seed(0)
    dout, out = (torch.randn(tokens, 3, head_size, generator=generator) for _ in range(2))
    lse2, sinks = torch.randn(tokens, 3, generator=generator) + 3, torch.randn(3, generator=generator)
    arguments = (dout, out, lse2, sinks)
    torch.testing.assert_close(sink_gradient_triton(*arguments), sink_gradient_reference(*arguments))
