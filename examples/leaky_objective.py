"""An objective of one's own: a clip that keeps a share of the gradient outside the clip range.

octetrl train demo_grpo algorithm.name=examples.leaky_objective:leaky algorithm.leak=0.2 output_dir=runs/leaky
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.ratios import token_ratio
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import OwnObjectiveConfig


@dataclass(frozen=True)
class Leaky:
    leak: float = 0.1  # share of the gradient that a token keeps outside the clip range; 0 is a plain clip

    def __post_init__(self) -> None:
        if not 0.0 <= self.leak <= 1.0:
            raise ValueError("leak must be from 0 to 1")


def leaky(inputs: LossInputs, fields: Leaky, shared: OwnObjectiveConfig) -> TokenLoss:
    def gain(inputs: LossInputs, base_logprobs_N: Tensor, shared: OwnObjectiveConfig) -> Gain:
        ratio_N = token_ratio(inputs.logprobs_N, base_logprobs_N)
        clipped_N = ratio_N.clamp(1.0 - shared.clip_low, 1.0 + shared.clip_high)
        leaky_N = clipped_N + fields.leak * (ratio_N - clipped_N)
        return Gain(leaky_N * inputs.advantages_N, (1.0 - fields.leak) * (clipped_N != ratio_N).float())

    return policy_loss(inputs, shared, gain)
