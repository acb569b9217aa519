"""The mixture in a rollout's forward: the experts as one node (experts.py), and the shared expert's fused form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from octetrl.models.blocks.products import Operand

if TYPE_CHECKING:
    from octetrl.models.blocks.block import RolloutInputs
    from octetrl.models.blocks.moe.module import MixtureOfExperts


def rollout(moe: MixtureOfExperts, x: Operand, inputs: RolloutInputs) -> Tensor:
    assert isinstance(x, Tensor), "several ops read the norm's result, so it is not quantised"
    shared_TE = None if moe.shared_experts is None else moe.shared_experts.rollout(x, inputs)
    return moe.mix(x, shared_TE, fused=True)
