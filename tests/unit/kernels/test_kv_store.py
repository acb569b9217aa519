"""Writing K and V into pages: the right place, the quantiser's bytes, the counted saturation, the refusals."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.kv_store import (
    by_key,
    kv_replay,
    kv_replay_reference,
    kv_replay_triton,
    kv_store,
    kv_store_reference,
    kv_store_triton,
)
from octetrl.kernels.attention.records import CachedPages, Replay
from tests.unit.kernels.attention_cases import CACHES, PagedCache, random_qkv, replay_of


def read_back(cache, slots):
    page_size = cache.k.pages.shape[2]
    return [x.float()[slots // page_size, :, slots % page_size] for x in (cache.k.pages, by_key(cache.v.pages))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unquantised_values_come_back_as_they_went_in(dtype):
    _, k, v = random_qkv([5, 20], 2, 1, 16, dtype)
    cache = PagedCache([5, 20], 2, 16, 8, "none", dtype, None, None)
    slots = cache.slots([5, 20])
    kv_store(k, v, cache.k, cache.v, slots)
    for got, want in zip(read_back(cache, slots), (k, v), strict=True):
        assert torch.equal(got, want.float())


def test_only_the_codes_of_v_are_turned_inside_their_page():
    k = torch.arange(1.0, 17.0).view(1, 1, 16).bfloat16()
    v = k + 16
    ones = torch.ones(1)
    for kv_mode, shape in (("none", (2, 1, 8, 16)), ("calibrated", (2, 1, 16, 8))):
        cache = PagedCache([1], 1, 16, 8, kv_mode, torch.bfloat16, ones, ones)
        kv_store(k, v, cache.k, cache.v, torch.tensor([8 + 3]))
        v_page = cache.v.pages[1, 0].float()
        assert cache.v.pages.shape == shape and cache.k.pages.shape == (2, 1, 8, 16)
        assert torch.equal(cache.k.pages[1, 0, 3].float(), k[0, 0].float())
        written = v_page[:, 3] if kv_mode == "calibrated" else v_page[3]
        assert torch.equal(written, v[0, 0].float().to(cache.v.pages.dtype).float())
        assert v_page.count_nonzero() == 16


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
def test_cache_and_replay_hold_the_same_codes_and_scales(kv_mode, quantized):
    _, k, v = random_qkv([33], 2, 1, 32, torch.bfloat16)
    cache = PagedCache.filled([33], k, v, kv_mode, quantized, 16)
    slots = cache.slots([33])
    replayed = kv_replay(k, v, replay_of(k, v, kv_mode, quantized))
    k_codes, v_codes = read_back(cache, slots)
    assert torch.equal(k_codes, replayed.k_TKD.float())
    assert torch.equal(v_codes, replayed.v_TKD.float())
    assert quantized != "v" or torch.equal(k_codes, k.float())
    assert quantized != "k" or torch.equal(v_codes, v.float())
    for paged, scale in ((cache.k.token_scale, replayed.k_scale), (cache.v.token_scale, replayed.v_scale)):
        assert paged is None or torch.equal(paged[slots // 16, :, slots % 16], scale)


@pytest.mark.parametrize("kv_mode", ["calibrated", "dynamic"])
def test_dequantised_values_lie_within_half_a_step_of_e4m3(kv_mode):
    _, k, v = random_qkv([50], 2, 1, 64, torch.bfloat16)
    scales = tuple(x.float().abs().amax(dim=(0, 2)) * 1.05 / 448 for x in (k, v))
    replayed = kv_replay(k, v, Replay(kv_mode, *scales))
    k_scale = scales[0][None] if kv_mode == "calibrated" else replayed.k_scale
    k_float = k.float()
    error = (replayed.k_TKD.float() * k_scale[..., None] - k_float).abs()
    assert (error <= k_float.abs() / 16 + k_scale[..., None] * 2**-9).all()


def test_values_past_the_calibrated_range_are_clamped_and_counted():
    k = torch.tensor([[[1.0, -500.0], [449.0, 448.0]]], dtype=torch.bfloat16)  # 449 is 448 in BF16
    v = torch.tensor([[[float("nan"), 500.0], [0.0, float("-inf")]]], dtype=torch.bfloat16)
    cache = PagedCache([1], 2, 2, 16, "calibrated", torch.bfloat16, torch.ones(2), torch.ones(2))
    counter = torch.ones(2, 2, dtype=torch.int64)
    slots = cache.slots([1])
    kv_store(k, v, cache.k, cache.v, slots, saturated_2K=counter)
    assert counter.tolist() == [[2, 1], [3, 2]]
    by_token = torch.zeros(3, 2, 2, dtype=torch.int64)
    nowhere = torch.cat((slots, torch.tensor([-1])))
    kv_store(k.repeat(2, 1, 1), v.repeat(2, 1, 1), cache.k, cache.v, nowhere, saturated_2K=by_token)
    assert by_token.tolist() == [[[1, 0], [2, 1]], [[0, 0], [0, 0]], [[0, 0], [0, 0]]]
    k_codes, v_codes = read_back(cache, slots)
    assert k_codes.tolist() == [[[1.0, -448.0], [448.0, 448.0]]]
    assert v_codes[0, 0, 0].isnan() and v_codes[0, 1].tolist() == [0.0, -448.0]


def test_a_k_left_in_bf16_is_neither_clamped_nor_counted():
    k = torch.full((1, 1, 4), 1000.0, dtype=torch.bfloat16)
    cache = PagedCache([1], 1, 4, 16, "calibrated", torch.bfloat16, None, torch.ones(1), quantized="v")
    counter = torch.zeros(2, 1, dtype=torch.int64)
    slots = cache.slots([1])
    kv_store(k, k, cache.k, cache.v, slots, saturated_2K=counter)
    assert counter.tolist() == [[0], [4]]
    assert [x.unique().item() for x in read_back(cache, slots)] == [1000.0, 448.0]


def test_slot_minus_one_writes_nothing():
    _, k, v = random_qkv([3], 1, 1, 16, torch.bfloat16)
    cache = PagedCache([3], 1, 16, 16, "none", torch.bfloat16, None, None)
    slots = cache.slots([3])
    slots[1] = -1
    kv_store(k, v, cache.k, cache.v, slots)
    assert cache.k.pages.abs().amax(dim=(1, 3)).count_nonzero() == 2


def test_an_fp8_cache_without_scales_is_refused():
    _, k, v = random_qkv([1], 1, 1, 16, torch.bfloat16)
    codes = CachedPages(torch.zeros(1, 1, 16, 16).to(E4M3))  # square, so it is a K as well as a V
    for k_pages in (codes, CachedPages(codes.pages.bfloat16())):
        with pytest.raises(ValueError, match="needs either per-head scales"):
            kv_store(k, v, k_pages, codes, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="needs the scales"):
        kv_replay(k, v, Replay("calibrated"))


EXTREME_SCALES = torch.tensor([2.3e-40, 2.0**-118, 1.0, 2.0**118])  # the first has no finite inverse


def test_the_kernels_hold_extreme_scales_as_the_references_do():
    """Codes of E4M3's own values, which the interpreter rounds as a GPU does; the first head is all zeros."""
    values = torch.tensor([0.0, -0.0, 1.0, -448.0, 2.0**-6, 1.75, 0.0, 64.0])
    x = (values * EXTREME_SCALES[:, None]).expand(5, 4, 8).bfloat16()
    x[:, 0] = torch.tensor([0.0, -0.0] * 4)
    replay = Replay("calibrated", EXTREME_SCALES, EXTREME_SCALES)
    got, want = kv_replay_triton(x, x, replay), kv_replay_reference(x, x, replay)
    assert torch.equal(got.k_TKD, want.k_TKD) and torch.equal(got.v_TKD, want.v_TKD)
    assert torch.equal(got.v_TKD[0].float(), torch.stack([0 * values, values, values, values]))
    caches = [PagedCache([5], 4, 8, 8, "calibrated", torch.bfloat16, EXTREME_SCALES, EXTREME_SCALES) for _ in range(2)]
    for store, cache in zip((kv_store_triton, kv_store_reference), caches, strict=True):
        counter = torch.zeros(2, 4, dtype=torch.int64)
        store(x, x, cache.k, cache.v, cache.slots([5]), counter)
        assert not counter.any()
    for ours, theirs in zip(*((cache.k.pages, cache.v.pages) for cache in caches), strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
