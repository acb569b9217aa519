"""ModelSpec: everything that distinguishes one decoder from another.

Llama, Qwen2.5 and Qwen3 are the same decoder with different specs. `models/families.py` creates the spec from a Hugging
Face `config.json`. The model, the engine, `check`, `export`, the precision policy and the memory estimate read it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from octetrl.shapes.blocks import (
    PLACES,
    BlockLayout,
    CachedTensor,
    LayerBlocks,
    LinearLayout,
    MatrixLayout,
    PairProducts,
    StackedLinearLayout,
    VectorLayout,
)
from octetrl.shapes.sizes import ModelSizes
from octetrl.shapes.tensor_cut import WHOLE_MODEL, TensorCut

PREFILL_CHUNK = 2048  # tokens of a forward; a mixture's has eight times as many

# Larger than any model's sizes. A config with larger ones is damaged and would use all memory before it fails.
MOST_LAYERS, MOST_HEADS, MOST_WIDTH, MOST_TOKENS = 1_000, 1 << 16, 1 << 20, 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ModelSizes):
    """The shape of a model; or, with `tensor`, of the part that one of several tensor-parallel workers has (`cut`)."""

    blocks: tuple[LayerBlocks, ...]  # those of layers 0, 1, ...; all further layers have the last entry's blocks
    hf_config: str | None = None  # the config.json of a model that transformers' modules compute; None: our blocks do
    outer_config: str | None = field(default=None, compare=False)  # the config.json around a `text_config`
    logit_scale: float = 1.0  # a power of two that the last hidden states are multiplied by before lm_head

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

    def blocks_of(self, layer: int) -> LayerBlocks:
        return self.blocks[min(layer, len(self.blocks) - 1)]

    def named_blocks(self) -> Iterator[tuple[str, BlockLayout]]:
        """Yield the blocks of all layers with their names, such as `layers.3.mlp`, in order."""
        for layer in range(self.num_layers):
            for place, block in zip(PLACES, self.blocks_of(layer), strict=True):
                yield f"layers.{layer}" if block.is_whole_layer else f"layers.{layer}.{place.name}", block

    @property
    def distinct_blocks(self) -> tuple[BlockLayout, ...]:
        return tuple(dict.fromkeys(block for blocks in self.blocks for block in blocks))

    def linears(self) -> Iterator[tuple[str, LinearLayout]]:
        """Yield every linear of the layers with its full name, such as `layers.3.mlp.down_proj`, in order."""
        for name, block in self.named_blocks():
            for linear in block.linears(self):
                yield f"{name}.{linear.name}", linear

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
        for name, block in self.named_blocks():
            for tensor in block.tensors(self):
                if isinstance(tensor, VectorLayout) and not tensor.has_gradient:
                    yield f"{name}.{tensor.name}"

    def linear_sizes(self) -> dict[str, int]:
        """Widths of all linears of the layers, by name."""
        sizes = {"hidden size": self.hidden_size}
        for block in self.distinct_blocks:
            sizes |= block.sizes(self)
        return sizes

    def cached(self, layer: int) -> tuple[CachedTensor, ...]:
        """Tensors that a token stores in this layer's KV cache."""
        caches = [tensors for block in self.blocks_of(layer) if (tensors := block.cached(self))]
        assert len(caches) <= 1, f"layer {layer}: two blocks with a KV cache"
        return caches[0] if caches else ()

    def state_bytes(self, value_bytes: int, most_rows: int = 1) -> int:
        """Bytes that a sequence of any length keeps in all layers. `most_rows`: that a decode forward may add to it."""
        return sum(block.state_bytes(self, value_bytes, most_rows) for _, block in self.named_blocks())

    def refused_on_gpu(self) -> str | None:
        """Why the kernels of a GPU do not run this model; None: they do."""
        return next((why for block in self.distinct_blocks if (why := block.refused_on_gpu()) is not None), None)

    @property
    def calibrates(self) -> bool:
        """Whether an FP8 cache can have calibrated scales. Otherwise "calibrated" means "dynamic"."""
        return all(tensor.calibrates for block in self.distinct_blocks for tensor in block.cached(self))

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
        sizes = {size for block in self.distinct_blocks if (size := block.rotary_size(self)) is not None}
        assert len(sizes) == 1, f"blocks with different rotary sizes: {sorted(sizes)}"
        return sizes.pop()

    @property
    def num_parameters(self) -> int:
        in_blocks = sum(
            sum(tensor.num_parameters for tensor in block.tensors(self))
            + (0 if block.is_whole_layer else self.hidden_size)
            for _, block in self.named_blocks()
        )
        embeddings = self.vocab_rows * self.hidden_size * (1 if self.tied_embeddings else 2)
        return in_blocks + embeddings + self.hidden_size


def token_weights(spec: ModelSpec) -> int:
    """Weights that one token is multiplied by, in all layers. Of a mixture the router's and those of the chosen experts
    count. Embedding and lm_head do not."""
    tensors = [tensor for _, block in spec.named_blocks() for tensor in block.tensors(spec)]
    linears = sum(tensor.active_weights for tensor in tensors if isinstance(tensor, LinearLayout))
    return linears + sum(tensor.num_parameters for tensor in tensors if isinstance(tensor, MatrixLayout))


def pair_products(spec: ModelSpec) -> PairProducts:
    """Multiplications of attention for one query and key, forward and backward, in all layers."""
    pairs = [block.pair_products(spec) for _, block in spec.named_blocks()]
    return PairProducts(sum(pair.needed for pair in pairs), sum(pair.computed for pair in pairs))
