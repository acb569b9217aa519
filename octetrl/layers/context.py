"""What blocks need besides their input, passed as an argument.

`PackedContext` is for the trainer: whole sequences end to end, keys in the same tensor as their queries.
`PagedContext` is for the engine: queries are new tokens (one for decode, a chunk for prefill), and keys are in pages.

**Router record.** What the routers of a model do in one micro-batch, and the losses that a router is trained with
beside the objective:

    balance   X sum_e f_e P_e       f_e share of the rows that expert e has, P_e mean of its normalised scores
    z         mean of logsumexp(logits)^2

The balance loss is 1 if all experts have the same load (arXiv:2101.03961); the z loss keeps logits small
(arXiv:2202.08906). Both are means over the tokens of a micro-batch and over the micro-batches of an optimizer step,
summed over layers. They add to the gradient only, through the routing weights: the objective's loss and its metrics do
not contain them. f_e has no gradient.

Legend: B sequences, P pages of the longest block table, T tokens of this forward, L layers, S calibrated scales of a
layer (`ModelSpec.num_cache_scales`), X experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from octetrl.kernels.attention.records import CachedPages
from octetrl.layers.sequence_slots import SequenceSlots
from octetrl.layers.token_group import TokenGroup
from octetrl.shapes.blocks import KVMode


@dataclass(slots=True)
class RouterRecord:
    """Filled by the forward of one micro-batch, by layer. A layer that runs again writes the same values again."""

    balance_loss: float = 0.0  # coefficients
    z_loss: float = 0.0
    share: float = 1.0  # of the optimizer step: 1 / its number of micro-batches
    group: TokenGroup | None = None  # the workers that share the micro-batch; the losses are those of all its tokens
    loads: dict[int, Tensor] = field(default_factory=dict)  # [X], rows of each expert
    entropies: dict[int, Tensor] = field(default_factory=dict)  # float32 [T], of the normalised scores

    def observe(self, layer: int, logits_TX: Tensor, score_TX: Tensor, load_X: Tensor, weight_TS: Tensor) -> Tensor:
        """`weight_TS`, to which the losses' gradients are attached."""
        share_TX = score_TX / score_TX.sum(1, keepdim=True)
        tokens = len(weight_TS) if self.group is None else self.group.tokens
        self.loads[layer] = load_X
        self.entropies[layer] = -torch.special.xlogy(share_TX, share_TX).sum(1).detach()
        loss = torch.zeros((), device=logits_TX.device)
        if self.balance_loss:
            whole_X = load_X if self.group is None else self.group.sum(load_X)
            wanted_X = whole_X.float() / (tokens * weight_TS.shape[1]) * load_X.numel()
            loss = loss + self.balance_loss * self.share * (share_TX.sum(0) / tokens * wanted_X).sum()
        if self.z_loss:
            loss = loss + self.z_loss * self.share * logits_TX.logsumexp(1).square().sum() / tokens
        attached_TS: Tensor = _Attach.apply(weight_TS, loss) if loss.requires_grad else weight_TS
        return attached_TS


class _Attach(torch.autograd.Function):
    """The first argument; in the backward the second has gradient 1, as if it were added to the objective."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, loss: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], torch.ones((), device=grads[0].device)


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
    group: TokenGroup | None = None  # the workers that share the micro-batch; T is then the part of this one


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
    states: SequenceSlots | None = None  # of a model with linear attention
    draft_offset_B: Tensor | None = None  # int64, how far each row's draft lies behind its sequence's query; None: none


Context = PackedContext | PagedContext
