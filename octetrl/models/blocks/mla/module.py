"""Multi-head latent attention (arXiv:2405.04434): one latent of each token is key and value of all heads.

    q = x Wq,  or  norm(x Wqa) Wqb;  its last R elements of each head are rotated
    latent, key = x Wkva;  latent = norm(latent);  key is rotated
    out = attention over the latents and keys (absorbed.py);  result = out Wo

Queries and the output have linears that may be FP8. `kv_a`, `kv_b` and the norms are in the model's dtype. The cache
holds latent and rotated key. Whatever the cache does to a latent happens before its first use, in training as well.

With a `PackedContext` (training) the latents are in the tensor of this forward. With a `PagedContext` (rollout) they
are written into the pages and read back, including the current chunk.

T tokens, E hidden size, H heads, N nope size, R rotary size, X = N + R, V = H * value size, C latent size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.latent_paged import latent_paged
from octetrl.kernels.attention.latent_prepare import latent_prepare
from octetrl.kernels.attention.latent_store import latent_replay, latent_store, latent_values
from octetrl.kernels.rows.rope import rope
from octetrl.layers.context import CachedPages, Context, PackedContext, PagedContext
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary
from octetrl.layers.unquantized_linear import initial_weight
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.models.blocks.mla.absorbed import Attended, HeadSizes, PackedAttention, absorb, expand
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.normed import Normed
from octetrl.models.blocks.products import Operand
from octetrl.shapes.rope import RopeScaling, YarnScaling

LATENT_EPS = 1e-6  # of the latents' norms in every published model, whatever its `rms_norm_eps`
Multiply = Callable[[Projection, Any], Tensor]  # of a tensor, or of what the form that calls has instead
NormFor = Callable[[RMSNorm, Tensor, Projection], Operand]


class UpProjection(nn.Module):
    """`kv_b` [H (N + V), C] in the model's dtype. absorbed.py multiplies by it, head by head."""

    def __init__(self, builder: BlockBuilder, rows: int, latent_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial_weight(rows, latent_size, builder.dtype, builder.device))


class Projected(NamedTuple):
    """What the projections of x give. `split` has the parts that attention takes."""

    q_TX: Tensor
    kv_a_TX: Tensor
    q_a_TA: Tensor | None  # the queries' latent before its norm


class Operands(NamedTuple):
    """Queries and keys with their rotation, and the normed latents before the cache."""

    q_THN: Tensor
    q_THR: Tensor
    latent_TC: Tensor
    key_TR: Tensor


class LatentAttention(Block):
    def __init__(self, builder: BlockBuilder, layout: LatentAttentionLayout) -> None:
        super().__init__(builder)
        spec = builder.spec
        self.num_heads, self.latent_size, self.rope_size = spec.num_heads, layout.latent_size, layout.rope_size
        self.sizes = HeadSizes(layout.nope_size, layout.value_size)
        self.interleaved = layout.interleaved
        self.softmax_scale = softmax_scale(spec.head_size, spec.rope_scaling)
        self.q_proj = self.q_a_proj = self.q_b_proj = None
        self.q_a_layernorm: RMSNorm | None = None
        if layout.query_latent_size:
            self.q_a_proj, self.q_b_proj = builder.linear("q_a_proj"), builder.linear("q_b_proj")
            self.q_a_layernorm = _norm(builder, layout.query_latent_size)
        else:
            self.q_proj = builder.linear("q_proj")
        self.kv_a_proj_with_mqa = builder.linear("kv_a_proj_with_mqa")
        self.kv_a_layernorm = _norm(builder, layout.latent_size)
        self.kv_b_proj = UpProjection(builder, spec.num_heads * sum(self.sizes), layout.latent_size)
        self.o_proj = builder.linear("o_proj")

    @property
    def reader(self) -> Projection | None:
        return None

    @property
    def codes_reader(self) -> Projection | None:
        return self.q_a_proj if self.q_proj is None else self.q_proj

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        projected = self.project(x_TE, lambda linear, x: linear(x))
        operands = self.split(projected, rotary)
        if isinstance(context, PackedContext):
            value_TC = self.as_cached(operands.latent_TC, context)
            of_cache = value_TC, operands.key_TR
            attended = Attended(
                *PackedAttention.apply(
                    *operands, self.kv_b_proj.weight, value_TC.detach(), self.sizes, context, self.softmax_scale
                )
            )
        else:
            self.store(operands, context)
            attended = self.attend_paged(operands.q_THN, operands.q_THR, context)
            of_cache = None
        out_TE: Tensor = self.o_proj(attended.out_TV)
        if self.probe is not None:
            self.probe_all(projected, operands.q_THR, of_cache or self.read_back(context), attended, out_TE)
        return out_TE

    def project(self, x: Normed, multiply: Multiply, norm_for: NormFor = lambda norm, x_TA, _: norm(x_TA)) -> Projected:
        """`multiply`: the product of a linear in the form that calls. `norm_for`: a norm as a linear's operand."""
        kv_a_TX = multiply(self.kv_a_proj_with_mqa, x)
        if self.q_proj is not None:
            return Projected(multiply(self.q_proj, x), kv_a_TX, None)
        assert self.q_a_proj is not None and self.q_b_proj is not None and self.q_a_layernorm is not None
        q_a_TA = multiply(self.q_a_proj, x)
        q_TX = multiply(self.q_b_proj, norm_for(self.q_a_layernorm, q_a_TA, self.q_b_proj))
        return Projected(q_TX, kv_a_TX, q_a_TA)

    def split(self, projected: Projected, rotary: Rotary) -> Operands:
        q_THX = projected.q_TX.view(len(projected.q_TX), self.num_heads, -1)
        q_THN, q_THR = q_THX.split((self.sizes.nope, self.rope_size), 2)
        latent_TC, key_TR = projected.kv_a_TX.split((self.latent_size, self.rope_size), 1)
        return Operands(
            q_THN,
            rope(q_THR, *rotary, self.interleaved),
            self.kv_a_layernorm(latent_TC),
            rope(key_TR.unsqueeze(1), *rotary, self.interleaved).squeeze(1),
        )

    def as_cached(self, latent_TC: Tensor, context: PackedContext) -> Tensor:
        """The latents after the cache's quantiser. No gradient."""
        return latent_replay(latent_TC.detach(), self.treatments(context)[0].mode)

    def store(self, operands: Operands, context: PagedContext) -> None:
        """Write latents and keys to their pages."""
        latent, key = context.layers[self.layer].tensors
        latent_store(operands.latent_TC, operands.key_TR, latent, key, context.slot_mapping_T)

    def prepare_paged(self, projected: Projected, rotary: Rotary, context: PagedContext) -> tuple[Tensor, Tensor]:
        """`split` and `store` in one kernel: a query's parts without and with rotation. No gradient."""
        q_THX = projected.q_TX.view(len(projected.q_TX), self.num_heads, -1)
        q_THN, q_THR = q_THX.split((self.sizes.nope, self.rope_size), 2)
        latent, key = context.layers[self.layer].tensors
        norm = self.kv_a_layernorm
        return q_THN, latent_prepare(
            q_THR,
            projected.kv_a_TX,
            norm.weight,
            norm.eps,
            rotary,
            self.interleaved,
            latent,
            key,
            context.slot_mapping_T,
        )

    def attend_paged(self, q_THN: Tensor, q_THR: Tensor, context: PagedContext) -> Attended:
        """Attend over the pages, which have this forward's tokens. No gradient."""
        q_latent_THC, o_THC = self.attend_latents(q_THN, q_THR, context)
        return Attended(q_latent_THC, o_THC, expand(o_THC, self.kv_b_proj.weight, self.sizes))

    def attend_latents(self, q_THN: Tensor, q_THR: Tensor, context: PagedContext) -> tuple[Tensor, Tensor]:
        """`attend_paged` up to the sum of latents: the queries in the latents' space, and the sum."""
        latent, key = context.layers[self.layer].tensors
        q_latent_THC = absorb(q_THN, self.kv_b_proj.weight, self.sizes)
        o_THC = latent_paged(
            q_latent_THC,
            q_THR,
            latent,
            key,
            context.block_table_BP,
            context.cu_seqlens_q_B1,
            context.context_lens_B,
            self.softmax_scale,
            context.max_query_len,
        )
        return q_latent_THC, o_THC

    def read_back(self, context: Context) -> tuple[Tensor, Tensor]:
        """Latents and rotary keys of this forward's tokens, read from their pages."""
        assert isinstance(context, PagedContext)
        latent, key = context.layers[self.layer].tensors
        return _rows(latent, context.slot_mapping_T), _rows(key, context.slot_mapping_T)

    def probe_all(
        self,
        projected: Projected,
        q_THR: Tensor,
        of_cache: tuple[Tensor, Tensor],
        attended: Attended,
        out_TE: Tensor | None,
    ) -> None:
        """Passes all values to the probe. `of_cache`: latents and rotary keys as attention reads them."""
        assert self.probe is not None
        if projected.q_a_TA is not None:
            self.probe(self.layer, "q_a_proj", projected.q_a_TA)
        self.probe(self.layer, "q_proj", projected.q_TX)
        self.probe(self.layer, "kv_a_proj", projected.kv_a_TX)
        self.probe(self.layer, "rotated q", q_THR)
        self.probe(self.layer, "absorbed q", attended.q_latent_THC)
        self.probe(self.layer, "latent as cached", of_cache[0])
        self.probe(self.layer, "rotary key as cached", of_cache[1])
        self.probe(self.layer, "latent out", attended.o_THC)
        self.probe(self.layer, "attention out", attended.out_TV)
        if out_TE is not None:
            self.probe(self.layer, "o_proj", out_TE)


def _norm(builder: BlockBuilder, size: int) -> RMSNorm:
    return RMSNorm(size, LATENT_EPS, dtype=builder.dtype, device=builder.device)


def softmax_scale(head_size: int, scaling: RopeScaling | None) -> float:
    """1 / sqrt(head size), times YaRN's factor if the model has one."""
    factor = scaling.softmax_factor if isinstance(scaling, YarnScaling) else 1.0
    return float(head_size**-0.5 * factor)


def _rows(cache: CachedPages, slot_T: Tensor) -> Tensor:
    """Values [T, ...] of these slots of the pages."""
    page_T, offset_T = slot_T // cache.pages.shape[1], slot_T % cache.pages.shape[1]
    if cache.pages.dtype != E4M3:
        return cache.pages[page_T, offset_T]
    assert cache.token_scale is not None
    codes_TC = cache.pages.view(torch.uint8)[page_T, offset_T].view(E4M3)
    return latent_values(codes_TC, cache.token_scale[page_T, :, offset_T])
