"""What config/ and fp8/ know of the blocks that a decoder layer is made of. No torch.

A layer has two places, attention's and the MLP's. Each place has a norm, a block behind it, and a residual around both:

    hidden = hidden + block(norm(hidden))

A *kind* of block is one folder of models/blocks/: its layout, its module, its fused forms for rollout and training. The
layout is a subclass of `BlockLayout`, and `ModelSpec.blocks` holds the layouts of a model. So this room asks a layout
and imports no kind. From `tensors` follow

    fp8/policy.py               which linears have a format
    config/lora.py              which projections may have an adapter, and its size
    config/memory.py            weights and FP8 codes; `memory` gives the rest
    models/hf_weights.py        the names in a checkpoint
    models/peft_adapters.py     the names in an adapter's file

and from `sites` what `octetrl doctor` compares. `build` makes the module; it alone needs torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

if TYPE_CHECKING:
    from octetrl.config.spec import ModelSpec

SCALED = 1 + 4 / 128  # bytes of an FP8 code with its share of a scale


class Place(NamedTuple):
    """One of a layer's two places: our names, Hugging Face's, and the doctor's."""

    name: str  # of the block's parameters, "layers.3.attention.qkv_proj.weight", whatever its kind
    norm: str
    hf_name: str
    hf_norm: str
    norm_site: str
    residual_site: str  # the residual stream behind the block


PLACES = (
    Place("attention", "attention_norm", "self_attn", "input_layernorm", "norm", "residual"),
    Place("mlp", "mlp_norm", "mlp", "post_attention_layernorm", "MLP norm", "residual after MLP"),
)


class Part(NamedTuple):
    """Rows of a linear that are a tensor of their own in a checkpoint, and a target of LoRA: `q_proj`."""

    name: str
    rows: int


@dataclass(frozen=True, slots=True)
class LinearLayout:
    """A matrix [out_features, in_features], made of `parts` one below the other, and a bias of as many rows."""

    name: str  # in its block: "qkv_proj"
    in_features: int
    parts: tuple[Part, ...]
    bias: bool = False

    @property
    def out_features(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def num_weights(self) -> int:
        return self.in_features * self.out_features

    @property
    def num_parameters(self) -> int:
        return self.num_weights + (self.out_features if self.bias else 0)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """A parameter of one axis, such as a norm's weight. Its name in the block is its name in a checkpoint."""

    name: str
    size: int

    @property
    def num_parameters(self) -> int:
        return self.size


@dataclass(frozen=True, slots=True)
class TrainedAs:
    """How a block is trained, as far as its memory depends on it."""

    value_bytes: int  # of the model's dtype
    fp8: bool  # its linears are
    frozen: bool  # beside adapters

    @property
    def operand_bytes(self) -> float:
        """Bytes of an operand of wgrad, or of what an adapter's backward reads."""
        return SCALED if self.fp8 and not self.frozen else self.value_bytes

    @property
    def gradient_bytes(self) -> float:
        """Bytes that a gradient's operands take beside the gradient: codes both ways. BF16 multiplies the gradient."""
        return 2 * SCALED if self.fp8 else 0


class Peak(NamedTuple):
    """A moment of a block's backward."""

    per_token: float  # bytes, beside what was kept or made again and the gradient that came from above
    of_weights: int = 0  # bytes of gradients of the block's weights


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """What a block holds while it is trained. Bytes a token, without its norm's result and the residual stream."""

    saved: float  # what its backward reads of its forward; `activation_checkpointing: none` keeps it
    costly: float = 0.0  # read too, and slow to make again: `attention` keeps it as well
    made_with_costly: float = 0.0  # by-products of making `costly` again, held until the block's backward
    peaks: tuple[Peak, ...] = ()
    of_weights: int = 0  # bytes of gradients of its weights, once its backward is done


class BlockLayout(ABC):
    """One kind of block. Subclasses are frozen dataclasses: layouts compare by value, as the spec that holds them."""

    sites: ClassVar[tuple[str, ...]]
    """Where the doctor may look inside the block, in the order of the forward; linears by their names."""

    @abstractmethod
    def tensors(self, spec: ModelSpec) -> tuple[LinearLayout | VectorLayout, ...]:
        """Every parameter, in the order of a checkpoint."""

    @abstractmethod
    def memory(self, spec: ModelSpec, how: TrainedAs) -> BlockMemory:
        """What the fused training form holds (training.py in the kind's folder)."""

    @abstractmethod
    def sizes(self, spec: ModelSpec) -> Mapping[str, int]:
        """The widths of its linears beside the hidden size, each by the name that a message gives it."""

    @abstractmethod
    def build(self, builder: Any) -> Any:
        """The module, a `models.blocks.block.Block`, from a `BlockBuilder`. Imports torch."""

    def linears(self, spec: ModelSpec) -> tuple[LinearLayout, ...]:
        return tuple(tensor for tensor in self.tensors(spec) if isinstance(tensor, LinearLayout))


class LayerBlocks(NamedTuple):
    """The blocks of one layer, in the order of `PLACES`."""

    attention: BlockLayout
    mlp: BlockLayout
