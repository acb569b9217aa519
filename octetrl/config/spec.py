"""ModelSpec: all that tells one decoder from another. Llama, Qwen2.5 and Qwen3 are one decoder with a spec.

Made from a Hugging Face `config.json` by `models/families.py`; read by the model, the engine, `check` and `export`.
It lies in `config/`, below everything, because the precision policy and the memory estimate read it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from octetrl.config.blocks import PLACES, LayerBlocks, LinearLayout

# Sizes beyond any model's: a config that asks for more is damaged, and would take all memory before it fails.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH, MOST_TOKENS = 1_000, 1 << 16, 1 << 20, 1 << 24

SUPPORTED_HEAD_SIZES = (16, 32, 64, 128, 256)  # the attention kernels assert it, `models/families.py` refuses by it


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3.1's frequency scaling: long wavelengths are slowed by `factor`, short ones kept, the rest blended."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True, slots=True)
class ModelSpec:
    family: str  # "llama", "qwen2", "qwen3"
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
    qkv_bias: bool  # Qwen2, Qwen2.5
    qk_norm: bool  # Qwen3
    tied_embeddings: bool
    blocks: tuple[LayerBlocks, ...]  # of layers 0, 1, ...; the last is also that of every layer behind it
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def fp8_k_is_safe(self) -> bool:
        """Without QK-norm, K has outlier channels that a per-head E4M3 scale ruins (docs/fp8.md §4)."""
        return self.qk_norm or not self.qkv_bias

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_size

    def blocks_of(self, layer: int) -> LayerBlocks:
        return self.blocks[min(layer, len(self.blocks) - 1)]

    def linears(self) -> Iterator[tuple[str, LinearLayout]]:
        """Every linear of the layers by its full name, such as `layers.3.mlp.down_proj`, in order."""
        for layer in range(self.num_layers):
            for place, block in zip(PLACES, self.blocks_of(layer), strict=True):
                for linear in block.linears(self):
                    yield f"layers.{layer}.{place.name}.{linear.name}", linear

    def linear_sizes(self) -> dict[str, int]:
        """The widths of all linears of the layers, by name."""
        sizes = {"hidden size": self.hidden_size}
        for block in dict.fromkeys(block for blocks in self.blocks for block in blocks):
            sizes |= block.sizes(self)
        return sizes

    @property
    def num_parameters(self) -> int:
        in_blocks = sum(
            self.hidden_size + sum(tensor.num_parameters for tensor in block.tensors(self))
            for layer in range(self.num_layers)
            for block in self.blocks_of(layer)
        )
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        return in_blocks + embeddings + self.hidden_size
