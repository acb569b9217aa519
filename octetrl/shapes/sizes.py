"""ModelSizes: the sizes and switches of a decoder, which the layouts of its blocks are computed from. No torch.

`ModelSpec` (spec.py) adds the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from octetrl.shapes.rope import RopeScaling
from octetrl.shapes.tensor_cut import WHOLE_MODEL, TensorCut

SUPPORTED_HEAD_SIZES = 16, 32, 64, 80, 96, 128, 192, 256  # asserted by the kernels, checked by models/families.py


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """A model's sizes; or, with `tensor`, those of the part that a tensor-parallel worker has (`ModelSpec.cut`)."""

    family: str  # "llama", "qwen2", "qwen3", ...: the names in models/family.py
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool  # Qwen2, Qwen2.5; `attention_bias`
    qk_norm: bool  # Qwen3
    tied_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None  # a reward is read at the last token that is another
    o_bias: bool = False  # `attention_bias`: o_proj has a bias too
    offset_norms: bool = False  # Qwen3.5: norms multiply by 1 + weight
    fused_files: bool = False  # Phi-3: a checkpoint has qkv_proj and gate_up_proj as one tensor each
    tensor: TensorCut = WHOLE_MODEL  # heads and the intermediate size are this part's; widths of inputs are whole

    @property
    def fp8_k_is_safe(self) -> bool:
        """Whether K may be stored in FP8. K with a bias and without QK-norm has outlier channels, for which one E4M3
        scale per head is too coarse (docs/fp8.md §4)."""
        return self.qk_norm or not self.qkv_bias

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size


def ordinary_head_size(width: int) -> int:
    """The head size of ordinary attention for `width` elements: the smallest power of two that the kernels take and
    that holds them; beyond those, on a CPU, the width itself."""
    powers = (size for size in SUPPORTED_HEAD_SIZES if size.bit_count() == 1 and size >= width)
    return min(powers, default=width)
