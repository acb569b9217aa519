"""The mixture in a rollout's forward: the experts as one node (experts.py), and the shared expert's fused form.

Both read x; if both are FP8, it is quantised once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from octetrl.models.blocks.moe.experts import codes_for_both
from octetrl.models.blocks.products import Operand

if TYPE_CHECKING:
    from octetrl.models.blocks.block import RolloutInputs
    from octetrl.models.blocks.moe.module import MixtureOfExperts


def rollout(moe: MixtureOfExperts, x: Operand, inputs: RolloutInputs) -> Tensor:
    assert isinstance(x, Tensor), "several ops read the norm's result, so it is not quantised"
    shared = moe.shared_experts
    if shared is None:
        return moe.mix(x, None, fused=True)
    codes = codes_for_both(x, moe.experts.gate_up_proj, shared.gate_up_proj)
    return moe.mix(x, shared.rollout(x if codes is None else codes, inputs), fused=True, codes=codes)
