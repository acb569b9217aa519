"""The backward of QK-norm and RoPE in one kernel, against float64 autograd of the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.kernels.attention.qkv_rotate_backward import (
    qkv_rotate_backward,
    qkv_rotate_backward_reference,
    qkv_rotate_backward_triton,
)
from octetrl.kernels.attention.records import Rotation
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rope import rope
from tests.unit.kernels.attention_cases import by_token, qkv_to_rotate
from tests.unit.kernels.fused_row_cases import normal

pytestmark = pytest.mark.usefixtures("few_programs")

SHAPES = [(6, 3, 32, True), (9, 5, 64, False), (10, 5, 128, True), (2, 1, 16, True)]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Rotation]


def _inputs(heads: int, kv_heads: int, size: int, norm: bool, dtype: torch.dtype = torch.float32) -> Inputs:
    qkv, rotation = qkv_to_rotate(heads, kv_heads, size, norm, dtype)
    dq, dk, dv = normal(*qkv.shape, seed=5, dtype=dtype).split((heads, kv_heads, kv_heads), 1)
    return dq, dk, dv, 2 * qkv, by_token(rotation)


def _exact(inputs: Inputs) -> list[Tensor]:
    """dqkv and the weights' gradients, of float64 autograd."""
    dq, dk, dv, qkv, (q_weight, k_weight, eps, cos, sin, _) = inputs
    leaves = [x.double().requires_grad_() for x in (qkv, q_weight, k_weight) if x is not None]
    q, k, v = leaves[0].split((dq.shape[1], dk.shape[1], dv.shape[1]), dim=1)
    if len(leaves) > 1:
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * w for x, w in zip((q, k), leaves[1:], strict=True)
        )
    rotated = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        rotated.append(torch.cat((first * c - second * s, second * c + first * s), -1))
    outputs = torch.cat([*rotated, v], 1)
    return list(torch.autograd.grad(outputs, leaves, torch.cat([dq, dk, dv], 1).double()))


def _present(got: tuple[Tensor, Tensor | None, Tensor | None]) -> list[Tensor]:
    return [x for x in got if x is not None]


@pytest.mark.parametrize(("heads", "kv_heads", "size", "norm"), SHAPES)
def test_equals_autograd_in_float64(heads: int, kv_heads: int, size: int, norm: bool) -> None:
    inputs = _inputs(heads, kv_heads, size, norm)
    got, want = _present(qkv_rotate_backward(*inputs)), _exact(inputs)
    assert len(got) == len(want) == (3 if norm else 1)
    for ours, exact in zip(got, want, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


def test_is_the_chain_without_the_rounding_between() -> None:
    """In float32 the ops' own backwards, one after the other, give the same."""
    dq, dk, dv, qkv, (q_weight, k_weight, eps, cos, sin, _) = inputs = _inputs(4, 2, 32, True)
    assert q_weight is not None and k_weight is not None
    leaves = [x.clone().requires_grad_() for x in (qkv, q_weight, k_weight)]
    q, k, v = leaves[0].split((4, 2, 2), dim=1)
    outputs = (rope(rms_norm(q, leaves[1], eps), cos, sin), rope(rms_norm(k, leaves[2], eps), cos, sin), v)
    want = torch.autograd.grad(outputs, leaves, (dq, dk, dv))
    for ours, theirs in zip(_present(qkv_rotate_backward(*inputs)), want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_bf16_is_rounded_once() -> None:
    inputs = _inputs(4, 2, 32, True, torch.bfloat16)
    for ours, exact in zip(_present(qkv_rotate_backward(*inputs)), _exact(inputs), strict=True):
        assert ours.dtype == torch.bfloat16
        assert ((ours.double() - exact).abs() <= exact.abs() * 2**-7.99 + 1e-5).all()


@pytest.mark.parametrize(("heads", "kv_heads", "size", "norm"), SHAPES)
def test_kernel_is_near_the_reference(heads: int, kv_heads: int, size: int, norm: bool) -> None:
    dq, dk, dv, qkv, rotation = _inputs(heads, kv_heads, size, norm)
    wide = torch.nn.functional.pad(qkv.flatten(1), (0, 16))[:, :-16].unflatten(1, (-1, size))
    by_head = dk.transpose(0, 1).contiguous().transpose(0, 1)  # another order of its axes
    got = _present(qkv_rotate_backward_triton(dq, by_head, dv, wide, rotation))
    want = _present(qkv_rotate_backward_reference(dq, dk, dv, qkv, rotation))
    assert got[0].is_contiguous() and len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_no_tokens_give_weights_no_gradient() -> None:
    dq, dk, dv, qkv, rotation = _inputs(4, 2, 32, True)
    nowhere = rotation._replace(cos_SR=rotation.cos_SR[:0], sin_SR=rotation.sin_SR[:0])
    empty = (dq[:0], dk[:0], dv[:0], qkv[:0], nowhere)
    dqkv, dq_weight, dk_weight = qkv_rotate_backward_triton(*empty)
    assert dqkv.shape == (0, 8, 32) and dq_weight is not None and dk_weight is not None
    assert dq_weight.count_nonzero() == dk_weight.count_nonzero() == 0


def test_one_norm_without_the_other_is_refused() -> None:
    *tensors, rotation = _inputs(4, 2, 32, True)
    with pytest.raises(AssertionError, match="only one"):
        qkv_rotate_backward(*tensors, rotation._replace(k_norm_D=None))
