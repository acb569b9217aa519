"""QK-norm, RoPE and KV replay in one kernel, against the ops one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.kernels.attention.kv_store import ReplayedKV, kv_replay
from octetrl.kernels.attention.qkv_rotate import qkv_rotate, qkv_rotate_triton
from octetrl.kernels.attention.records import Replay, Rotation
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rope import rope
from octetrl.models.blocks.attention.module import observe_amax
from octetrl.shapes.blocks import KVMode, KVTensors
from tests.unit.kernels.attention_cases import CACHES, by_token, qkv_to_rotate
from tests.unit.kernels.fused_row_cases import distance

pytestmark = pytest.mark.usefixtures("few_programs")

NEVER = -1.0
Inputs = tuple[Tensor, Rotation, int]
REPLAYS: list[tuple[KVMode, KVTensors]] = [cache.values for cache in CACHES]  # type: ignore[misc]
NORMED = [(6, 3, 32, True), (10, 5, 128, True), (2, 1, 16, True)]
CASES = [  # each kind of replay with a norm, in one of three sizes, and without
    (*shape, *replay)
    for number, replay in enumerate(REPLAYS)
    for shape in (NORMED[number % len(NORMED)], (9, 5, 64, False))
]


def _inputs(heads: int, kv_heads: int, size: int, norm: bool, dtype: torch.dtype = torch.bfloat16) -> Inputs:
    qkv, rotation = qkv_to_rotate(heads, kv_heads, size, norm, dtype)
    return qkv, by_token(rotation), kv_heads


def _replay(kv_heads: int, kv_mode: KVMode, quantized: KVTensors) -> Replay:
    """Per-head scales so small that a few values saturate."""
    v_scale = 0.004 + 0.001 * torch.arange(kv_heads)
    return Replay(kv_mode, 1.5 * v_scale, v_scale, quantized)


def _chain(inputs: Inputs, replay: Replay, amax: Tensor) -> tuple[Tensor, ReplayedKV]:
    qkv, (q_weight, k_weight, eps, cos, sin, _), kv_heads = inputs
    q, k, v = qkv.split((qkv.shape[1] - 2 * kv_heads, kv_heads, kv_heads), dim=1)
    if q_weight is not None and k_weight is not None:
        q, k = rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps)
    q, k = rope(q, cos, sin), rope(k, cos, sin)
    observe_amax(amax, k, v)
    return q, kv_replay(k, v, replay)


def _same(got: Tensor | None, want: Tensor | None) -> bool:
    return want is None if got is None else want is not None and got.dtype == want.dtype and torch.equal(got, want)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("kv_mode", "quantized"), REPLAYS)
def test_is_the_chain(kv_mode: KVMode, quantized: KVTensors, norm: bool) -> None:
    inputs, replay = _inputs(4, 2, 32, norm), _replay(2, kv_mode, quantized)
    got_amax, want_amax = (torch.tensor([[NEVER, 99.0], [0.5, NEVER]]) for _ in range(2))
    q, kv = qkv_rotate(*inputs, replay, got_amax)
    want_q, want_kv = _chain(inputs, replay, want_amax)
    assert torch.equal(q, want_q) and all(_same(got, want) for got, want in zip(kv, want_kv, strict=True))
    assert torch.equal(got_amax, want_amax) and (got_amax[:, 0] > 0.5).all()


@pytest.mark.parametrize(("heads", "kv_heads", "size", "norm", "kv_mode", "quantized"), CASES)
def test_kernel_is_near_the_reference(
    heads: int, kv_heads: int, size: int, norm: bool, kv_mode: KVMode, quantized: KVTensors
) -> None:
    inputs = _inputs(heads, kv_heads, size, norm, torch.float32)
    replay = _replay(kv_heads, kv_mode, quantized)
    want_amax = torch.full((2, kv_heads), NEVER)
    q, kv = qkv_rotate(*inputs, replay, want_amax)
    wide = torch.nn.functional.pad(inputs[0].flatten(1), (0, 16))[:, :-16].unflatten(1, (-1, size))
    amax = torch.full((2, 3, kv_heads), NEVER)[:, 1]
    got_q, got_kv = qkv_rotate_triton(wide, *inputs[1:], replay, amax)
    torch.testing.assert_close(got_q, q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(amax, want_amax, rtol=1e-5, atol=0)
    for ours, theirs in zip(got_kv, kv, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            rounded = 2**-7 if ours.dtype == torch.float32 else 0.12  # the interpreter's own way
            assert distance(ours, theirs) < (1e-5 if kv_mode == "none" else rounded)


def test_a_scale_without_a_finite_inverse_leaves_zeros_zero() -> None:
    inputs = _inputs(2, 3, 32, False, torch.float32)
    inputs[0][:, 2:] = 0.0
    scale = torch.tensor([2.3e-40, 1e-38, 1.0])
    replay = Replay("calibrated", scale, scale)
    (_, kv), (_, want) = qkv_rotate_triton(*inputs, replay, None), qkv_rotate(*inputs, replay)
    assert torch.equal(kv.k_TKD, want.k_TKD) and torch.equal(kv.v_TKD, want.v_TKD) and not kv.v_TKD.any()


def test_amax_is_raised_never_lowered_and_nan_sticks() -> None:
    inputs = _inputs(2, 3, 32, False, torch.float32)
    inputs[0][4, 2 + 1, 5] = float("nan")  # K's second head
    inputs[0][10, 2 + 3 + 2, 31] = float("inf")  # V's third
    amax = torch.tensor([[NEVER, NEVER, 50.0], [float("nan"), NEVER, NEVER]])
    want = amax.clone()
    qkv_rotate_triton(*inputs, Replay(), amax)
    qkv_rotate(*inputs, Replay(), want)
    torch.testing.assert_close(amax, want, rtol=1e-6, atol=0, equal_nan=True)
    assert amax[0, 1].isnan() and amax[0, 2] == 50 and amax[1, 0].isnan() and amax[1, 2].isinf()


def test_v_stays_a_view_where_it_is_not_quantised() -> None:
    inputs = _inputs(4, 2, 32, True, torch.float32)
    _, kv = qkv_rotate_triton(*inputs, Replay(), None)
    assert kv.v_TKD.data_ptr() == inputs[0][:, 6:].data_ptr() and kv.k_scale is kv.v_scale is None


def test_no_tokens_observe_nothing() -> None:
    qkv, rotation, kv_heads = _inputs(4, 2, 32, True)
    amax = torch.full((2, 2), NEVER)
    nowhere = rotation._replace(cos_SR=rotation.cos_SR[:0], sin_SR=rotation.sin_SR[:0])
    q, kv = qkv_rotate(qkv[:0], nowhere, kv_heads, Replay("dynamic"), amax)
    assert q.shape == (0, 4, 32) and kv.v_TKD.shape == (0, 2, 32) and (amax == NEVER).all()


def test_what_does_not_fit_is_refused() -> None:
    qkv, rotation, kv_heads = _inputs(4, 2, 32, True)
    with pytest.raises(AssertionError, match="only one of q and k"):
        qkv_rotate(qkv, rotation._replace(k_norm_D=None), kv_heads, Replay())
    with pytest.raises(AssertionError, match="8 heads with 4"):
        qkv_rotate(qkv, rotation, 4, Replay())
    with pytest.raises(AssertionError, match="cos"):
        qkv_rotate(qkv[1:], rotation, kv_heads, Replay())
    with pytest.raises(ValueError, match="needs the scales"):
        qkv_rotate(qkv, rotation, kv_heads, Replay("calibrated"))
