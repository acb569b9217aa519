"""Causal self-attention with grouped queries: qkv -> QK-norm -> RoPE -> attend -> output projection.

One module for both sides of the run; the context says which. With a `PackedContext` (training) every key
lies in the tensor it came with; with a `PagedContext` (rollout) K and V go into the pages first and are
read back from them, the present chunk included, so that a prompt token sees the quantised values at prefill
as at decode.

T tokens, E hidden size, H query heads, K kv heads, D head size, Q = H * D, L layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octetrl.kernels.attention.attention_packed import attention_packed
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.kv_store import kv_replay, kv_store
from octetrl.kernels.rows.rope import rope
from octetrl.layers.context import Context, LayerCache, PackedContext, PagedContext
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.attention import rollout as rollout_form
from octetrl.models.blocks.attention import training as training_form
from octetrl.models.blocks.attention.as_cached import read_back, values_of
from octetrl.models.blocks.block import Block, BlockBuilder


class Attention(Block):
    """qkv_proj: E -> (H + 2K) * D, query rows first; o_proj: H * D -> E; each a Linear or a Float8Linear.

    `quantize_k`: whether an FP8 cache holds K in FP8 too; if not, K is BF16 beside an FP8 V.
    """

    rollout = rollout_form.rollout
    begin, finish, backward = training_form.begin, training_form.finish, training_form.backward

    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__(builder)
        spec = builder.spec
        self.quantize_k = builder.policy.k_cache == "fp8"
        self.num_heads, self.num_kv_heads, self.head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
        self.softmax_scale = spec.head_size**-0.5
        self.qkv_proj = builder.linear("qkv_proj")
        self.o_proj = builder.linear("o_proj")
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm, self.k_norm = builder.norm(spec.head_size), builder.norm(spec.head_size)

    @property
    def reader(self) -> Projection:
        return self.qkv_proj

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        qkv_THD = self.qkv_proj(x_TE).view(x_TE.shape[0], -1, self.head_size)
        q_THD, k_TKD, v_TKD = qkv_THD.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        q_THD, k_TKD = rope(q_THD, *rotary), rope(k_TKD, *rotary)
        if isinstance(context, PackedContext):
            out_THD = self._attend_packed(q_THD, k_TKD, v_TKD, context)
        else:
            out_THD = self._attend_paged(q_THD, k_TKD, v_TKD, context)
        out_TE: Tensor = self.o_proj(out_THD.flatten(1))
        if self.probe is not None:
            k_cached_TKD, v_cached_TKD = self._as_cached(k_TKD, v_TKD, context)
            self.probe(self.layer, "qkv_proj", qkv_THD.flatten(1))
            self.probe(self.layer, "rotated q", q_THD)
            self.probe(self.layer, "rotated k", k_TKD)
            self.probe(self.layer, "k as cached", k_cached_TKD)
            self.probe(self.layer, "v as cached", v_cached_TKD)
            self.probe(self.layer, "attention out", out_THD)
            self.probe(self.layer, "o_proj", out_TE)
        return out_TE

    def _attend_packed(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PackedContext) -> Tensor:
        if context.kv_amax_2LK is not None:
            observe_amax(context.kv_amax_2LK[:, self.layer], k_TKD, v_TKD)
        return attention_packed(
            q_THD,
            k_TKD,
            v_TKD,
            context.cu_seqlens_B1,
            context.max_seqlen,
            self.softmax_scale,
            k_scale_K=self._scale_of(context.k_scale_LK),
            v_scale_K=self._scale_of(context.v_scale_LK),
            kv_mode=context.kv_mode,
            quantize_k=self.quantize_k,
        )

    def _as_cached(self, k_TKD: Tensor, v_TKD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """K and V as this forward's attention multiplies them: float32 [T, K, D], codes times scales."""
        if not isinstance(context, PackedContext):
            return read_back(context.layers[self.layer], context.slot_mapping_T)
        scales = self._scale_of(context.k_scale_LK), self._scale_of(context.v_scale_LK)
        return values_of(kv_replay(k_TKD, v_TKD, context.kv_mode, *scales, self.quantize_k))

    def _scale_of(self, scale_LK: Tensor | None) -> Tensor | None:
        return None if scale_LK is None else scale_LK[self.layer]

    def _attend_paged(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PagedContext) -> Tensor:
        cache: LayerCache = context.layers[self.layer]
        scales = (cache.k_scale_K, cache.v_scale_K, cache.k_token_scale, cache.v_token_scale)
        kv_store(k_TKD, v_TKD, cache.k, cache.v, context.slot_mapping_T, *scales, cache.saturated_2K)
        out_THD = attention_paged(
            q_THD,
            cache.k,
            cache.v,
            context.block_table_BP,
            context.cu_seqlens_q_B1,
            context.context_lens_B,
            self.softmax_scale,
            *scales,
            max_query_len=context.max_query_len,
        )
        assert isinstance(out_THD, Tensor)
        return out_THD


@torch.no_grad()
def observe_amax(amax_2K: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Raises amax_2K to max|K| and max|V| of each head, in place, on the device. NaN stays NaN.

    One reduction each, without a copy of |x|. Doing it twice (activation checkpointing) is harmless.
    """
    for amax_K, x_TKD in zip(amax_2K, (k_TKD, v_TKD), strict=True):
        observed_K = torch.linalg.vector_norm(x_TKD, ord=float("inf"), dim=(0, 2))
        torch.maximum(amax_K, observed_K.float(), out=amax_K)
