"""The interface of a decoder layer's blocks, as config/ and fp8/ use it. No torch.

A layer has two places, attention's and the MLP's. Each place has a norm, a block after it, and a residual around both:

    hidden = hidden + block(norm(hidden))

Each *kind* of block has one folder in models/blocks/: its layout, its module, its fused forms for rollout and training.
The layout is a subclass of `BlockLayout`. `ModelSpec.blocks` holds the layouts of a model, so config/ imports no kind.

`tensors` lists a block's parameters. It determines

    fp8/policy.py               which linears have a format
    config/lora.py              which projections may have an adapter, and its size
    config/memory.py            weights and FP8 codes; `memory` gives the rest
    models/hf_weights.py        the names in a checkpoint
    models/peft_adapters.py     the names in an adapter's file

`sites` lists what `octetrl doctor` compares. `cached` lists what a token stores in the KV cache. It determines

    engine/kv_cache.py          the pages and their copies
    fp8/kv_scales.py            the calibrated scales, in memory and in a checkpoint
    trainer/forward.py          the largest magnitudes that training observes
    config/memory.py            the cache's bytes per token

`state_bytes` is what a sequence keeps besides, whatever its length: the state of linear attention. Its slots are those
of engine/sequence_states.py.

`models/build_blocks.py` says which module a layout builds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Final, Literal, NamedTuple

from octetrl.shapes.sizes import ModelSizes

KVMode = Literal["none", "calibrated", "dynamic", "int8"]  # the KV cache's format, as `fp8.kv_cache` names it
KVTensors = Literal["both", "k", "v"]  # what an FP8 cache stores in codes, as `fp8.kv_cache_tensors` names it
SCALE_PER_TOKEN: Final = frozenset({"dynamic", "int8"})  # modes whose scales follow from the token alone
SCALED = 1 + 4 / 128  # bytes of an FP8 code and its share of a float32 scale


class Place(NamedTuple):
    """One of a layer's two places: our names, Hugging Face's, and those of `octetrl doctor`."""

    name: str  # part of the parameters' names: "layers.3.attention.qkv_proj.weight", for every kind of block
    norm: str
    hf_name: str
    hf_norm: str
    norm_site: str
    residual_site: str  # the residual stream after the block


PLACES = (
    Place("attention", "attention_norm", "self_attn", "input_layernorm", "norm", "residual"),
    Place("mlp", "mlp_norm", "mlp", "post_attention_layernorm", "MLP norm", "residual after MLP"),
)


class Part(NamedTuple):
    """Rows of a linear that are a separate tensor in a checkpoint and a LoRA target, such as `q_proj`."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """A matrix [out_features, in_features] with its `parts` stacked by rows, and optionally a bias [out_features].

    A name with a dot means a submodule, also in a checkpoint: part `up_proj` of `shared_experts.gate_up_proj` is
    `shared_experts.up_proj` there.
    """

    name: str  # within its block, such as "qkv_proj"
    in_features: int
    parts: tuple[Part, ...]
    bias: bool = False
    joins: bool = False  # its input and output are gathered from the tensor-parallel workers (shapes/tensor_cut.py)
    hf_submodule: str | None = None  # the submodule's name in a checkpoint, if it is another one there
    adapted_if_named: bool = False  # it is no target of LoRA unless the recipe names it

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def num_parameters(self) -> int:
        return self.num_weights + (self.out_features if self.bias else 0)

    @property
    def active_weights(self) -> int:
        """Weights that one token is multiplied by."""
        return self.num_weights

    @property
    def submodule(self) -> str:
        """The prefix of a part's name in a checkpoint: "" or "shared_experts."."""
        if self.hf_submodule is not None:
            return f"{self.hf_submodule}."
        return self.name[: self.name.rfind(".") + 1]


@dataclass(frozen=True, slots=True)
class StackedLinearLayout(LinearLayout):
    """`count` matrices of one shape, such as the experts', as one parameter [count * out_features, in_features]; their
    biases as one [count * out_features].

    In a checkpoint each matrix is a separate tensor, such as `experts.7.down_proj.weight`; or one tensor of the
    linear's name has all, [count, out_features, in_features], or "turned", with columns of the parts by turns. No 128 x
    128 block contains rows of two matrices. A token passes through `per_token` of them.
    """

    count: int = 1
    per_token: int = 1
    files: Literal["separate", "stacked", "turned"] = "separate"

    @property
    def num_weights(self) -> int:
        return self.count * self.in_features * self.out_features

    @property
    def num_parameters(self) -> int:
        return self.num_weights + (self.count * self.out_features if self.bias else 0)

    @property
    def active_weights(self) -> int:
        return self.per_token * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A matrix that is never FP8, such as a router's."""

    name: str  # ends with ".weight"
    rows: int
    columns: int
    hf_name: str | None = None  # its name in a checkpoint, if it is another one there
    is_convolution: bool = False  # of each channel alone: [rows, 1, columns] in a checkpoint
    adaptable: bool = False  # LoRA may name it as a target; its module is then a linear
    why_not_adapted: str | None = None  # for the message if LoRA names it

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, self.columns

    @property
    def num_parameters(self) -> int:
        return self.rows * self.columns

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")

    def as_linear(self) -> LinearLayout:
        return LinearLayout(self.module, self.columns, (Part(self.module, self.rows),), adapted_if_named=True)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """A vector parameter, such as a norm's weight.

    If `has_gradient` is false, it is always float32, and the optimizer does not update it. `starts_at`: its values in
    a new model; None: 0 for a bias and the norms of `offset_norms`, otherwise 1.
    """

    name: str
    size: int
    has_gradient: bool = True
    starts_at: float | None = None
    hf_name: str | None = None  # its name in a checkpoint, if it is another one there

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.size,)

    @property
    def num_parameters(self) -> int:
        return self.size


TensorLayout = LinearLayout | MatrixLayout | VectorLayout


@dataclass(frozen=True, slots=True)
class CachedTensor:
    """A tensor that one token stores in the KV cache of one layer.

    Its pages are [num_pages, *shape[:-1], page_size, shape[-1]]. If `codes_turned`, pages of codes have the token's
    axis last: [num_pages, *shape, page_size]. Scales per token are [num_pages, *scales, page_size].
    """

    name: str  # such as "K"; it has the same layout in all layers of a model
    shape: tuple[int, ...]  # one token's values
    scales: tuple[int, ...] = (0,)  # shape of the float32 scales of a token (dynamic) or of the layer (calibrated)
    scale_of: str = "head"  # what one scale belongs to, for messages
    codes_turned: bool = False
    never_fp8: str | None = None  # why an FP8 cache stores it in the model's dtype; None: the recipe decides
    calibrates: bool = True  # False: its codes always have scales of tokens; a calibrated cache is then a dynamic one

    @property
    def num_values(self) -> int:
        return prod(self.shape)

    @property
    def num_scales(self) -> int:
        return prod(self.scales)

    def bytes_per_token(self, value_bytes: int, *, token_scales: bool) -> int:
        return self.num_values * value_bytes + (4 * self.num_scales if token_scales else 0)


@dataclass(frozen=True, slots=True)
class TrainedAs:
    """Properties of training that determine a block's memory."""

    value_bytes: int  # bytes of one value in the model's dtype
    fp8: bool  # whether its linears are FP8
    frozen: bool  # whether its weights are frozen, because only adapters are trained
    on_gpu: bool = True

    @property
    def operand_bytes(self) -> float:
        """Bytes per value of a wgrad operand, or of an input that an adapter's backward reads."""
        return SCALED if self.fp8 and not self.frozen else self.value_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes per value of a gradient's FP8 codes in both orientations. 0 in BF16, which needs no codes."""
        return 2 * SCALED if self.fp8 else 0


class PairProducts(NamedTuple):
    """Multiplications of attention for one query and one key that it reads, over all heads, forward and backward."""

    needed: int  # by attention's definition in the form with the fewest: two products forward and five backward
    computed: int  # by our kernels, with the forward's again where their backward runs it


class Peak(NamedTuple):
    """Memory at one moment of a block's backward."""

    per_token: float  # bytes; excludes kept and recomputed activations and the incoming gradient
    of_weights: int = 0  # bytes of gradients of the block's weights


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """A block's memory in training, in bytes per token. Excludes the norm's result and the residual stream."""

    saved: float  # activations that its backward reads; kept by `activation_checkpointing: none`
    costly: float = 0.0  # further activations that are slow to recompute; kept by `none` and `attention`
    made_with_costly: float = 0.0  # by-products of recomputing `costly`, held until the block's backward
    peaks: tuple[Peak, ...] = ()
    of_weights: int = 0  # bytes (in total) of gradients of its weights after its backward


class BlockLayout(ABC):
    """One kind of block. Subclasses are frozen dataclasses, so that layouts and specs compare by value."""

    hf_name: ClassVar[str | None] = None
    """The block's name in a checkpoint. None: that of its place."""

    sites: ClassVar[tuple[str, ...]]
    """Points inside the block that `octetrl doctor` can compare, in forward order. Linears have their own names."""

    is_whole_layer: ClassVar[bool] = False
    """Whether it is the whole layer with its norms, by a checkpoint's names (models/transformers_layout.py)."""

    can_be_cut: ClassVar[bool] = False
    """Whether tensor-parallel workers can share it: `tensors` and `cached` then also describe a part of a model."""

    @abstractmethod
    def tensors(self, spec: ModelSizes) -> tuple[TensorLayout, ...]:
        """List every parameter, in the order of a checkpoint."""

    @abstractmethod
    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        """Memory of the fused training form (training.py in the kind's folder)."""

    @abstractmethod
    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        """Widths of its linears besides the hidden size, by the names used in messages."""

    def cached(self, spec: ModelSizes) -> tuple[CachedTensor, ...]:
        """Tensors that a token stores in the KV cache. At most one block of a layer has a cache."""
        return ()

    def state_bytes(self, spec: ModelSizes, value_bytes: int, most_rows: int) -> int:
        """Bytes that a sequence of any length keeps in the engine. `most_rows`: that a decode forward may add to it."""
        return 0

    def rotary_size(self, spec: ModelSizes) -> int | None:
        """Number of values of a head that RoPE rotates by position. None: the block has no RoPE."""
        return None

    def pair_products(self, spec: ModelSizes) -> PairProducts:
        """What a pair of query and key costs. A block without attention has none."""
        return PairProducts(0, 0)

    def refused_on_gpu(self) -> str | None:
        """Why the kernels of a GPU do not run this block, as a message; None: they do."""
        return None

    def linears(self, spec: ModelSizes) -> tuple[LinearLayout, ...]:
        return tuple(tensor for tensor in self.tensors(spec) if isinstance(tensor, LinearLayout))

    def matrices(self, spec: ModelSizes) -> tuple[MatrixLayout, ...]:
        return tuple(tensor for tensor in self.tensors(spec) if isinstance(tensor, MatrixLayout))

    def adaptable(self, spec: ModelSizes) -> tuple[LinearLayout, ...]:
        """List the linears, and the matrices that may have an adapter, as linears."""
        named = (matrix for matrix in self.matrices(spec) if matrix.adaptable)
        return (*self.linears(spec), *(matrix.as_linear() for matrix in named))


class LayerBlocks(NamedTuple):
    """The blocks of one layer, in the order of `PLACES`."""

    attention: BlockLayout
    mlp: BlockLayout
