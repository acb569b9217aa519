"""The pages: formats by policy, sizes, and copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import EngineConfig
from octetrl.engine.kv_cache import KVCache, cache_format, configured_pages, sized_by_requests
from octetrl.fp8.format import E4M3
from octetrl.fp8.policy import precision_policy
from octetrl.kernels.attention.kv_store import v_pages_shape
from tests.unit.engine.tiny_engine import PRECISIONS, SPEC

CPU = torch.device("cpu")


def page_of(precision: str):
    return cache_format(SPEC, precision_policy(SPEC, PRECISIONS[precision]), torch.bfloat16, page_size=32)


@pytest.mark.parametrize(
    ("precision", "dtype", "bytes_per_page"),
    [
        ("bf16", torch.bfloat16, 2 * 2 * 32 * 16 * 4),
        ("fp8_full", E4M3, 2 * 2 * 32 * 16 * 2),
        ("fp8_dynamic", E4M3, 2 * 2 * 32 * (16 * 2 + 8)),
    ],
)
def test_the_policy_decides_the_format(precision: str, dtype: torch.dtype, bytes_per_page: int) -> None:
    page = page_of(precision)
    assert page.bytes_per_page == bytes_per_page
    cache = KVCache(page, 3, CPU, torch.ones(2, 4) if precision == "fp8_full" else None)
    k, v = cache.layers[1].tensors
    assert k.pages.shape == (3, 2, 32, 16) and k.pages.dtype == v.pages.dtype == dtype
    assert v.pages.shape == v_pages_shape(3, 2, 32, 16, dtype)
    assert sum(t.numel() * t.element_size() for t in tensors_of(cache)) == 3 * page.bytes_per_page
    assert (k.scale is not None) == (cache.layers[1].saturated_S is not None) == (precision == "fp8_full")


def test_k_stays_bf16_where_fp8_would_ruin_it() -> None:
    spec = replace(SPEC, qk_norm=False, qkv_bias=True)
    policy = precision_policy(spec, Fp8Config(kv_cache="calibrated"))
    page = cache_format(spec, policy, torch.bfloat16, page_size=16)
    k, v = KVCache(page, 1, CPU, torch.ones(2, 4)).layers[0].tensors
    assert (k.pages.dtype, v.pages.dtype) == (torch.bfloat16, E4M3)
    assert k.scale is None and v.scale is not None


@pytest.mark.parametrize("alone", ["k", "v"])
@pytest.mark.parametrize("mode", ["calibrated", "int8"])
def test_the_recipe_may_leave_k_or_v_in_bf16(mode: Literal["calibrated", "int8"], alone: Literal["k", "v"]) -> None:
    """Codes, scales and the count of clamped values are those of the chosen tensor alone."""
    policy = precision_policy(SPEC, Fp8Config(kv_cache=mode, kv_cache_tensors=alone))
    page = cache_format(SPEC, policy, torch.bfloat16, page_size=16)
    cache = KVCache(page, 2, CPU, torch.ones(2, 4) if mode == "calibrated" else None)
    coded, other = cache.layers[0].tensors if alone == "k" else reversed(cache.layers[0].tensors)
    assert (coded.pages.dtype, other.pages.dtype) == (torch.int8 if mode == "int8" else E4M3, torch.bfloat16)
    assert other.scale is None and other.token_scale is None
    assert (coded.scale is not None, coded.token_scale is not None) == (mode == "calibrated", mode == "int8")
    assert page.num_clamping_scales == (2 * 2 if mode == "calibrated" else 0)
    assert page.bytes_per_page == 2 * 16 * 2 * (16 * 3 + (4 if mode == "int8" else 0))
    assert sum(t.numel() * t.element_size() for t in tensors_of(cache)) == 2 * page.bytes_per_page


def tensors_of(cache: KVCache) -> list[torch.Tensor]:
    held = [t for layer in cache.layers for one in layer.tensors for t in (one.pages, one.token_scale)]
    return [t for t in held if t is not None]


@pytest.mark.parametrize("precision", ["bf16", "fp8_dynamic"])
def test_pages_are_copied_whole_and_all_at_once(precision: str) -> None:
    cache = KVCache(page_of(precision), 4, CPU)
    for number, tensor in enumerate(tensors_of(cache)):
        for page in range(4):
            tensor[page] = torch.full(tensor[page].shape, 4.0 * number + page).to(tensor.dtype)
    before = [tensor.float().clone() for tensor in tensors_of(cache)]
    cache.copy_pages([(0, 1), (1, 2)])
    for tensor, old in zip(tensors_of(cache), before, strict=True):
        assert torch.equal(tensor.float(), old[[0, 0, 1, 3]])


def test_capacity_follows_the_recipe() -> None:
    page = page_of("bf16")
    assert configured_pages(EngineConfig(page_size=16, kv_cache_tokens=100), page, CPU) == 6
    assert sized_by_requests(EngineConfig(page_size=16), CPU)
