"""Causal self-attention with grouped queries: qkv -> QK-norm -> RoPE -> attend -> output projection.

One module serves both sides; the context says which. With a `PackedContext` (training) the keys are in the tensor of
this forward. With a `PagedContext` (rollout) K and V are written into the pages and read back, including the current
chunk. A prompt token therefore reads the same quantised values in prefill as in decode.

T tokens, E hidden size, H query heads, K kv heads, D head size, Q = H * D.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octetrl.kernels.attention.attention_packed import attention_packed
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.kv_store import kv_replay, kv_store
from octetrl.kernels.attention.records import Rotation
from octetrl.kernels.rows.rope import rope
from octetrl.layers.context import Context, LayerCache, PackedContext, PagedContext
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.attention.as_cached import read_back, replay_of, saturated_of, values_of
from octetrl.models.blocks.attention.shared_tokens import attention_shared
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.shapes.blocks import KVTensors


class Attention(Block):
    """qkv_proj: E -> (H + 2K) * D, query rows first; o_proj: H * D -> E; each a Linear or a Float8Linear.

    `quantized`: which of K and V an FP8 cache holds in codes; the other one is BF16.
    """

    def __init__(self, builder: BlockBuilder, window: int | None = None, sinks: bool = False) -> None:
        super().__init__(builder)
        spec = builder.spec
        k_in_codes, v_in_codes = self.in_codes
        self.quantized: KVTensors = "both" if k_in_codes == v_in_codes else "k" if k_in_codes else "v"
        self.num_heads, self.num_kv_heads, self.head_size = spec.num_heads, spec.num_kv_heads, spec.head_size
        self.softmax_scale = spec.head_size**-0.5
        self.window = window
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        self.sinks = nn.Parameter(torch.zeros_like(builder.norm(spec.num_heads).weight)) if sinks else None
        self.add_projections(builder)

    def add_projections(self, builder: BlockBuilder) -> None:
        self.qkv_proj = builder.linear("qkv_proj")
        self.o_proj = builder.linear("o_proj")
        if builder.spec.qk_norm:
            self.q_norm, self.k_norm = builder.head_norm(), builder.head_norm()

    def rotation(self, cos_SR: Tensor, sin_SR: Tensor, positions_T: Tensor | None = None) -> Rotation:
        """What the fused kernels do between the QKV projection and attention."""
        if self.q_norm is None or self.k_norm is None:
            return Rotation(None, None, 0.0, cos_SR, sin_SR, positions_T)
        return Rotation(self.q_norm.multiplier, self.k_norm.multiplier, self.q_norm.eps, cos_SR, sin_SR, positions_T)

    @property
    def reader(self) -> Projection:
        return self.qkv_proj

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        qkv_THD = self.qkv_proj(x_TE).view(x_TE.shape[0], -1, self.head_size)
        q_THD, k_TKD, v_TKD = qkv_THD.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        out_TE: Tensor = self.o_proj(self.attend(rope(q_THD, *rotary), rope(k_TKD, *rotary), v_TKD, context).flatten(1))
        if self.probe is not None:
            self.probe(self.layer, "qkv_proj", qkv_THD.flatten(1))
            self.probe(self.layer, "o_proj", out_TE)
        return out_TE

    def attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: Context) -> Tensor:
        """Attention's output [T, H, D] from Q and K after RoPE, and V."""
        if isinstance(context, PackedContext):
            out_THD = self._attend_packed(q_THD, k_TKD, v_TKD, context)
        else:
            out_THD = self._attend_paged(q_THD, k_TKD, v_TKD, context)
        if self.probe is not None:
            k_cached_TKD, v_cached_TKD = self._as_cached(k_TKD, v_TKD, context)
            self.probe(self.layer, "rotated q", q_THD)
            self.probe(self.layer, "rotated k", k_TKD)
            self.probe(self.layer, "k as cached", k_cached_TKD)
            self.probe(self.layer, "v as cached", v_cached_TKD)
            self.probe(self.layer, "attention out", out_THD)
        return out_THD

    def _attend_packed(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PackedContext) -> Tensor:
        if context.kv_amax_LS is not None:
            observe_amax(context.kv_amax_LS[self.layer, : 2 * self.num_kv_heads].view(2, -1), k_TKD, v_TKD)
        settings = self.softmax_scale, replay_of(*self.treatments(context)), self.window, self.sinks
        if context.group is not None:
            return attention_shared(q_THD, k_TKD, v_TKD, context, *settings)
        return attention_packed(q_THD, k_TKD, v_TKD, context.cu_seqlens_B1, context.max_seqlen, *settings)

    def _as_cached(self, k_TKD: Tensor, v_TKD: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """K and V as the operands of this forward's attention: float32 [T, K, D], codes times scales."""
        if not isinstance(context, PackedContext):
            return read_back(context.layers[self.layer], context.slot_mapping_T)
        return values_of(kv_replay(k_TKD, v_TKD, replay_of(*self.treatments(context))))

    def _attend_paged(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, context: PagedContext) -> Tensor:
        cache: LayerCache = context.layers[self.layer]
        k, v = cache.tensors
        kv_store(k_TKD, v_TKD, k, v, context.slot_mapping_T, saturated_of(cache, self.num_kv_heads))
        out_THD = attention_paged(
            q_THD,
            k,
            v,
            context.block_table_BP,
            context.cu_seqlens_q_B1,
            context.context_lens_B,
            self.softmax_scale,
            max_query_len=context.max_query_len,
            window=self.window,
            draft_offset_B=context.draft_offset_B,
            sinks_H=self.sinks,
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
