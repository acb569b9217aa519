"""Inputs that the attention tests share: random packed sequences and a paged cache with shuffled pages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.kv_store import kv_store, v_pages_shape
from octetrl.kernels.attention.records import CachedPages, Replay, Rotation
from octetrl.layers.rotary import RotaryTable
from octetrl.shapes.blocks import SCALE_PER_TOKEN, KVMode, KVTensors
from tests.unit.kernels.fused_row_cases import normal

CACHES = [  # kv_mode, quantized
    pytest.param("none", "both", id="none"),
    pytest.param("calibrated", "both", id="calibrated"),
    pytest.param("dynamic", "both", id="dynamic"),
    pytest.param("calibrated", "v", id="calibrated-v"),
    pytest.param("dynamic", "v", id="dynamic-v"),
    pytest.param("int8", "both", id="int8"),
    pytest.param("int8", "v", id="int8-v"),
    pytest.param("calibrated", "k", id="calibrated-k"),
    pytest.param("dynamic", "k", id="dynamic-k"),
    pytest.param("int8", "k", id="int8-k"),
]


def cu_seqlens_of(lengths: list[int], device: str = "cpu") -> Tensor:
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def random_qkv(
    lengths: list[int],
    kv_heads: int,
    group: int,
    head_size: int,
    dtype: torch.dtype,
    seed: int = 0,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [T, heads, D], each a view into one fused tensor as the model's QKV projection gives them."""
    generator = torch.Generator().manual_seed(seed)
    heads = kv_heads * (group + 2)
    fused = torch.randn(sum(lengths), heads, head_size, generator=generator).to(device, dtype)
    return fused.split([kv_heads * group, kv_heads, kv_heads], dim=1)


ROTATED = 11  # tokens


def qkv_to_rotate(
    heads: int, kv_heads: int, size: int, norm: bool, dtype: torch.dtype = torch.bfloat16, planes: int | None = None
) -> tuple[Tensor, Rotation]:
    """ROTATED tokens at positions 0, 7, 14 and so on; of a head, 2 * `planes` numbers are rotated, or all."""
    qkv = normal(ROTATED, heads + 2 * kv_heads, size, dtype=dtype)
    q_norm, k_norm = (1 + 0.1 * normal(size, seed=seed, dtype=dtype) if norm else None for seed in (1, 2))
    table = RotaryTable(size if planes is None else 2 * planes, 1e4, None, 99, device="cpu")
    return qkv, Rotation(q_norm, k_norm, 1e-6, table.cos_SR, table.sin_SR, torch.arange(ROTATED) * 7)


def by_token(rotation: Rotation) -> Rotation:
    return Rotation(*rotation[:3], *rotation.angles_of_tokens())


def scales_of(k: Tensor, v: Tensor, kv_mode: str) -> tuple[Tensor | None, Tensor | None]:
    """Per-head scales a little too small, so that a few values saturate."""
    if kv_mode != "calibrated":
        return None, None
    return tuple(x.float().abs().amax(dim=(0, 2)) * 0.9 / 448 for x in (k, v))


def replay_of(k: Tensor, v: Tensor, kv_mode: KVMode, quantized: KVTensors = "both") -> Replay:
    return Replay(kv_mode, *scales_of(k, v, kv_mode), quantized)


@dataclass
class PagedCache:
    """Pages for given sequence lengths, in shuffled order. `quantized`: which of K and V are codes."""

    lengths: list[int]
    kv_heads: int
    head_size: int
    page_size: int
    kv_mode: str
    dtype: torch.dtype
    k_scale: Tensor | None
    v_scale: Tensor | None
    device: str = "cpu"
    quantized: KVTensors = "both"

    def __post_init__(self) -> None:
        counts = [-(-length // self.page_size) for length in self.lengths]
        shape = (sum(counts) + 1, self.kv_heads, self.page_size, self.head_size)
        codes = {"none": self.dtype, "int8": torch.int8}.get(self.kv_mode, E4M3)
        by_token = self.kv_mode in SCALE_PER_TOKEN

        def pages(scale: Tensor | None, *, in_codes: bool, is_v: bool) -> CachedPages:
            dtype = codes if in_codes else self.dtype
            own_shape = v_pages_shape(*shape, dtype) if is_v else shape
            token_scale = torch.ones(shape[:3], device=self.device) if by_token and in_codes else None
            return CachedPages(torch.zeros(own_shape, device=self.device).to(dtype), scale, token_scale)

        self.k = pages(self.k_scale, in_codes=self.quantized != "v", is_v=False)
        self.v = pages(self.v_scale, in_codes=self.quantized != "k", is_v=True)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(1)).to(torch.int32)
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32)
        for row, (first, count) in enumerate(zip(cu_seqlens_of(counts).tolist(), counts, strict=False)):
            table[row, :count] = order[first : first + count]
        self.block_table = table.to(self.device)

    @classmethod
    def filled(
        cls,
        lengths: list[int],
        k: Tensor,
        v: Tensor,
        kv_mode: str,
        quantized: KVTensors = "both",
        page_size: int = 128,
        store: Callable[..., None] = kv_store,
    ) -> PagedCache:
        """The cache of these sequences, on the device of k."""
        form = (page_size, kv_mode, k.dtype, *scales_of(k, v, kv_mode), str(k.device), quantized)
        cache = cls(lengths, *k.shape[1:], *form)
        store(k, v, cache.k, cache.v, cache.slots(lengths))
        return cache

    def slots(self, lengths: list[int]) -> Tensor:
        """Slot of every token when all sequences are laid end to end."""
        position = torch.cat([torch.arange(length) for length in lengths])
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        page = self.block_table.cpu()[sequence, position // self.page_size].long()
        return (page * self.page_size + position % self.page_size).to(self.device)


@dataclass(frozen=True)
class DraftedRows:
    """The rows of a decode forward with drafts."""

    lengths: list[int]  # tokens of each sequence, drafts included; 1 for an inactive row, whose tokens nobody reads
    sequence_N: Tensor
    context_N: Tensor  # int32
    offset_N: Tensor  # int64

    @classmethod
    def of(cls, drafted: list[tuple[int, int]], device: str = "cpu") -> DraftedRows:
        """drafted: for each sequence the keys of its own row, and its number of rows. 0 keys: inactive."""
        each = [(number, keys + row, row) for number, (keys, rows) in enumerate(drafted) for row in range(rows)]
        sequence_N, context_N, offset_N = torch.tensor(each, device=device).t().contiguous()
        lengths = [max(keys + rows - 1, 1) for keys, rows in drafted]
        return cls(lengths, sequence_N, context_N.int(), offset_N)
