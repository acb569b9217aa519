"""Attention's layout: the projections q, k, v as one linear, and the output projection. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octetrl.config.blocks import (
    BlockLayout,
    BlockMemory,
    CachedTensor,
    LinearLayout,
    Part,
    Peak,
    TrainedAs,
    VectorLayout,
)
from octetrl.config.spec import ModelSpec

if TYPE_CHECKING:
    from octetrl.models.blocks.attention.module import Attention
    from octetrl.models.blocks.block import BlockBuilder


@dataclass(frozen=True, slots=True)
class AttentionLayout(BlockLayout):
    """Sizes, biases and QK-norm come from the spec."""

    sites = (
        "qkv_proj",
        "rotated q",
        "rotated k",
        "k as cached",
        "v as cached",
        "attention out",
        "o_proj",
    )

    def tensors(self, spec: ModelSpec) -> tuple[LinearLayout | VectorLayout, ...]:
        qkv = (Part("q_proj", spec.q_size), Part("k_proj", spec.kv_size), Part("v_proj", spec.kv_size))
        qk_norms = (VectorLayout("q_norm.weight", spec.head_size), VectorLayout("k_norm.weight", spec.head_size))
        return (
            LinearLayout("qkv_proj", spec.hidden_size, qkv, spec.qkv_bias),
            *(qk_norms if spec.qk_norm else ()),
            LinearLayout("o_proj", spec.q_size, (Part("o_proj", spec.hidden_size),)),
        )

    def memory(self, spec: ModelSpec, how: TrainedAs) -> BlockMemory:
        """Saved: QKV. Costly: the output and its log-sum-exp, computed together with Q, K, V after RoPE."""
        b, hidden = how.value_bytes, spec.hidden_size
        qkv = b * (spec.q_size + 2 * spec.kv_size)
        dn1, dout = b * hidden, b * spec.q_size
        return BlockMemory(
            saved=qkv,
            costly=b * spec.q_size + 4 * spec.num_heads,
            made_with_costly=qkv,
            # After attention's backward: Q, K, V, their gradients before and after RoPE, and o_proj's gradient.
            peaks=(Peak(dn1 + qkv + 2 * qkv + dout, 0 if how.frozen else b * hidden * spec.q_size),),
            of_weights=0 if how.frozen else b * sum(linear.num_weights for linear in self.linears(spec)),
        )

    def sizes(self, spec: ModelSpec) -> Mapping[str, int]:
        return {"query size (heads * head size)": spec.q_size, "key size (kv heads * head size)": spec.kv_size}

    def cached(self, spec: ModelSpec) -> tuple[CachedTensor, ...]:
        """K and V of each KV head, after QK-norm and RoPE; their pages are those of kernels/attention/kv_store.py."""
        shape, scales = (spec.num_kv_heads, spec.head_size), (spec.num_kv_heads,)
        outliers = None if spec.fp8_k_is_safe else "this family has no QK-norm, and FP8 loses its outlier channels"
        return (
            CachedTensor("K", shape, scales, never_fp8=outliers),
            CachedTensor("V", shape, scales, codes_turned=True),
        )

    def rotary_size(self, spec: ModelSpec) -> int:
        return spec.head_size

    def build(self, builder: BlockBuilder) -> Attention:
        from octetrl.models.blocks.attention.module import Attention  # needs torch

        return Attention(builder)
