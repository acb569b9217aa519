"""The layout of a layer that transformers' own module computes (models/transformers_decoder.py). No torch.

`models/transformers_shape.py` reads it from the module: every parameter by its name in a checkpoint, and the heads
that attention is called with. Names are therefore those of the checkpoint: `layers.3.self_attn.q_proj`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from octetrl.shapes.blocks import (
    BlockLayout,
    BlockMemory,
    CachedTensor,
    LinearLayout,
    PairProducts,
    Peak,
    TensorLayout,
    TrainedAs,
)
from octetrl.shapes.sizes import ModelSizes


@dataclass(frozen=True, slots=True)
class TransformersLayout(BlockLayout):
    """`own`: the layer's parameters, none in its second place. `window`: as `AttentionLayout` has it."""

    own: tuple[TensorLayout, ...] = ()
    window: int | None = None

    is_whole_layer = True
    sites = ("rotated q", "rotated k", "k as cached", "v as cached", "attention out")

    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        return self.own

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Autograd keeps the inputs of ops: linears, norms in float32, attention. An upper bound, from what it kept
        for the families of tests/transformers_families.py on a CPU: 0.7 to 0.95 of this."""
        linears = self.linears(spec)
        if not linears:
            return BlockMemory(saved=0)
        b = how.value_bytes
        wide = sum(linear.in_features + linear.out_features for linear in linears)
        norms = 4 * 2 * spec.hidden_size * (len(self.own) - len(linears))
        weights = 0 if how.frozen else b * sum(linear.num_weights for linear in linears)
        most = max(linear.in_features + linear.out_features for linear in linears)
        saved = b * wide + norms
        return BlockMemory(
            saved=saved, costly=b * spec.q_size, peaks=(Peak(4 * b * most, weights),), of_weights=weights
        )

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        return {f"{side} of {linear.name}": size for linear in self.linears(spec) for side, size in _sides(linear)}

    def cached(self, spec: ModelSizes) -> tuple[CachedTensor, ...]:
        """K and V as attention gets them, as in models/blocks/attention/layout.py."""
        if not self.own:
            return ()
        shape, scales = (spec.num_kv_heads, spec.head_size), (spec.num_kv_heads,)
        outliers = None if spec.fp8_k_is_safe else "its K has a bias and no norm, and FP8 loses its outlier channels"
        return (
            CachedTensor("K", shape, scales, never_fp8=outliers),
            CachedTensor("V", shape, scales, codes_turned=True),
        )

    def pair_products(self, spec: ModelSizes) -> PairProducts:
        return PairProducts(7 * spec.q_size, 7 * spec.q_size) if self.own else PairProducts(0, 0)


def _sides(linear: LinearLayout) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("input", linear.in_features), ("output", linear.out_features)
