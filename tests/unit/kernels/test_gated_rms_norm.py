"""Gated DeltaNet's norm and its decays against the formulas in float64, their gradients, and rows in another batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from octetrl.kernels.delta_rule.decay_and_beta import (
    decay_and_beta,
    decay_and_beta_reference,
    decay_and_beta_triton,
)
from octetrl.kernels.delta_rule.gated_rms_norm import (
    gated_rms_norm,
    gated_rms_norm_backward_reference,
    gated_rms_norm_backward_triton,
    gated_rms_norm_reference,
    gated_rms_norm_triton,
)
from tests.unit.kernels.fused_row_cases import normal

EPS = 1e-6
F32 = torch.float32


def _norm(o: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return o * (o.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight * silu(z)


def _decays(a: Tensor, b: Tensor, log_rate: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return -log_rate.exp() * softplus(a + dt_bias), b.sigmoid()


def _agree(
    got: tuple[Tensor, ...], inputs: list[Tensor], exact: tuple[Tensor, ...], exact_inputs: list[Tensor]
) -> None:
    gradients = [normal(*y.shape, seed=seed, dtype=F32) for seed, y in enumerate(got, 20)]
    for mine, want in zip(got, exact, strict=True):
        torch.testing.assert_close(mine.double(), want, rtol=1e-6, atol=1e-7)
    mine = torch.autograd.grad(got, inputs, gradients)
    for gradient, want in zip(
        mine, torch.autograd.grad(exact, exact_inputs, [y.double() for y in gradients]), strict=True
    ):
        torch.testing.assert_close(gradient.double(), want, rtol=1e-4, atol=1e-5)


def test_norm_and_gradients_equal_float64() -> None:
    z = normal(9, 8, 32, seed=1, dtype=F32)[:, 2:6]
    inputs = [normal(9, 4, 32, dtype=F32), z, 1 + 0.1 * normal(32, seed=2, dtype=F32)]
    inputs = [x.requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    _agree((gated_rms_norm(*inputs, EPS),), inputs, (_norm(*exact_inputs),), exact_inputs)


def test_a_bf16_norm_is_rounded_once() -> None:
    inputs = [normal(50, 4, 32, seed=seed, dtype=torch.bfloat16) for seed in range(2)]
    inputs.append(1 + 0.1 * normal(32, seed=2, dtype=torch.bfloat16))
    exact = _norm(*(x.double() for x in inputs))
    got = gated_rms_norm(*inputs, EPS)
    assert ((got.double() - exact).abs() <= exact.abs() * 2**-8.99 * 2 + 1e-7).all()
    assert torch.equal(gated_rms_norm(inputs[0][7:8], inputs[1][7:8], inputs[2], EPS), got[7:8])


def test_decays_and_gradients_equal_float64() -> None:
    inputs = [normal(*sizes, seed=seed, dtype=F32) for seed, sizes in enumerate(((40, 6), (40, 6), (6,), (6,)))]
    inputs[0][0], inputs[0][1] = 60.0, -60.0  # where exp overflows, or vanishes beside 1
    inputs = [x.requires_grad_() for x in inputs]
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    _agree(decay_and_beta(*inputs), inputs, _decays(*exact_inputs), exact_inputs)


def test_kernels_are_near_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octetrl.kernels.delta_rule.gated_rms_norm.PROGRAMS", 3)
    dy, z = (normal(9, 8, 24, seed=seed, dtype=F32)[:, 2:6] for seed in range(2))
    inputs = normal(9, 4, 24, seed=2, dtype=F32), z, normal(24, seed=3, dtype=F32), EPS
    got = gated_rms_norm_triton(*inputs), *gated_rms_norm_backward_triton(dy, *inputs)
    want = gated_rms_norm_reference(*inputs), *gated_rms_norm_backward_reference(dy, *inputs)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    a, b = normal(50, 6, seed=4, dtype=F32).split(3, 1)
    decays = 9 * a, b, normal(3, seed=5, dtype=F32), normal(3, seed=6, dtype=F32)
    for got, want in zip(decay_and_beta_triton(*decays), decay_and_beta_reference(*decays), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
