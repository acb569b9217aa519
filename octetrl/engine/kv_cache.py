"""The pages of K and V: their size, format and number, and copies of pages.

    K and V      [L, num_pages, ...]: one layer's pages are one contiguous slice of it (`LayerCache`), and what is in
                 a page, K's rows or V's turned codes, is said in kernels/attention/kv_store.py
    calibrated   E4M3 codes and one float32 scale per layer and KV head, in buffers that stay when the pages are freed
    dynamic      E4M3 codes and one float32 scale per token and KV head, [L, num_pages, K, page_size]
    none         the model's dtype; also K's format beside an E4M3 V if the policy says so

All layers share page numbers, so a page is copied in every layer at once. Pages start as zeros: decode multiplies the
values past the end of a sequence by 0, and stray bytes could be NaN.

L layers, K KV heads, D head size.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octetrl.config.schema import EngineConfig
from octetrl.config.spec import ModelSpec
from octetrl.engine.batch_rows import to_device
from octetrl.fp8.format import E4M3
from octetrl.fp8.policy import Format, PrecisionPolicy
from octetrl.kernels.attention.kv_store import v_pages_shape
from octetrl.layers.context import LayerCache


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """What one page looks like."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    page_size: int
    k_dtype: torch.dtype
    v_dtype: torch.dtype
    token_scales: bool  # "dynamic"

    @property
    def bytes_per_page(self) -> int:
        rows = self.num_layers * self.num_kv_heads * self.page_size
        scales = sum(4 for dtype in (self.k_dtype, self.v_dtype) if self.token_scales and dtype == E4M3)
        return rows * (self.head_size * (self.k_dtype.itemsize + self.v_dtype.itemsize) + scales)

    @property
    def scaled_tensors(self) -> int:
        """How many of K and V are E4M3."""
        return (self.k_dtype == E4M3) + (self.v_dtype == E4M3)


def cache_format(spec: ModelSpec, policy: PrecisionPolicy, dtype: torch.dtype, page_size: int) -> CacheFormat:
    """The format of a page under the precision policy. `dtype`: the model's."""

    def stored(fmt: Format) -> torch.dtype:
        return E4M3 if fmt == "fp8" else dtype

    return CacheFormat(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        page_size=page_size,
        k_dtype=stored(policy.k_cache),
        v_dtype=stored(policy.v_cache),
        token_scales=policy.kv_mode == "dynamic",
    )


def configured_pages(config: EngineConfig, page: CacheFormat, device: torch.device) -> int | None:
    """Number of pages by the recipe or the GPU's free memory. None on a CPU without `kv_cache_tokens`: as needed."""
    if config.kv_cache_tokens is not None:
        return max(1, config.kv_cache_tokens // config.page_size)
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(config.kv_memory_fraction * (free + unused)) // page.bytes_per_page


def host_pages(config: EngineConfig, page: CacheFormat) -> int:
    """Largest number of pages of a CPU run: `kv_memory_fraction` of the machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(config.kv_memory_fraction * memory) // page.bytes_per_page


class KVCache:
    """`num_pages` pages of every layer. `scale_2LK`: calibrated scales of K and V, float32, filled by the engine."""

    def __init__(
        self, page: CacheFormat, num_pages: int, device: torch.device, scale_2LK: Tensor | None = None
    ) -> None:
        self.page, self.num_pages = page, num_pages
        rows = (num_pages, page.num_kv_heads, page.page_size)
        shapes = (torch.Size((*rows, page.head_size)), v_pages_shape(*rows, page.head_size, page.v_dtype))
        pools: list[Tensor] = []
        token_scales: list[Tensor | None] = []
        for dtype, (*outer, inner) in zip((page.k_dtype, page.v_dtype), shapes, strict=True):
            zeros = torch.zeros(page.num_layers, *outer, inner * dtype.itemsize, dtype=torch.uint8, device=device)
            pool = zeros.view(dtype)
            with_scale = page.token_scales and dtype == E4M3
            scale = torch.ones(page.num_layers, *rows, device=device) if with_scale else None
            pools.append(pool)
            token_scales.append(scale)
        copied = [*pools, *(scale for scale in token_scales if scale is not None)]
        # wide words: E4M3 has no indexing, bytes are slow
        self._copied = [pool.flatten(2).view(torch.int64) for pool in copied]
        self.saturated_L2K: Tensor | None = None
        if scale_2LK is not None:
            heads = (page.num_layers, 2, page.num_kv_heads)
            self.saturated_L2K = torch.zeros(heads, dtype=torch.int64, device=device)
        self.layers = tuple(
            LayerCache(
                k=pools[0][layer],
                v=pools[1][layer],
                k_scale_K=scale_2LK[0, layer] if scale_2LK is not None and page.k_dtype == E4M3 else None,
                v_scale_K=scale_2LK[1, layer] if scale_2LK is not None and page.v_dtype == E4M3 else None,
                k_token_scale=None if token_scales[0] is None else token_scales[0][layer],
                v_token_scale=None if token_scales[1] is None else token_scales[1][layer],
                saturated_2K=None if self.saturated_L2K is None else self.saturated_L2K[layer],
            )
            for layer in range(page.num_layers)
        )

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """For each (a, b), copies page `a` to page `b` in every layer, with scales. All are read before any is written.

        The host does not wait for the device."""
        if not copies:
            return
        source, target = to_device(np.array(copies, dtype=np.int64).T, self._copied[0].device).unbind()
        for pool in self._copied:
            pool[:, target] = pool[:, source]
