"""What blocks need besides their input, passed as an argument.

`PackedContext` is for the trainer: whole sequences end to end, keys in the same tensor as their queries.
`PagedContext` is for the engine: queries are new tokens (one for decode, a chunk for prefill), and keys are in pages.

Legend: B sequences, P pages of the longest block table, T tokens of this forward, L layers, S calibrated scales of a
layer (`ModelSpec.num_cache_scales`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from octetrl.layers.router_record import RouterRecord
from octetrl.shapes.blocks import KVMode


class CacheTreatment(NamedTuple):
    """How training treats a cached tensor: the quantiser, and the calibrated scales of this layer."""

    mode: KVMode
    scale: Tensor | None


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Training. `cu_seqlens_B1`: bounds of the sequences.

    `kv_mode` is the mode of the rollout's cache. Except with "none", cached tensors pass through the same
    quantiser in training (docs/fp8.md §6). `kv_amax_LS` collects the largest magnitude for each scale, in place.
    """

    cu_seqlens_B1: Tensor  # int32
    max_seqlen: int
    kv_mode: KVMode = "none"
    kv_scale_LS: Tensor | None = None  # float32; only for "calibrated"
    kv_amax_LS: Tensor | None = None  # float32, updated in place; None: not collected
    routers: RouterRecord | None = None  # filled in by mixtures of experts; None: not collected


@dataclass(frozen=True, slots=True)
class CachedPages:
    """The pages of one cached tensor in one layer. Shapes: `CachedTensor` in shapes/blocks.py."""

    pages: Tensor  # [num_pages, ...] in BF16, float32, E4M3 or int8
    scale: Tensor | None = None  # E4M3, "calibrated": float32, of the layer
    token_scale: Tensor | None = None  # "dynamic", "int8": float32 [num_pages, ..., page_size]


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache: its tensors in the order of the block's layout."""

    tensors: tuple[CachedPages, ...]
    saturated_S: Tensor | None = None  # int64 counter for each scale: values clamped on the way into the cache; [T, S]:
    # of each token of the forward


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Rollout: the page slot of each new token and the keys of each sequence.

    The last query of sequence b is at key position `context_lens_B[b] - 1`. Rows of drafts are sequences too.
    """

    layers: tuple[LayerCache, ...]
    slot_mapping_T: Tensor  # int64: page * page_size + offset; -1 writes nothing
    block_table_BP: Tensor  # int32, padded with -1
    cu_seqlens_q_B1: Tensor  # int32
    context_lens_B: Tensor  # int32, this chunk included
    max_query_len: int
    max_context_len: int = field(default=0)
    draft_offset_B: Tensor | None = None  # int64, how far each row's draft lies behind its sequence's query; None: none


Context = PackedContext | PagedContext
