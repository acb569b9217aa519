"""The pages of the KV cache: their size, format and number, and copies of pages.

A block's layout says what its layer caches of a token, and how a page of it is laid out (`CachedTensor`). A pool
[L, num_pages, ...] holds one such tensor; one layer's pages are one contiguous slice of it (`LayerCache`).

    calibrated   E4M3 codes and float32 scales per layer, in a buffer that stays when the pages are freed
    dynamic      E4M3 codes and float32 scales per token, in pages of their own
    int8         the same with 8-bit integers as codes
    none         the model's dtype; also that of a tensor that FP8 would ruin, beside codes

All layers share page numbers, so a page is copied in every layer at once. Pages start as zeros: decode multiplies the
values past the end of a sequence by 0, and stray bytes could be NaN.

L layers (of a pool: those that cache its tensor), S scales of a layer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

from octetrl.config.schema import EngineConfig
from octetrl.engine.pinned import to_device
from octetrl.fp8.format import E4M3
from octetrl.fp8.kv_scales import KVScales, split_scales
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.kernels.attention.kv_store import is_transposed, v_page
from octetrl.kernels.rows.count_kept_rows import count_kept_rows
from octetrl.layers.context import CachedPages, LayerCache
from octetrl.layers.tensor_group import TensorGroup
from octetrl.shapes.blocks import SCALE_PER_TOKEN, CachedTensor
from octetrl.shapes.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A cached tensor in its format."""

    layout: CachedTensor
    dtype: torch.dtype
    token_scales: bool  # "dynamic" and "int8", of a tensor in codes

    @property
    def is_clamped(self) -> bool:
        """Whether values past a calibrated range are clamped."""
        return self.dtype == E4M3 and not self.token_scales

    @property
    def bytes_per_token(self) -> int:
        return self.layout.bytes_per_token(self.dtype.itemsize, token_scales=self.token_scales)

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        *outer, inner = self.layout.shape
        return (*outer, *(v_page(page_size, inner, self.dtype) if self.layout.codes_turned else (page_size, inner)))

    @property
    def turned(self) -> bool:
        """Whether a page has a token's values in a column, as V's codes (kernels/attention/kv_store.py)."""
        return self.layout.codes_turned and is_transposed(self.dtype)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """What one page looks like: what every layer stores."""

    layers: tuple[tuple[StoredTensor, ...], ...]
    page_size: int

    @property
    def bytes_per_page(self) -> int:
        return self.page_size * sum(stored.bytes_per_token for layer in self.layers for stored in layer)

    @property
    def num_clamping_scales(self) -> int:
        """Calibrated scales of all layers whose tensors are E4M3."""
        return sum(stored.layout.num_scales for layer in self.layers for stored in layer if stored.is_clamped)

    def values_per_scale(self, width: int) -> Tensor:
        """How many values of a token each calibrated scale covers: float64 [L, S]; 1 where there is no scale."""
        values_LS = torch.ones(len(self.layers), width, dtype=torch.float64)
        for row_S, layer in zip(values_LS, self.layers, strict=True):
            for stored, part in zip(layer, split_scales(row_S, [stored.layout for stored in layer]), strict=True):
                if part is not None:
                    part.fill_(stored.layout.num_values // stored.layout.num_scales)
        return values_LS


def cache_format(spec: ModelSpec, policy: PrecisionPolicy, dtype: torch.dtype, page_size: int) -> CacheFormat:
    """The format of a page under the precision policy. `dtype`: the model's."""

    def stored(tensor: CachedTensor) -> StoredTensor:
        if policy.cached_as(tensor.name) == "bf16":
            return StoredTensor(tensor, dtype, token_scales=False)
        codes = torch.int8 if policy.kv_mode == "int8" else E4M3
        return StoredTensor(tensor, codes, token_scales=policy.kv_mode in SCALE_PER_TOKEN)

    layers = tuple(tuple(stored(tensor) for tensor in spec.cached(layer)) for layer in range(spec.num_layers))
    return CacheFormat(layers, page_size)


def sized_by_requests(config: EngineConfig, device: torch.device) -> bool:
    """Whether the cache is made for the current requests: on a CPU without `kv_cache_tokens`."""
    return config.kv_cache_tokens is None and device.type != "cuda"


def configured_pages(config: EngineConfig, page: CacheFormat, device: torch.device) -> int:
    """Number of pages by the recipe, or by the GPU's free memory."""
    if config.kv_cache_tokens is not None:
        return max(1, config.kv_cache_tokens // config.page_size)
    torch.cuda.empty_cache()  # what the allocator still holds are pieces between tensors, too small for a cache
    free, _ = torch.cuda.mem_get_info(device)
    return int(config.kv_memory_fraction * free) // page.bytes_per_page


def host_pages(config: EngineConfig, page: CacheFormat) -> int:
    """Largest number of pages of a CPU run: `kv_memory_fraction` of the machine's memory."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int(config.kv_memory_fraction * memory) // page.bytes_per_page


def smallest_pages(group: TensorGroup, num_pages: int) -> int:
    """The fewest pages of any worker that shares the model: their schedules are equal only with equal numbers."""
    if group.size == 1:
        return num_pages
    return int(group.stack(torch.tensor(num_pages)).min())


class Pool:
    """The pages of one stored tensor in all layers that have it, [L, num_pages, ...], and its scales of tokens."""

    def __init__(self, stored: StoredTensor, page: CacheFormat, num_pages: int, device: torch.device) -> None:
        self.row_of = {layer: row for row, layer in enumerate(_layers_with(stored, page))}
        self.turned = stored.turned
        outer = (len(self.row_of), num_pages)
        shape = (*outer, prod(stored.page_shape(page.page_size)) * stored.dtype.itemsize)
        zeros = torch.zeros(shape, dtype=torch.uint8, device=device)
        self.pages = zeros.view(stored.dtype).view(*outer, *stored.page_shape(page.page_size))
        self.token_scale: Tensor | None = None
        if stored.token_scales:
            self.token_scale = torch.ones(*outer, *stored.layout.scales, page.page_size, device=device)

    def of_layer(self, layer: int, scale: Tensor | None) -> CachedPages:
        row = self.row_of[layer]
        return CachedPages(self.pages[row], scale, None if self.token_scale is None else self.token_scale[row])

    def clear(self, page_n: Tensor, offset_n: Tensor) -> None:
        """Zeroes these tokens in every layer. Their scales become 1."""
        raw = self.pages.view(torch.uint8)
        raw[
            (slice(None), page_n, ..., offset_n) if self.turned else (slice(None), page_n, ..., offset_n, slice(None))
        ] = 0
        if self.token_scale is not None:
            self.token_scale[:, page_n, ..., offset_n] = 1


def _layers_with(stored: StoredTensor, page: CacheFormat) -> list[int]:
    return [layer for layer, tensors in enumerate(page.layers) if stored in tensors]


class KVCache:
    """`num_pages` pages of every layer. `scale_LS`: calibrated scales, float32, filled by the engine."""

    def __init__(self, page: CacheFormat, num_pages: int, device: torch.device, scale_LS: Tensor | None = None) -> None:
        self.page, self.num_pages = page, num_pages
        distinct = dict.fromkeys(stored for layer in page.layers for stored in layer)
        self._pools = pools = {stored: Pool(stored, page, num_pages, device) for stored in distinct}
        copied = [tensor for pool in pools.values() for tensor in (pool.pages, pool.token_scale) if tensor is not None]
        # wide words: E4M3 has no indexing, bytes are slow
        self._copied = [tensor.flatten(2).view(torch.int64) for tensor in copied]
        self._device = device
        self.saturated_LS: Tensor | None = None
        if scale_LS is not None:
            self.saturated_LS = torch.zeros(scale_LS.shape, dtype=torch.int64, device=device)
        self.layers = tuple(self._layer_cache(layer, pools, scale_LS) for layer in range(len(page.layers)))
        self._saturated_RLS: Tensor | None = None
        self._layers_by_row = self.layers

    def _layer_cache(self, layer: int, pools: dict[StoredTensor, Pool], scale_LS: Tensor | None) -> LayerCache:
        tensors = self.page.layers[layer]
        scales: tuple[Tensor | None, ...] = (None,) * len(tensors)
        if scale_LS is not None:
            scales = split_scales(scale_LS[layer], [stored.layout for stored in tensors])
        return LayerCache(
            tuple(
                pools[stored].of_layer(layer, scale if stored.is_clamped else None)
                for stored, scale in zip(tensors, scales, strict=True)
            ),
            None if self.saturated_LS is None else self.saturated_LS[layer],
        )

    def layers_by_row(self, num_rows: int) -> tuple[LayerCache, ...]:
        """The layers with counters of clamped values for each of `num_rows` rows of a forward; `count_rows` adds them
        up. Without calibration the layers themselves."""
        if self.saturated_LS is not None and (self._saturated_RLS is None or len(self._saturated_RLS) < num_rows):
            rows = torch.zeros(num_rows, *self.saturated_LS.shape, dtype=torch.int64, device=self._device)
            self._saturated_RLS = rows
            self._layers_by_row = tuple(
                LayerCache(layer.tensors, rows[:, index]) for index, layer in enumerate(self.layers)
            )
        return self._layers_by_row

    def count_kept(self, kept_R1: Tensor, num_rows: int) -> None:
        """`count_rows` on the device alone, as kernels/rows/count_kept_rows.py has `kept_R1`."""
        if self.saturated_LS is not None:
            self.layers_by_row(num_rows)
            assert self._saturated_RLS is not None, "a calibrated cache counts"
            count_kept_rows(self._saturated_RLS.flatten(1), kept_R1, self.saturated_LS.view(-1))

    def count_rows(self, rows: Sequence[int]) -> None:
        """Adds the clamped values of these rows of the last forward to the count, and forgets those of the others."""
        if self.saturated_LS is not None and self._saturated_RLS is not None:
            kept_n = to_device(np.array(rows, dtype=np.int64), self._device)
            self.saturated_LS += self._saturated_RLS.index_select(0, kept_n).sum(0)
            self._saturated_RLS.zero_()

    def clear_slots(self, slots: Sequence[int]) -> None:
        """Zeroes what these slots hold in every layer: a NaN behind a sequence's end would reach sums."""
        slot_n = to_device(np.array(slots, dtype=np.int64), self._device)
        for pool in self._pools.values():
            pool.clear(slot_n // self.page.page_size, slot_n % self.page.page_size)

    def saturated_share(self, num_tokens: int) -> Tensor | None:
        """Share of the values of `num_tokens` tokens that were clamped, by layer and scale: float64 [L, S] on the CPU.
        None: nothing is calibrated."""
        if self.saturated_LS is None:
            return None
        values_LS = max(1, num_tokens) * self.page.values_per_scale(self.saturated_LS.shape[1])
        return self.saturated_LS.cpu().double() / values_LS

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """For each (a, b), copies page `a` to page `b` in every layer, with scales. All are read before any is written.

        The host does not wait for the device."""
        if not copies or not self._copied:
            return
        source, target = to_device(np.array(copies, dtype=np.int64).T, self._device).unbind()
        for pool in self._copied:
            pool[:, target] = pool[:, source]


class CacheScales:
    """The scales of a calibrated cache. `scale_LS`: float32, NaN until `set`; captured graphs have its address."""

    def __init__(self, spec: ModelSpec, device: torch.device) -> None:
        self._spec = spec
        shape = (spec.num_layers, spec.num_cache_scales)
        self.scale_LS = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
        self.policy_version: int | None = None

    @property
    def held(self) -> KVScales | None:
        """A copy of the scales. None before `set`."""
        return None if self.policy_version is None else KVScales(self.scale_LS.clone(), self.policy_version)

    def set(self, scales: KVScales) -> None:
        """Copies `scales` in. Raises ValueError for another shape and for a scale that is not finite and above 0."""
        given_LS = scales.scale_LS
        if given_LS.shape != self.scale_LS.shape:
            raise ValueError(
                f"KV scales: got [layers, scales of a layer] = {list(given_LS.shape)}, this model has"
                f" {list(self.scale_LS.shape)}"
            )
        if not bool((given_LS.isfinite() & (given_LS > 0)).all()):
            layer, index = (~(given_LS.isfinite() & (given_LS > 0))).nonzero()[0].tolist()
            raise NonFiniteError(
                f"KV scales: the scale of {self._spec.cache_scale_name(layer, index)} is"
                f" {float(given_LS[layer, index])}; a scale is finite and above 0"
            )
        self.scale_LS.copy_(given_LS)
        self.policy_version = scales.policy_version

    def check(self, policy_version: int) -> None:
        """Raises RuntimeError unless these are the scales of `policy_version`."""
        if self.policy_version is None:
            raise RuntimeError(
                "the KV cache is calibrated FP8 and has no scales: calibrate on some prompts and call set_kv_scales"
                " before generate, or set fp8.kv_cache to int8, dynamic or none"
            )
        if self.policy_version != policy_version:
            raise RuntimeError(
                f"the KV scales belong to policy version {self.policy_version} and the weights to"
                f" {policy_version}: publish both (publish and set_kv_scales) before generate"
            )
