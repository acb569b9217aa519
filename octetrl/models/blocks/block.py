"""What every kind of block has: one definition, and two fused forms of it with the same bits.

    forward                       the definition, by modules; on a GPU it runs where nothing fused does
    rollout                       for the engine's forward: no gradients, no host reads, captured as part of a graph
    begin, finish, backward       for the trainer's: models/training_forward.py makes one autograd node of a layer

A block reads its norm's result and returns what is added to the residual stream; norms and sums are the layer's, since
one kernel does both. `reader` is the linear that alone reads the norm's result: where it is FP8 the norm's kernel makes
its codes. A block of which several ops read it has None there and takes BF16.

**Sites.** The doctor may set `probe`; it then receives what the forms compute, by the names in the layout's `sites`. A
form asks once, behind its last op, whether there is a probe; without one it costs that comparison, and a captured graph
holds nothing of it.

T tokens of a forward, E hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octetrl.config.spec import ModelSpec
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.fp8.quantize import Quantized
from octetrl.layers.context import Context, PackedContext, PagedContext
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.models.blocks.products import Input, Operand
from octetrl.models.blocks.saved import Gradients

Probe = Callable[[int | None, str, Tensor | Quantized], None]
"""Takes the layer (None: outside of all), a site's name and the values [T, ...] of this forward there."""


@dataclass(frozen=True, slots=True)
class BlockBuilder:
    """What a layout builds its module from."""

    spec: ModelSpec
    layer: int
    policy: PrecisionPolicy
    dtype: torch.dtype
    device: torch.device | str
    linear: Callable[[str], Projection]  # the linear of that name in the layout, in its format, with its adapter

    def norm(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.spec.rms_norm_eps, dtype=self.dtype, device=self.device)


class RolloutInputs(NamedTuple):
    """What a rollout's forward knows beside the hidden states."""

    rotary: RotaryTable
    positions_T: Tensor
    context: PagedContext


class TrainingInputs(NamedTuple):
    rotary: Rotary
    context: PackedContext


class Block(nn.Module, ABC):
    """Half of a layer, behind its norm. Linears are made by `BlockBuilder.linear`, so that they have their formats."""

    probe: Probe | None = None

    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__()
        self.layer = builder.layer

    @property
    @abstractmethod
    def reader(self) -> Projection | None:
        """The linear that alone reads the norm's result; None: it is wanted in the model's dtype."""

    @abstractmethod
    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        """What is added to the residual, of the norm's result."""

    @abstractmethod
    def rollout(self, x: Operand, inputs: RolloutInputs) -> Tensor:
        """The same on a GPU, of the norm's result as `reader` multiplies it."""

    @abstractmethod
    def begin(self, n: Input, inputs: TrainingInputs, *, costly: Any, observe: bool) -> Any:
        """The forward of a norm's result `n` as far as what its last product multiplies: a `Saved`, or a subclass.

        `costly`: of an earlier run of the same forward, not to be made again; None: there is none. `observe`: this is
        the first run; statistics are collected in it alone.
        """

    @abstractmethod
    def finish(self, saved: Any) -> Tensor:
        """The rest of the forward. Backward does not repeat it for a layer's last block."""

    @abstractmethod
    def backward(self, saved: Any, dout_TE: Tensor, gradients: Gradients) -> Tensor:
        """The gradient of the norm's result, from that of what the block returned; fills in `gradients`."""
