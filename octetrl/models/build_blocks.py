"""Builds the blocks of a layer and their linears: each linear in its format on this side, with its adapter.

build_block -> the block's module -> `BlockBuilder.linear(name)` -> Linear, Float8Linear, or a stack of them

A kind's `module.py` has the definition of a block. Its `rollout.py` and `training.py`, the fused forms for a GPU, are
functions of the module. They are joined here, and `KINDS` says which class each layout builds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from octetrl.config.lora import lora_parts
from octetrl.config.rules_shape import ONLY_BFLOAT16, expert_widths_refused
from octetrl.config.schema import LoraConfig
from octetrl.fp8.backends import FUSED, BackendName
from octetrl.fp8.policy import PrecisionPolicy, Side
from octetrl.layers.cut_linear import CutFloat8Linear, CutLinear
from octetrl.layers.linear import Float8Linear, Projection
from octetrl.layers.lora import LoraAdapter
from octetrl.layers.stacked import Float8StackedLinear, StackedLinear
from octetrl.layers.stacked_lora import StackedLoraAdapter
from octetrl.layers.tensor_group import TensorGroup
from octetrl.layers.unquantized_linear import Linear
from octetrl.models.blocks.attention import rollout as attention_rollout
from octetrl.models.blocks.attention import training as attention_training
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.blocks.block import Block, BlockBuilder
from octetrl.models.blocks.gated_attention import rollout as gated_rollout
from octetrl.models.blocks.gated_attention import training as gated_training
from octetrl.models.blocks.gated_attention.layout import GatedAttentionLayout
from octetrl.models.blocks.gated_attention.module import GatedAttention
from octetrl.models.blocks.gated_delta import rollout as delta_rollout
from octetrl.models.blocks.gated_delta import training as delta_training
from octetrl.models.blocks.gated_delta.layout import GatedDeltaLayout
from octetrl.models.blocks.gated_delta.module import GatedDelta
from octetrl.models.blocks.mla import rollout as latent_rollout
from octetrl.models.blocks.mla import training as latent_training
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mla.module import LatentAttention
from octetrl.models.blocks.mlp import rollout as mlp_rollout
from octetrl.models.blocks.mlp import training as mlp_training
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.mlp.module import MLP
from octetrl.models.blocks.moe import rollout as mixture_rollout
from octetrl.models.blocks.moe import training as mixture_training
from octetrl.models.blocks.moe.layout import MixtureLayout
from octetrl.models.blocks.moe.module import MixtureOfExperts
from octetrl.shapes.blocks import PLACES, BlockLayout, LinearLayout, StackedLinearLayout
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError


class FusedAttention(Attention):
    rollout = attention_rollout.rollout
    begin, finish, backward = attention_training.begin, attention_training.finish, attention_training.backward


class FusedGatedAttention(GatedAttention):
    rollout = gated_rollout.rollout
    begin, finish, backward = gated_training.begin, gated_training.finish, gated_training.backward


class FusedGatedDelta(GatedDelta):
    rollout = delta_rollout.rollout
    begin, finish, backward = delta_training.begin, delta_training.finish, delta_training.backward


class FusedLatentAttention(LatentAttention):
    rollout = latent_rollout.rollout
    begin, finish, backward = latent_training.begin, latent_training.finish, latent_training.backward


class FusedMLP(MLP):
    rollout = mlp_rollout.rollout
    begin, finish, backward = mlp_training.begin, mlp_training.finish, mlp_training.backward


class FusedMixture(MixtureOfExperts):
    rollout = mixture_rollout.rollout
    begin, finish, backward = mixture_training.begin, mixture_training.finish, mixture_training.backward


KINDS: dict[type[BlockLayout], Callable[[BlockBuilder, Any], Block]] = {
    AttentionLayout: lambda builder, layout: FusedAttention(builder, layout.window, layout.sinks),
    GatedAttentionLayout: lambda builder, layout: FusedGatedAttention(builder),
    GatedDeltaLayout: FusedGatedDelta,
    LatentAttentionLayout: FusedLatentAttention,
    MLPLayout: lambda builder, layout: FusedMLP(builder),
    MixtureLayout: lambda builder, layout: FusedMixture(builder, layout, FusedMLP),
}


def build_block(builder: BlockBuilder, layout: BlockLayout) -> Block:
    """The module of a layout. A subclass of a layout builds what its base does."""
    kind = next(kind for kind in type(layout).__mro__ if kind in KINDS)
    return KINDS[kind](builder, layout)


@dataclass(frozen=True, slots=True)
class LayerBuilder:
    """What every layer of a decoder is built from."""

    spec: ModelSpec
    policy: PrecisionPolicy
    side: Side
    dtype: torch.dtype
    device: torch.device | str
    backend: BackendName
    lora: LoraConfig | None
    group: TensorGroup  # `spec` is this worker's part
    fp8_weights: bool  # false: the weights of FP8 linears have no memory (layers/weight_memory.py)

    def __post_init__(self) -> None:
        """UserError: a GPU has no kernels for such a model."""
        assert (self.group.rank, self.group.size) == (self.spec.tensor.rank, self.spec.tensor.size), "another part"
        emulated = self.backend not in FUSED and self.policy.uses_fp8(self.side)
        on_gpu = torch.device(self.device).type == "cuda"
        why_not = self.spec.refused_on_gpu()
        if on_gpu and why_not is not None:
            raise UserError(why_not)
        if on_gpu and self.spec.has_experts and (emulated or self.dtype != torch.bfloat16):
            raise UserError(ONLY_BFLOAT16)
        if on_gpu or self.backend in FUSED:
            fp8 = {linear.name for linear in self.policy.linears if getattr(linear, self.side) == "fp8"}
            if (why_not := expert_widths_refused(self.spec, fp8)) is not None:
                raise UserError(why_not)

    def blocks(self, index: int) -> tuple[Block, Block]:
        """The blocks of layer `index`, in the order of `PLACES`."""
        first, second = (
            self._block(index, place.name, layout)
            for place, layout in zip(PLACES, self.spec.blocks_of(index), strict=True)
        )
        return first, second

    def _block(self, index: int, place: str, layout: BlockLayout) -> Block:
        linears = {linear.name: linear for linear in layout.adaptable(self.spec)}
        return build_block(self.block_builder(index, partial(self.linear, f"layers.{index}.{place}", linears)), layout)

    def block_builder(self, index: int, linear: Callable[[str], Projection]) -> BlockBuilder:
        return BlockBuilder(self.spec, index, self.policy, self.dtype, self.device, linear, self.group)

    def linear(self, block: str, linears: Mapping[str, LinearLayout], name: str) -> Projection:
        layout = linears[name]
        common: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        fp8: dict[str, Any] = {
            "backend": self.backend,
            "power_of_two": self.policy.power_of_two,
            "square_wgrad": self.policy.square_wgrad,
            "has_weight": self.fp8_weights,
        }
        plain = layout.adapted_if_named  # a matrix: it is no linear of the policy
        is_fp8 = not plain and self.policy.format_of(f"{block}.{name}", self.side) == "fp8"
        width, rows = layout.in_features, layout.out_features
        if isinstance(layout, StackedLinearLayout):
            stacked = Float8StackedLinear if is_fp8 else StackedLinear
            experts = stacked(width, rows, layout.count, layout.bias, **common, **(fp8 if is_fp8 else {}))
            if self.lora is not None and (parts := lora_parts(layout, self.lora)):
                adapted = width, parts, self.lora.rank, self.lora.alpha, layout.count
                experts.lora = StackedLoraAdapter(*adapted, **common)
            return experts
        made: Projection
        if self.group.size > 1:
            cut = {"group": self.group, "joins": layout.joins, **common}
            made = (
                CutFloat8Linear(width, rows, layout.bias, **cut, **fp8)
                if is_fp8
                else CutLinear(width, rows, layout.bias, **cut)
            )
        elif is_fp8:
            made = Float8Linear(width, rows, layout.bias, **common, **fp8)
        else:
            made = Linear(width, rows, layout.bias, **common)
        parts = lora_parts(layout, self.lora) if self.lora is not None else ()
        if self.lora is not None and parts:
            rank, alpha = self.lora.rank, self.lora.alpha
            made.lora = LoraAdapter(layout.in_features, parts, rank, alpha, dtype=self.dtype, device=self.device)
        return made
