"""The kinds of block, complete: the module's definition with its fused forms for a GPU's rollout and training.

A kind's `module.py` has the definition. Its `rollout.py` and `training.py` are functions of the module. They are joined
here, and `KINDS` says which class each layout builds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octetrl.models.blocks.attention import rollout as attention_rollout
from octetrl.models.blocks.attention import training as attention_training
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.attention.module import Attention
from octetrl.models.blocks.block import Block, BlockBuilder
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
from octetrl.shapes.blocks import BlockLayout


class FusedAttention(Attention):
    rollout = attention_rollout.rollout
    begin, finish, backward = attention_training.begin, attention_training.finish, attention_training.backward


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
    AttentionLayout: lambda builder, layout: FusedAttention(builder, layout.window),
    LatentAttentionLayout: FusedLatentAttention,
    MLPLayout: lambda builder, layout: FusedMLP(builder),
    MixtureLayout: lambda builder, layout: FusedMixture(builder, layout, FusedMLP),
}


def build_block(builder: BlockBuilder, layout: BlockLayout) -> Block:
    """The module of a layout. A subclass of a layout builds what its base does."""
    kind = next(kind for kind in type(layout).__mro__ if kind in KINDS)
    return KINDS[kind](builder, layout)
