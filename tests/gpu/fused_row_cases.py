"""The fused row kernels of the rollout, each beside the chain that it replaces, on random inputs.

For the tests of bits, and for `lab.kernels.rows`, which times them. Every eleventh token of `qkv_case` is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.kv_store import kv_store, v_pages_shape
from octetrl.kernels.attention.qkv_store import qkv_store
from octetrl.kernels.attention.records import CachedPages, Rotation
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.rows.add_rms_norm import add_rms_norm
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rope import rope
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from octetrl.layers.rotary import RotaryTable

EPS, PAGE_SIZE, POSITIONS = 1e-6, 128, 8192
PADDING = (11, 7)  # one token of so many, the first of them
CACHES = {  # K's and V's dtype, and whether scales are per token
    "bf16": (torch.bfloat16, torch.bfloat16, False),
    "fp8_calibrated": (E4M3, E4M3, False),
    "fp8_dynamic": (E4M3, E4M3, True),
    "fp8_v_calibrated": (torch.bfloat16, E4M3, False),
}
Outputs = list[Tensor]


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    qk_norm: bool


SHAPES = {
    "qwen3-8b": Shape(4096, 12288, 32, 8, 128, True),
    "qwen3-0.6b": Shape(1024, 3072, 16, 8, 128, True),
    "llama-3.2-1b": Shape(2048, 8192, 32, 8, 64, False),
}


@dataclass(frozen=True)
class Case:
    """One kernel on one set of inputs, beside the chain that it replaces; each has its own copy of what it writes."""

    op: str
    precision: str
    fused: Callable[[], Outputs]
    chain: Callable[[], Outputs]
    moved: int  # bytes


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def norm_case(shape: Shape, tokens: int, quantize: bool, add: bool = True) -> Case:
    delta, residual = normal(tokens, shape.hidden) if add else None, 3 * normal(tokens, shape.hidden)
    weight, other = 1 + normal(shape.hidden) / 10, residual.clone()

    def fused() -> Outputs:
        if quantize:
            return [residual, *add_rms_norm(delta, residual, weight, EPS, quantize=True)[1]]
        return [residual, add_rms_norm(delta, residual, weight, EPS, quantize=False)[1]]

    def chain() -> Outputs:
        if delta is not None:
            torch.add(other, delta, out=other)
        normed = rms_norm(other, weight, EPS)
        return [other, *quantize_activation(normed)] if quantize else [other, normed]

    written = 1 + 4 / 128 if quantize else 2
    moved = tokens * shape.hidden * (2 + 4 * add + written)
    return Case("add_rms_norm" if add else "rms_norm", "fp8" if quantize else "bf16", fused, chain, int(moved))


def silu_case(shape: Shape, tokens: int) -> Case:
    gate_up = 2 * normal(tokens, 2 * shape.intermediate)
    moved = tokens * shape.intermediate * (4 + 1 + 4 / 128)

    def fused() -> Outputs:
        return [*silu_mul_quantize(gate_up)]

    def chain() -> Outputs:
        return [*quantize_activation(silu_mul(gate_up))]

    return Case("silu_mul_quantize", "fp8", fused, chain, int(moved))


@lru_cache
def rotary_table(head_size: int) -> RotaryTable:
    return RotaryTable(head_size, 1e6, None, POSITIONS, device="cuda")


def slots_of(tokens: int) -> Tensor:
    """Runs of 200 tokens in shuffled pages; every eleventh token is padding."""
    token = torch.arange(tokens, device="cuda")
    pages = torch.randperm(2 * (tokens // 200 + 1), device="cuda")
    place = token % 200
    slot = pages[2 * (token // 200) + place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE
    return torch.where(token % PADDING[0] == PADDING[1], -1, slot)


class Written(NamedTuple):
    """What `kv_store` writes. A few values are past the per-head scales."""

    k: CachedPages
    v: CachedPages
    slots: Tensor
    saturated: Tensor

    @classmethod
    def empty(cls, shape: Shape, slots: Tensor, precision: str) -> Written:
        *dtypes, by_token = CACHES[precision]
        size = (2 * (len(slots) // 200 + 1), shape.kv_heads, PAGE_SIZE, shape.head_size)
        cached = []
        for dtype, own_size in zip(dtypes, (size, v_pages_shape(*size, dtypes[1])), strict=True):
            zeros, scale, token_scale = torch.zeros(own_size, device="cuda").to(dtype), None, None
            if dtype == E4M3 and by_token:
                token_scale = torch.ones(size[:3], device="cuda")
            elif dtype == E4M3:
                scale = torch.linspace(0.004, 0.008, shape.kv_heads, device="cuda")
            cached.append(CachedPages(zeros, scale, token_scale))
        k, v = cached
        return cls(k, v, slots, torch.zeros(2, shape.kv_heads, dtype=torch.int64, device="cuda"))

    @property
    def outputs(self) -> Outputs:
        scales = [x.token_scale for x in (self.k, self.v) if x.token_scale is not None]
        return [self.k.pages, self.v.pages, *scales, self.saturated]


def qkv_case(shape: Shape, tokens: int, precision: str) -> Case:
    split = (shape.heads, shape.kv_heads, shape.kv_heads)
    qkv = normal(tokens, sum(split) * shape.head_size)
    q_norm, k_norm = (1 + normal(shape.head_size) / 10 if shape.qk_norm else None for _ in range(2))
    table = rotary_table(shape.head_size)
    slots = slots_of(tokens)
    positions = torch.where(slots < 0, 0, torch.randint(POSITIONS, (tokens,), device="cuda"))
    ours, theirs = (Written.empty(shape, slots, precision) for _ in range(2))
    rotation = Rotation(q_norm, k_norm, EPS, table.cos_SR, table.sin_SR, positions)

    def fused() -> Outputs:
        return [qkv_store(qkv, rotation, *ours), *ours.outputs]

    def chain() -> Outputs:
        q, k, v = qkv.view(tokens, -1, shape.head_size).split(split, dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, EPS), rms_norm(k, k_norm, EPS)
        rotary = table(positions)
        q, k = rope(q, *rotary), rope(k, *rotary)
        kv_store(k, v, *theirs)
        return [q, *theirs.outputs]

    stored = shape.kv_heads * (ours.k.pages.element_size() + ours.v.pages.element_size())
    kept = tokens - len(range(PADDING[1], tokens, PADDING[0]))
    moved = shape.head_size * (tokens * 4 * shape.heads + kept * (4 * shape.kv_heads + stored))
    return Case("qkv_store", precision, fused, chain, moved)


def bit_cases(shape: Shape, tokens: int) -> Iterator[Case]:
    for quantize in (False, True):
        yield norm_case(shape, tokens, quantize)
        yield norm_case(shape, tokens, quantize, add=False)
    yield silu_case(shape, tokens)
    for precision in CACHES:
        yield qkv_case(shape, tokens, precision)
