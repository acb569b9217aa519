"""Extreme scales of K and V: the kernels of a Hopper GPU give the references' bytes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.fp8.format import decode_e4m3
from octetrl.kernels.attention.kv_store import kv_replay, kv_store
from octetrl.kernels.attention.qkv_rotate import qkv_rotate
from octetrl.kernels.attention.qkv_store import qkv_store
from octetrl.kernels.attention.records import Replay, Rotation
from tests.gpu.compare import differing
from tests.unit.kernels.attention_cases import PagedCache

pytestmark = pytest.mark.gpu

# Of heads, the smallest BF16 has 2.2e-43. No finite inverse: the first four. The border, 1 / FLT_MAX, is 2.94e-39.
SCALES = (2.2e-43, 2.3e-40, 1e-39, 2.938e-39, 2.939e-39, 1e-38, 1.0, 1e30, 7.5659e35)
TOKENS, SIZE, HEADS = 70, 64, 3


def quantised(device: str) -> dict[str, Tensor]:
    """K and V of heads of these scales through every kernel that quantises them by given scales, on the CPU through the
    references. RoPE is at position 0, where it changes nothing."""
    generator, heads = torch.Generator().manual_seed(0), len(SCALES)
    scale_K = torch.tensor(SCALES)
    kv = torch.randn(2, TOKENS, heads, SIZE, generator=generator, dtype=torch.float64) * 200 * scale_K[:, None]
    kv[:, ::7] = 0.0  # whole zeros, and at times a zero among values
    kv[..., 5] *= -0.0
    largest = torch.finfo(torch.bfloat16).max
    k, v = kv.clamp(-largest, largest).bfloat16()
    q = torch.randn(TOKENS, HEADS * heads, SIZE, generator=generator).bfloat16()
    qkv, scale_K = torch.cat([q, k, v], 1).to(device), scale_K.to(device)
    _, k, v = qkv.split((HEADS * heads, heads, heads), 1)
    cos, sin = torch.ones(TOKENS, SIZE // 2, device=device), torch.zeros(TOKENS, SIZE // 2, device=device)
    rotation = Rotation(None, None, 1e-6, cos, sin)
    results: dict[str, Tensor] = {}
    for name in ("kv_store", "qkv_store"):
        cache = PagedCache([TOKENS], heads, SIZE, 64, "calibrated", torch.bfloat16, scale_K, scale_K, device)
        count = torch.zeros(2, heads, dtype=torch.int64, device=device)
        pages = (cache.k, cache.v, cache.slots([TOKENS]), count)
        if name == "kv_store":
            kv_store(k, v, *pages)
        else:
            at = torch.arange(TOKENS, device=device)
            qkv_store(qkv.flatten(1), rotation._replace(positions_T=at), *pages)
        results |= {f"{name} K": cache.k.pages, f"{name} V": cache.v.pages, f"{name} saturated": count}
    replay = Replay("calibrated", scale_K, scale_K)
    _, rotated = qkv_rotate(qkv, rotation, heads, replay)
    for name, replayed in (("kv_replay", kv_replay(k, v, replay)), ("qkv_rotate", rotated)):
        results |= {f"{name} K": replayed.k_TKD, f"{name} V": replayed.v_TKD}
    return results


def test_kernels_have_the_references_bytes_at_any_scale() -> None:
    want = quantised("cpu")
    assert all(decode_e4m3(result).isfinite().all() for result in want.values())
    got = quantised("cuda")
    wrong = {name: count for name in want if (count := differing([got[name]], [want[name]]))}
    assert not wrong
