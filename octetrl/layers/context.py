"""What attention needs to know besides its input, passed as an argument: no module global, no hidden state.

`PackedContext` is the trainer's: whole sequences laid end to end, every key in the same tensor as its query.
`PagedContext` is the engine's: queries are new tokens (one for decode, a chunk for prefill), keys live in pages.
Legend: B sequences, P pages of the longest block table, T tokens of this forward, L layers, K KV heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

KVMode = Literal["none", "calibrated", "dynamic"]


@dataclass(frozen=True, slots=True)
class PackedContext:
    """Training: `cu_seqlens_B1` bounds each sequence.

    `kv_mode` says which cache the rollout used: with "calibrated" or "dynamic", K and V are replayed through that
    quantiser (docs/fp8.md §6). `kv_amax_2LK`, where given, collects max|K| and max|V| per layer and head, in place.
    """

    cu_seqlens_B1: Tensor  # int32
    max_seqlen: int
    kv_mode: KVMode = "none"
    k_scale_LK: Tensor | None = None  # float32; only for "calibrated"
    v_scale_LK: Tensor | None = None
    kv_amax_2LK: Tensor | None = None  # float32, updated in place; None: not collected


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's pages, in BF16, float32 or E4M3. K: [num_pages, K, page_size, D]; V too, but turned where it is E4M3:
    [num_pages, K, D, page_size] (kernels/attention/kv_store.py)."""

    k: Tensor
    v: Tensor
    k_scale_K: Tensor | None = None  # "calibrated": float32 per head
    v_scale_K: Tensor | None = None
    k_token_scale: Tensor | None = None  # "dynamic": float32 [num_pages, K, page_size]
    v_token_scale: Tensor | None = None
    saturated_2K: Tensor | None = None  # int64 counter: values clamped on the way into the cache, K then V


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Rollout: where each new token goes and what each sequence may see.

    The last query of sequence b sits at key position `context_lens_B[b] - 1`.
    """

    layers: tuple[LayerCache, ...]
    slot_mapping_T: Tensor  # int64: page * page_size + offset; -1 writes nothing
    block_table_BP: Tensor  # int32, padded with -1
    cu_seqlens_q_B1: Tensor  # int32
    context_lens_B: Tensor  # int32, this chunk included
    max_query_len: int
    max_context_len: int = field(default=0)


Context = PackedContext | PagedContext
