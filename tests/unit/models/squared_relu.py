"""A kind of block for tests: an MLP without a gate, out = relu(n Wup)^2 Wdown. This file is all there is of it.

T tokens, E hidden size, F intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octetrl.layers.context import Context
from octetrl.layers.linear import Projection
from octetrl.layers.rotary import Rotary
from octetrl.models.blocks.block import Block, BlockBuilder, RolloutInputs, TrainingInputs
from octetrl.models.blocks.products import (
    Input,
    Operand,
    dgrad,
    gradient_of,
    input_of,
    product,
    project,
    wgrad,
    wgrad_input,
)
from octetrl.models.blocks.saved import Gradients, Saved
from octetrl.models.build_blocks import KINDS
from octetrl.shapes.blocks import BlockLayout, BlockMemory, LinearLayout, Part, Peak, TrainedAs
from octetrl.shapes.sizes import ModelSizes


@dataclass(frozen=True)
class SquaredReLULayout(BlockLayout):
    sites = ("up_proj", "squared ReLU", "down_proj")

    def tensors(self, spec: ModelSizes) -> tuple[LinearLayout, ...]:
        return (
            LinearLayout("up_proj", spec.hidden_size, (Part("up_proj", spec.intermediate_size),)),
            LinearLayout("down_proj", spec.intermediate_size, (Part("down_proj", spec.hidden_size),)),
        )

    def memory(self, spec: ModelSizes, how: TrainedAs) -> BlockMemory:
        b, inner = how.value_bytes, spec.intermediate_size
        weights = b * sum(linear.num_weights for linear in self.linears(spec))
        return BlockMemory(saved=b * inner, peaks=(Peak(3 * b * inner),), of_weights=0 if how.frozen else weights)

    def sizes(self, spec: ModelSizes) -> Mapping[str, int]:
        return {"intermediate size": spec.intermediate_size}


@dataclass(slots=True)
class SavedSquaredReLU(Saved):
    n: Operand
    up_TF: Tensor


class SquaredReLU(Block):
    def __init__(self, builder: BlockBuilder) -> None:
        super().__init__(builder)
        self.up_proj, self.down_proj = builder.linear("up_proj"), builder.linear("down_proj")

    @property
    def reader(self) -> Projection:
        return self.up_proj

    def forward(self, x_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        up_TF = self.up_proj(x_TE)
        y_TF = torch.relu(up_TF).square()
        return self._probed(up_TF, y_TF, self.down_proj(y_TF))

    def rollout(self, x: Operand, inputs: RolloutInputs) -> Tensor:
        up_TF = project(self.up_proj, x)
        y_TF = torch.relu(up_TF).square()
        return self._probed(up_TF, y_TF, project(self.down_proj, y_TF))

    def begin(self, n: Input, inputs: TrainingInputs, *, costly: Any, observe: bool) -> SavedSquaredReLU:
        return SavedSquaredReLU(n=n.for_backward, up_TF=product(self.up_proj, n))

    def finish(self, saved: SavedSquaredReLU) -> Tensor:
        y_TF = torch.relu(saved.up_TF).square()
        y = input_of(self.down_proj, y_TF, for_wgrad=False)
        return self._probed(saved.up_TF, y_TF, product(self.down_proj, y))

    def backward(self, saved: SavedSquaredReLU, dout_TE: Tensor, gradients: Gradients) -> Tensor:
        relu_TF = torch.relu(saved.up_TF)
        dout = gradient_of(self.down_proj, dout_TE.contiguous())
        dup = gradient_of(self.up_proj, 2 * relu_TF * dgrad(self.down_proj, dout))
        wgrad(gradients, "down_proj", self.down_proj, dout, wgrad_input(self.down_proj, relu_TF.square()))
        wgrad(gradients, "up_proj", self.up_proj, dup, saved.n)
        return dgrad(self.up_proj, dup)

    def _probed(self, up_TF: Tensor, y_TF: Tensor, down_TE: Tensor) -> Tensor:
        if self.probe is not None:
            self.probe(self.layer, "up_proj", up_TF)
            self.probe(self.layer, "squared ReLU", y_TF)
            self.probe(self.layer, "down_proj", down_TE)
        return down_TE


KINDS[SquaredReLULayout] = lambda builder, layout: SquaredReLU(builder)
