"""Attention's layout: the projections q, k, v as one linear, and the output projection. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octetrl.shapes.blocks import (
    BlockLayout,
    BlockMemory,
    CachedTensor,
    LinearLayout,
    PairProducts,
    Part,
    Peak,
    TrainedAs,
    VectorLayout,
)
from octetrl.shapes.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class AttentionLayout(BlockLayout):
    """Sizes, biases and QK-norm come from the spec.

    `window`: a token reads so many keys, its own included; None: all before it. Older pages of the KV cache are kept.
    `rotated`: how many values of a head RoPE rotates, the first ones; None: all. `sinks`: each head has a score without
    a key (kernels/attention/attention_order.py).
    """

    window: int | None = None
    rotated: int | None = None
    sinks: bool = False

    sites: ClassVar[tuple[str, ...]] = (
        "qkv_proj",
        "rotated q",
        "rotated k",
        "k as cached",
        "v as cached",
        "attention out",
        "o_proj",
    )
    can_be_cut = True

    def tensors(self, spec: ModelSizes) -> tuple[LinearLayout | VectorLayout, ...]:
        cut = spec.tensor.size
        qkv: tuple[Part, ...]
        if spec.fused_files:
            qkv = (Part("qkv_proj", spec.q_size + 2 * spec.kv_size),)
        else:
            qkv = (Part("q_proj", spec.q_size), Part("k_proj", spec.kv_size), Part("v_proj", spec.kv_size))
        qk_norms = (VectorLayout("q_norm.weight", spec.head_size), VectorLayout("k_norm.weight", spec.head_size))
        return (
            LinearLayout("qkv_proj", spec.hidden_size, qkv, spec.qkv_bias),
            *(qk_norms if spec.qk_norm else ()),
            *((VectorLayout("sinks", spec.num_heads, starts_at=0.0),) if self.sinks else ()),
            LinearLayout(
                "o_proj", cut * spec.q_size, (Part("o_proj", spec.hidden_size // cut),), spec.o_bias, joins=True
            ),
        )

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Saved: QKV. Costly: the output and its log-sum-exp, computed together with Q, K, V after RoPE."""
        b, hidden = how.value_bytes, spec.hidden_size
        qkv = b * (spec.q_size + 2 * spec.kv_size)
        dn1, dout = b * hidden, b * spec.q_size
        # After attention's backward: Q, K, V, their gradients before and after RoPE, and o_proj's gradient.
        held: float = dn1 + 3 * qkv + dout
        if self.rotated is not None:  # copies on the way from RoPE's kernel to the next (qkv_separate.py)
            held += qkv + 4 * 2 * spec.q_size
        if padded := _padded_share(spec.head_size):
            gradients = padded * qkv
            copies = padded * b * (3 * spec.q_size + 2 * spec.kv_size)  # of Q, K, V, the output and its gradient
            in_float32 = 4 * 2 * spec.q_size  # Q's gradient between RoPE and QK-norm
            held = dn1 + qkv + dout + gradients + max(copies, qkv + in_float32)
        return BlockMemory(
            saved=qkv,
            costly=b * spec.q_size + 4 * spec.num_heads,
            made_with_costly=qkv,
            peaks=(Peak(held, 0 if how.frozen else b * hidden * spec.q_size),),
            of_weights=0 if how.frozen else b * sum(linear.num_weights for linear in self.linears(spec)),
        )

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        return {"query size (heads * head size)": spec.q_size, "key size (kv heads * head size)": spec.kv_size}

    def cached(self, spec: ModelSizes) -> tuple[CachedTensor, ...]:
        """K and V of each KV head, after QK-norm and RoPE; their pages are those of kernels/attention/kv_store.py."""
        shape, scales = (spec.num_kv_heads, spec.head_size), (spec.num_kv_heads,)
        outliers = None if spec.fp8_k_is_safe else "this family has no QK-norm, and FP8 loses its outlier channels"
        return (
            CachedTensor("K", shape, scales, never_fp8=outliers),
            CachedTensor("V", shape, scales, codes_turned=True),
        )

    def rotary_size(self, spec: ModelSizes) -> int:
        return spec.head_size if self.rotated is None else self.rotated

    def pair_products(self, spec: ModelSizes) -> PairProducts:
        return PairProducts(7 * spec.q_size, 7 * spec.q_size)


def _padded_share(head_size: int) -> float:
    """Length of a padded head over its own, where attention's backward copies its operands; 0 where it doesn't."""
    block = 1 << (head_size - 1).bit_length()
    return block / head_size if block > head_size else 0.0
