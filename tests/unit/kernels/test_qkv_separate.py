"""Head sizes that are no powers of two: the separate kernels, interpreted, against the references."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.attention import qkv_rotate, qkv_rotate_backward, qkv_separate, qkv_store
from octetrl.kernels.attention.records import Replay
from octetrl.shapes.blocks import KVMode, KVTensors
from tests.unit.kernels.attention_cases import CACHES, ROTATED, PagedCache, by_token, qkv_to_rotate
from tests.unit.kernels.fused_row_cases import distance, normal

pytestmark = pytest.mark.usefixtures("few_programs")

HEADS, KV_HEADS = 4, 2
SHAPES = pytest.mark.parametrize(
    ("size", "norm", "rotated"), [(80, True, 80), (96, False, 96), (192, True, 192), (64, True, 32), (32, False, 24)]
)
CODES = 0.12  # the interpreter rounds some FP8 values to the neighbouring code


def _scales(mode: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (torch.full((KV_HEADS,), 0.006), torch.full((KV_HEADS,), 0.004)) if mode == "calibrated" else (None, None)


@SHAPES
@pytest.mark.parametrize(("kv_mode", "quantized"), [*CACHES[:3], CACHES[-3]])
def test_store_writes_the_references_pages(
    size: int, norm: bool, rotated: int, kv_mode: str, quantized: KVTensors
) -> None:
    qkv, rotation = qkv_to_rotate(HEADS, KV_HEADS, size, norm, torch.float32, rotated // 2)
    got, want = (
        PagedCache([ROTATED], KV_HEADS, size, 16, kv_mode, torch.float32, *_scales(kv_mode), "cpu", quantized)
        for _ in range(2)
    )
    slots = got.slots([ROTATED])
    slots[2] = -1
    q = qkv_separate.qkv_store_separate(qkv.flatten(1), rotation, got.k, got.v, slots)
    want_q = qkv_store.qkv_store(qkv, rotation, want.k, want.v, slots)
    torch.testing.assert_close(q, want_q, rtol=1e-5, atol=1e-6)
    assert all(distance(x.pages, y.pages) < CODES for x, y in ((got.k, want.k), (got.v, want.v)))


@SHAPES
@pytest.mark.parametrize(
    ("kv_mode", "quantized"),
    [
        ("none", "both"),
        ("calibrated", "both"),
        ("dynamic", "both"),
        ("int8", "both"),
        ("int8", "k"),
        ("calibrated", "v"),
    ],
)
def test_rotate_replays_and_observes_as_the_reference(
    size: int, norm: bool, rotated: int, kv_mode: KVMode, quantized: KVTensors
) -> None:
    qkv, rotation = qkv_to_rotate(HEADS, KV_HEADS, size, norm, torch.float32, rotated // 2)
    inputs = (qkv, by_token(rotation), KV_HEADS, Replay(kv_mode, *_scales(kv_mode), quantized))
    got_amax, want_amax = (torch.full((2, KV_HEADS), -1.0) for _ in range(2))
    q, kv = qkv_separate.qkv_rotate_separate(*inputs, got_amax)
    want_q, want_kv = qkv_rotate.qkv_rotate_reference(*inputs, want_amax)
    torch.testing.assert_close(q, want_q, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got_amax, want_amax, rtol=1e-5, atol=0)
    for ours, theirs in zip(kv, want_kv, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or distance(ours, theirs) < (1e-5 if kv_mode == "none" else CODES)


@SHAPES
def test_backward_is_near_the_reference(size: int, norm: bool, rotated: int) -> None:
    qkv, rotation = qkv_to_rotate(HEADS, KV_HEADS, size, norm, torch.float32, rotated // 2)
    gradients = normal(ROTATED, HEADS + 2 * KV_HEADS, size, seed=5, dtype=torch.float32).split(
        (HEADS, KV_HEADS, KV_HEADS), 1
    )
    got = qkv_separate.qkv_rotate_backward_separate(*gradients, qkv, by_token(rotation))
    want = qkv_rotate_backward.qkv_rotate_backward_reference(*gradients, qkv, by_token(rotation))
    for ours, theirs in zip(got, want, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_powers_of_two_are_fused() -> None:
    assert [size for size in (16, 32, 64, 80, 96, 128, 192, 256) if not qkv_separate.is_fused(size)] == [80, 96, 192]
    assert qkv_separate.is_fused(64, 32) and not qkv_separate.is_fused(64, 16), "half of the head is rotated"
    with pytest.raises(AssertionError, match="not a power of two"):
        qkv_rotate.tile_of(96, 4)
