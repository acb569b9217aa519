"""QK-norm, RoPE and the store into pages in one kernel, against the references one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import octetrl.kernels.attention.qkv_store as module
from octetrl.kernels.attention.kv_store import by_key, kv_store
from octetrl.kernels.attention.qkv_store import qkv_store, qkv_store_triton
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rope import rope
from octetrl.shapes.blocks import KVTensors
from tests.unit.kernels.attention_cases import CACHES, ROTATED, PagedCache, qkv_to_rotate
from tests.unit.kernels.fused_row_cases import distance

CASES = [  # every pair of a shape, a cache, and few or many tokens
    (*shape, *cache.values, (number + which) % 2 == 0)
    for number, cache in enumerate(CACHES)
    for which, shape in enumerate([(6, 3, 32, True), (9, 5, 64, False)])
]


def _pages(
    kv_heads: int,
    size: int,
    kv_mode: str,
    quantized: KVTensors,
    page_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> PagedCache:
    """Per-head scales so small that a few values saturate."""
    v_scale = torch.full((kv_heads,), 0.004) if kv_mode == "calibrated" else None
    k_scale = v_scale * 1.5 if v_scale is not None and quantized != "v" else None
    return PagedCache([ROTATED], kv_heads, size, page_size, kv_mode, dtype, k_scale, v_scale, "cpu", quantized)


def _slots(cache: PagedCache) -> Tensor:
    slots = cache.slots([ROTATED])
    slots[[2, -1]] = -1
    return slots


def _stored(cache: PagedCache) -> list[Tensor]:
    """Both caches by key, and the scales of tokens."""
    scales = [x.token_scale for x in (cache.k, cache.v) if x.token_scale is not None]
    return [cache.k.pages.float(), by_key(cache.v.pages).float(), *scales]


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
def test_is_the_chain(kv_mode: str, quantized: KVTensors, norm: bool) -> None:
    qkv, rotation = inputs = qkv_to_rotate(4, 2, 32, norm)
    q_norm, k_norm, eps, *_ = rotation
    got, want = (_pages(2, 32, kv_mode, quantized) for _ in range(2))
    got_count, want_count = (torch.zeros(2, 2, dtype=torch.int64) for _ in range(2))
    q = qkv_store(*inputs, got.k, got.v, _slots(got), saturated_2K=got_count)
    want_q, k, v = qkv.split((4, 2, 2), dim=1)
    if q_norm is not None and k_norm is not None:
        want_q, k = rms_norm(want_q, q_norm, eps), rms_norm(k, k_norm, eps)
    want_q, k = (rope(x, *rotation.angles_of_tokens()) for x in (want_q, k))
    kv_store(k, v, want.k, want.v, _slots(want), saturated_2K=want_count)
    assert torch.equal(q, want_q) and q.is_contiguous()
    assert all(torch.equal(g, w) for g, w in zip(_stored(got), _stored(want), strict=True))
    assert torch.equal(got_count, want_count) and (
        kv_mode != "calibrated" or got_count[int(quantized != "k")].sum() > 0
    )


@pytest.mark.parametrize(("heads", "kv_heads", "size", "norm", "kv_mode", "quantized", "many"), CASES)
def test_kernel_is_near_the_reference(
    heads: int,
    kv_heads: int,
    size: int,
    norm: bool,
    kv_mode: str,
    quantized: KVTensors,
    many: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MANY_TOKENS", 1 if many else 1024)
    inputs = qkv_to_rotate(heads, kv_heads, size, norm, torch.float32)
    got, want = (_pages(kv_heads, size, kv_mode, quantized, 8, torch.float32) for _ in range(2))
    got_count, want_count = (torch.zeros(2, kv_heads, dtype=torch.int64) for _ in range(2))
    want_q = qkv_store(*inputs, want.k, want.v, _slots(want), saturated_2K=want_count)
    flat = torch.nn.functional.pad(inputs[0].flatten(1), (0, 16))[:, :-16]  # tokens further apart than they are long
    q = qkv_store_triton(flat, inputs[1], got.k, got.v, _slots(got), saturated_2K=got_count)
    torch.testing.assert_close(q, want_q, rtol=1e-5, atol=1e-6)
    for stored, reference in zip(_stored(got), _stored(want), strict=True):
        assert distance(stored, reference) < 0.07
        assert torch.equal(stored.abs().amax((1, -1)) == 0, reference.abs().amax((1, -1)) == 0)
    assert ((got_count - want_count).abs() <= 1 + want_count / 10).all()  # some lie on the border


def test_zeros_keep_the_references_sign() -> None:
    """Zeros of both signs and values, in all pairs that RoPE makes, at position 0 (sin is 0) and at others."""
    inputs = qkv_to_rotate(4, 2, 32, False, torch.float32)
    signs = torch.tensor([0.0, -0.0, 1.5, -1.5])
    inputs[0][:] = torch.cat([signs.repeat_interleave(4), signs.repeat(4)])
    got, want = (_pages(2, 32, "none", False, dtype=torch.float32) for _ in range(2))
    want_q = qkv_store(*inputs, want.k, want.v, _slots(want))
    q = qkv_store_triton(inputs[0].flatten(1), inputs[1], got.k, got.v, _slots(got))
    for result, reference in ((q, want_q), (got.k.pages, want.k.pages)):
        zero = reference == 0
        assert zero.any() and torch.equal(result == 0, zero)
        assert torch.equal(result[zero].signbit(), reference[zero].signbit())


def test_padding_has_a_q_and_leaves_the_pages_alone() -> None:
    inputs = qkv_to_rotate(4, 2, 32, True, torch.float32)
    cache = _pages(2, 32, "calibrated", True)
    count = torch.zeros(2, 2, dtype=torch.int64)
    nowhere = torch.full((ROTATED,), -1)
    q = qkv_store_triton(inputs[0].flatten(1), inputs[1], cache.k, cache.v, nowhere, saturated_2K=count)
    assert all(x.count_nonzero() == 0 for x in (cache.k.pages.float(), cache.v.pages.float(), count))
    want = qkv_store(*inputs, cache.k, cache.v, nowhere)
    torch.testing.assert_close(q, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("many", [False, True])
def test_a_counter_for_each_token_has_the_tokens_own_values(many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_TOKENS", 1 if many else 1024)
    inputs = qkv_to_rotate(4, 2, 32, True, torch.float32)
    cache = _pages(2, 32, "calibrated", True, 8, torch.float32)
    slots = _slots(cache)
    for store in (qkv_store, qkv_store_triton):
        shared = torch.zeros(2, 2, dtype=torch.int64)
        by_token = torch.zeros(ROTATED + 2, 3, 4, dtype=torch.int64)[:, 1].unflatten(1, (2, 2))  # more rows than tokens
        first = (inputs[0].flatten(1), inputs[1], cache.k, cache.v)
        store(*first, slots, saturated_2K=shared)
        store(*first, slots, saturated_2K=by_token)
        assert shared.sum() > 0 and torch.equal(by_token.sum(0), shared)
        for token in (0, 2, ROTATED - 2):
            alone = torch.zeros(2, 2, dtype=torch.int64)
            nowhere = torch.full_like(slots, -1)
            nowhere[token] = slots[token]
            store(*first, nowhere, saturated_2K=alone)
            assert torch.equal(by_token[token], alone)


def test_one_norm_without_the_other_is_refused() -> None:
    qkv, rotation = qkv_to_rotate(4, 2, 32, True)
    cache = _pages(2, 32, "none", False)
    with pytest.raises(AssertionError, match="only one of q and k"):
        qkv_store(qkv, rotation._replace(k_norm_D=None), cache.k, cache.v, _slots(cache))
