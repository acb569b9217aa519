"""The interface of a block: one definition, and two fused forms of it with the same bits.

    forward                       the definition, by modules; a GPU runs it if it cannot run the fused forms
    rollout                       for the engine: no gradients, no host reads, captured as part of a graph
    begin, finish, backward       for the trainer: models/training_forward.py makes a layer one autograd node

A kind's fused forms are functions of its module; `models/build_blocks.py` joins them with it.

A block reads its norm's result and returns an addend of the residual stream. One kernel computes sum and norm, so both
belong to the layer. `reader` is the only linear that reads the norm's result; if it is FP8, the norm's kernel
quantises. `reader` is None if several ops read the result, which is then in BF16. In the rollout the norm's kernel
stores its codes too if `codes_reader` is one of them (normed.py).

**Treatments.** `treatments` says how the training forward of a block treats each cached tensor. The doctor may set
`treat_as`, to give the module the treatment of the other side.

**Sites.** The doctor may set `probe`. It then receives the values that the forms compute, under the names in the
layout's `sites`. A form checks once, after its last op, whether there is a probe. A captured graph contains nothing of
it.

T tokens of a forward, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octetrl.fp8.kv_scales import split_scales
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.rows.combine_experts import ExpertSum
from octetrl.layers.context import CacheTreatment, Context, PackedContext, PagedContext
from octetrl.layers.cut_rows import SharedNorm
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.offset_norm import OffsetRMSNorm
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.layers.tensor_group import TensorGroup
from octetrl.models.blocks.products import Input
from octetrl.models.blocks.saved import Gradients
from octetrl.shapes.spec import ModelSpec

Probe = Callable[[int | None, str, Tensor | Quantized], None]
"""Takes the layer (None: outside of the layers), a site's name, and its values [T, ...] in this forward."""


@dataclass(frozen=True, slots=True)
class BlockBuilder:
    """Arguments from which a layout builds its module."""

    spec: ModelSpec
    layer: int
    policy: PrecisionPolicy
    dtype: torch.dtype
    device: torch.device | str
    linear: Callable[[str], Projection]  # the linear of that name in the layout, in its format, with its adapter
    group: TensorGroup

    def norm(self, size: int) -> RMSNorm:
        kind = OffsetRMSNorm if self.spec.offset_norms else RMSNorm
        return kind(size, self.spec.rms_norm_eps, dtype=self.dtype, device=self.device)

    def head_norm(self) -> RMSNorm:
        """A norm of the heads that this worker has."""
        size, eps = self.spec.head_size, self.spec.rms_norm_eps
        if self.group.size == 1:
            return self.norm(size)
        return SharedNorm(self.group, size, eps, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class RolloutInputs:
    """Inputs of a rollout's forward besides the hidden states. `angles`: the rows of `rotary`, gathered once, when the
    first block asks."""

    rotary: RotaryTable
    positions_T: Tensor
    context: PagedContext
    _angles: Rotary | None = None

    @property
    def angles(self) -> Rotary:
        if self._angles is None:
            self._angles = self.rotary(self.positions_T)
        return self._angles


class TrainingInputs(NamedTuple):
    rotary: Rotary
    context: PackedContext


class Block(nn.Module, ABC):
    """Half of a layer, after its norm. `BlockBuilder.linear` creates its linears in their formats."""

    probe: Probe | None = None
    treat_as: Mapping[str, CacheTreatment] | None = None  # by cached tensor; only for the module's forward

    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__()
        self.layer = builder.layer
        self.cached = builder.spec.cached(builder.layer)  # of this layer; a block without a cache does not read it
        self.in_codes = tuple(builder.policy.cached_as(tensor.name) == "fp8" for tensor in self.cached)

    def treatments(self, context: PackedContext) -> tuple[CacheTreatment, ...]:
        """The treatment of each cached tensor: the cache's quantiser, or none if the cache keeps the model's dtype."""
        if self.treat_as is not None:
            return tuple(self.treat_as[tensor.name] for tensor in self.cached)
        scales = self.scales_of(context.kv_scale_LS)
        return tuple(
            CacheTreatment(context.kv_mode if in_codes else "none", scale)
            for in_codes, scale in zip(self.in_codes, scales, strict=True)
        )

    def scales_of(self, scale_LS: Tensor | None) -> tuple[Tensor | None, ...]:
        """Calibrated scales of this layer, or their amax: a view for each cached tensor; None without scales."""
        if scale_LS is None:
            return (None,) * len(self.cached)
        return split_scales(scale_LS[self.layer], self.cached)

    @property
    @abstractmethod
    def reader(self) -> Projection | None:
        """The only linear that reads the norm's result. None: the block takes it in the model's dtype."""

    @property
    def codes_reader(self) -> Projection | None:
        """An FP8 linear that reads codes of a norm's result that other ops read in the model's dtype. None: no linear
        does. Of several, any one: a model has one kind of scales."""
        return None

    @abstractmethod
    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        """The addend of the residual stream, from the norm's result."""

    @abstractmethod
    def rollout(self, x: Any, inputs: RolloutInputs) -> Tensor | ExpertSum:
        """The same on a GPU. `x`: the norm's result, as `reader`'s operand, or a `Normed` for `codes_reader`.

        A mixture may leave the sum of its experts to the next norm's kernel."""

    @abstractmethod
    def begin(self, n: Input, inputs: TrainingInputs, *, costly: Any, observe: bool) -> Any:
        """The forward from the norm's result `n` up to the operand of its last product: a `Saved`, or a subclass.

        `costly`: values of an earlier run of the same forward, which are not recomputed; None: this is the first run.
        `observe`: collect statistics, which only the first run does.
        """

    @abstractmethod
    def finish(self, saved: Any) -> Tensor:
        """The rest of the forward. The backward does not repeat it for the last block of a layer."""

    @abstractmethod
    def backward(self, saved: Any, dout_TE: Tensor, gradients: Gradients) -> Tensor:
        """The gradient of the norm's result, from the gradient of the block's output. Adds to `gradients`."""
