"""ModelSpec: everything that distinguishes one decoder from another.

Llama, Qwen2.5 and Qwen3 are the same decoder with different specs. `models/families.py` creates the spec from a Hugging
Face `config.json`. The model, the engine, `check` and `export` read it. It is in `config/`, because the precision
policy and the memory estimate read it too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from octetrl.config.blocks import PLACES, CachedTensor, LayerBlocks, LinearLayout, StackedLinearLayout, VectorLayout
from octetrl.config.rope import RopeScaling
from octetrl.config.tensor_cut import WHOLE_MODEL, TensorCut

PREFILL_CHUNK = 2048  # tokens of a forward; a mixture's has eight times as many

# Larger than any model's sizes. A config with larger ones is damaged and would use all memory before it fails.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH, MOST_TOKENS = 1_000, 1 << 16, 1 << 20, 1 << 24

SUPPORTED_HEAD_SIZES = (
    16,
    32,
    64,
    80,
    96,
    128,
    192,
    256,
)  # asserted by the attention kernels, checked by `models/families.py`


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a model; or, with `tensor`, of the part that one of several tensor-parallel workers has (`cut`)."""

    family: str  # "llama", "qwen2", "qwen3", ...: the keys of `ARCHITECTURES` in models/families.py
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
    blocks: tuple[LayerBlocks, ...]  # of layers 0, 1, ...; all further layers have the last entry's blocks
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None  # of a config; a reward is read at the last token that is another
    o_bias: bool = False  # `attention_bias`: o_proj has a bias too
    fused_files: bool = False  # Phi-3: a checkpoint has qkv_proj and gate_up_proj as one tensor each
    tensor: TensorCut = WHOLE_MODEL  # heads and the intermediate size are this part's; widths of inputs are whole

    def cut(self, tensor: TensorCut) -> ModelSpec:
        """The part of one tensor-parallel worker. `why_not_cut` says which models cannot be cut."""
        assert self.tensor.size == 1, "a part is not cut again"
        return self._scaled(tensor, 1, tensor.size)

    @property
    def whole(self) -> ModelSpec:
        """The whole model, of which this may be a part."""
        return self if self.tensor.size == 1 else self._scaled(WHOLE_MODEL, self.tensor.size, 1)

    def _scaled(self, tensor: TensorCut, times: int, parts: int) -> ModelSpec:
        return replace(
            self,
            num_heads=self.num_heads * times // parts,
            num_kv_heads=self.num_kv_heads * times // parts,
            intermediate_size=self.intermediate_size * times // parts,
            tensor=tensor,
        )

    @property
    def vocab_rows(self) -> int:
        """Rows of embedding and lm_head in this part."""
        return len(self.tensor.vocabulary(self.vocab_size))

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

    def blocks_of(self, layer: int) -> LayerBlocks:
        return self.blocks[min(layer, len(self.blocks) - 1)]

    def linears(self) -> Iterator[tuple[str, LinearLayout]]:
        """Yield every linear of the layers with its full name, such as `layers.3.mlp.down_proj`, in order."""
        for layer in range(self.num_layers):
            for place, block in zip(PLACES, self.blocks_of(layer), strict=True):
                for linear in block.linears(self):
                    yield f"layers.{layer}.{place.name}.{linear.name}", linear

    @property
    def has_experts(self) -> bool:
        return any(isinstance(linear, StackedLinearLayout) for _, linear in self.linears())

    @property
    def prefill_chunk(self) -> int:
        """Tokens of a prefill forward if the recipe says nothing. Every forward of a mixture reads all its experts, so
        theirs are fewer and larger."""
        return PREFILL_CHUNK * 8 if self.has_experts else PREFILL_CHUNK

    def without_gradient(self) -> Iterator[str]:
        """Yield the full names of the parameters that the optimizer does not update."""
        for layer in range(self.num_layers):
            for place, block in zip(PLACES, self.blocks_of(layer), strict=True):
                for tensor in block.tensors(self):
                    if isinstance(tensor, VectorLayout) and not tensor.has_gradient:
                        yield f"layers.{layer}.{place.name}.{tensor.name}"

    def linear_sizes(self) -> dict[str, int]:
        """Widths of all linears of the layers, by name."""
        sizes = {"hidden size": self.hidden_size}
        for block in dict.fromkeys(block for blocks in self.blocks for block in blocks):
            sizes |= block.sizes(self)
        return sizes

    def cached(self, layer: int) -> tuple[CachedTensor, ...]:
        """Tensors that a token stores in this layer's KV cache."""
        caches = [tensors for block in self.blocks_of(layer) if (tensors := block.cached(self))]
        assert len(caches) <= 1, f"layer {layer}: two blocks with a KV cache"
        return caches[0] if caches else ()

    def refused_on_gpu(self) -> str | None:
        """Why the kernels of a GPU do not run this model; None: they do."""
        blocks = dict.fromkeys(block for blocks in self.blocks for block in blocks)
        return next((why for block in blocks if (why := block.refused_on_gpu()) is not None), None)

    @property
    def calibrates(self) -> bool:
        """Whether an FP8 cache can have calibrated scales. Otherwise "calibrated" means "dynamic"."""
        blocks = dict.fromkeys(block for blocks in self.blocks for block in blocks)
        return all(tensor.calibrates for block in blocks for tensor in block.cached(self))

    @property
    def num_cache_scales(self) -> int:
        """Number of calibrated scales of a layer: the largest number of any layer, over all its cached tensors."""
        return max(sum(tensor.num_scales for tensor in self.cached(layer)) for layer in range(self.num_layers))

    def cache_scale_name(self, layer: int, index: int) -> str:
        """Describe a calibrated scale in words: `K in layer 3, head 1`."""
        for tensor in self.cached(layer):
            if index < tensor.num_scales:
                return f"{tensor.name} in layer {layer}, {tensor.scale_of} {index}"
            index -= tensor.num_scales
        raise IndexError(f"layer {layer} has no scale {index}")

    @property
    def rotary_size(self) -> int:
        """Number of values of a head that RoPE rotates by position: the width of the table of angles."""
        blocks = dict.fromkeys(block for blocks in self.blocks for block in blocks)
        sizes = {size for block in blocks if (size := block.rotary_size(self)) is not None}
        assert len(sizes) == 1, f"blocks with different rotary sizes: {sorted(sizes)}"
        return sizes.pop()

    @property
    def num_parameters(self) -> int:
        in_blocks = sum(
            self.hidden_size + sum(tensor.num_parameters for tensor in block.tensors(self))
            for layer in range(self.num_layers)
            for block in self.blocks_of(layer)
        )
        embeddings = self.vocab_rows * self.hidden_size * (1 if self.tied_embeddings else 2)
        return in_blocks + embeddings + self.hidden_size


def ordinary_head_size(width: int) -> int:
    """The head size of ordinary attention for `width` elements: the smallest power of two that the kernels take and
    that holds them; beyond those, on a CPU, the width itself."""
    powers = (size for size in SUPPORTED_HEAD_SIZES if size.bit_count() == 1 and size >= width)
    return min(powers, default=width)
