"""Random queries, latents and pages of MLA, and attention over them written out in float64."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention import (
    latent_store,
)
from octetrl.kernels.attention.records import CachedPages

SCALE = 0.17


class Latents(NamedTuple):
    """Packed sequences: queries of every token, latents as values, and rotary keys."""

    q_latent_THC: Tensor
    q_rotary_THR: Tensor
    value_TC: Tensor
    key_TR: Tensor
    lengths: tuple[int, ...]

    @property
    def cu_seqlens_B1(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)


def latents(lengths: tuple[int, ...], heads: int, latent: int, rotary: int, dtype: torch.dtype) -> Latents:
    """`dtype`: of the cache. Values are BF16; codes of FP8 latents lose nothing on their way through the cache."""
    generator = torch.Generator().manual_seed(len(lengths) + heads)
    shapes = (heads, latent), (heads, rotary), (latent,), (rotary,)
    q_latent, q_rotary, value, key = (
        torch.randn(sum(lengths), *shape, generator=generator).bfloat16() for shape in shapes
    )
    return Latents(
        q_latent, q_rotary, value if dtype != E4M3 else latent_store.latent_replay(value, "dynamic"), key, lengths
    )


def written_out(case: Latents) -> Tensor:
    """float64 [T, H, C]."""
    parts = []
    for first, end in pairwise(case.cu_seqlens_B1.tolist()):
        q_latent, q_rotary, value, key = (x[first:end].double() for x in case[:4])
        score_HTS = torch.einsum("thc,sc->hts", q_latent, value) + torch.einsum("thr,sr->hts", q_rotary, key)
        hidden = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
        weight_HTS = (SCALE * score_HTS).masked_fill(hidden, -torch.inf).softmax(2)
        parts.append(torch.einsum("hts,sc->thc", weight_HTS, value))
    return torch.cat(parts)


class Paged(NamedTuple):
    """All tokens of the packed sequences in pages, and the last `counts` tokens of each as queries."""

    q_latent_THC: Tensor
    q_rotary_THR: Tensor
    latent: CachedPages
    key: CachedPages
    block_table_BP: Tensor
    cu_seqlens_q_B1: Tensor
    context_lens_B: Tensor
    softmax_scale: float

    def cuda(self) -> Paged:
        return Paged(*(moved(x) if isinstance(x, CachedPages | Tensor) else x for x in self))


def moved(x: Any) -> Any:
    """A tensor, or a record of tensors, on the GPU."""
    if isinstance(x, Tensor):
        return x.cuda()
    scale = None if x.token_scale is None else x.token_scale.cuda()
    return CachedPages(x.pages.cuda(), token_scale=scale)


def empty_pages(
    pages: int, page_size: int, latent: int, rotary: int, dtype: torch.dtype
) -> tuple[CachedPages, CachedPages]:
    """Pages of latents in `dtype` and of BF16 keys, of zeros."""
    zeros = torch.zeros(pages, page_size, latent, dtype=torch.uint8 if dtype == E4M3 else dtype).view(dtype)
    scale = torch.ones(pages, 1, page_size) if dtype == E4M3 else None
    keys = torch.zeros(pages, page_size, rotary, dtype=torch.bfloat16)
    return CachedPages(zeros, token_scale=scale), CachedPages(keys)


def bytes_of_pages(pages: Iterable[CachedPages]) -> list[bytes]:
    """Of codes, keys and scales."""
    tensors = [x for one in pages for x in (one.pages, one.token_scale) if x is not None]
    return [x.cpu().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors]


def paged(case: Latents, counts: tuple[int, ...], page_size: int, dtype: torch.dtype) -> tuple[Paged, Tensor]:
    """With a padding sequence at the end; and the packed token of each query."""
    bounds = case.cu_seqlens_B1.tolist()
    pages = [-(-length // page_size) for length in case.lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(5))
    table_BP = torch.full((len(pages) + 1, max(pages)), -1, dtype=torch.int32)
    slots = []
    for b, (first, count) in enumerate(zip(accumulate(pages, initial=0), pages, strict=False)):
        table_BP[b, :count] = order[first : first + count]
        at = torch.arange(case.lengths[b])
        slots.append(table_BP[b][at // page_size].long() * page_size + at % page_size)
    latent, key = empty_pages(sum(pages), page_size, case.value_TC.shape[1], case.key_TR.shape[1], dtype)
    latent_store.latent_store_reference(case.value_TC, case.key_TR, latent, key, torch.cat(slots))
    token_Q = torch.cat([torch.arange(end - count, end) for end, count in zip(bounds[1:], counts, strict=True)])
    cu_seqlens_q_B1 = torch.tensor([0, *accumulate((*counts, 1))], dtype=torch.int32)
    q_latent, q_rotary = (
        torch.cat((q[token_Q], torch.zeros_like(q[:1]))) for q in (case.q_latent_THC, case.q_rotary_THR)
    )
    context_B = torch.tensor([*case.lengths, 0], dtype=torch.int32)
    made = Paged(q_latent, q_rotary, latent, key, table_BP, cu_seqlens_q_B1, context_B, SCALE)
    return made, token_Q
