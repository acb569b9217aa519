"""Objectives of the user's own, for tests: shipped ones written again, and wrong ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from octetrl.algorithms.grpo import clipped_gain
from octetrl.algorithms.policy_loss import Gain, policy_loss
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import OwnObjectiveConfig


@dataclass(frozen=True)
class Floor:
    floor: float
    mode: Literal["hard", "soft"] = "hard"
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.floor < 1:
            raise ValueError("floor must be at least 1")


def dual_clip(inputs: LossInputs, fields: Floor, shared: OwnObjectiveConfig) -> TokenLoss:
    """The shipped dual_clip, written again."""

    def gain(inputs: LossInputs, base_logprobs_N: Tensor, shared: OwnObjectiveConfig) -> Gain:
        gain_N, clipped_N = clipped_gain(inputs, base_logprobs_N, shared)
        floor_N = torch.where(inputs.advantages_N < 0, fields.floor * inputs.advantages_N, -float("inf"))
        return Gain(torch.maximum(gain_N, floor_N), torch.maximum(clipped_N, (gain_N < floor_N).float()))

    return policy_loss(inputs, shared, gain)


@dataclass(frozen=True)
class LeaveOneOut:
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        mean = sum(rewards) / len(rewards)
        return [(reward - mean) * len(rewards) / max(len(rewards) - 1, 1) for reward in rewards]


def rloo(inputs: LossInputs, fields: LeaveOneOut, shared: OwnObjectiveConfig) -> TokenLoss:
    """The shipped rloo, written again."""
    return policy_loss(inputs, shared, clipped_gain)


@dataclass(frozen=True)
class Nothing:
    pass


def no_gradient(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(inputs.logprobs_N.detach().clone().requires_grad_())


def a_mean(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-(inputs.logprobs_N * inputs.advantages_N).mean())


def a_tensor(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> Any:
    return -inputs.logprobs_N


def not_finite(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(inputs.logprobs_N / 0.0)


def live_metric(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N, {"mine": inputs.logprobs_N})


def raises(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> TokenLoss:
    raise KeyError("no such thing")


def two(inputs: LossInputs, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N)


def bare(inputs, fields, shared):  # type: ignore[no-untyped-def]
    return TokenLoss(-inputs.logprobs_N)


async def waits(inputs: LossInputs, fields: Nothing, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N)


@dataclass(frozen=True)
class Clashes:
    clip_low: float = 0.2


def clashes(inputs: LossInputs, fields: Clashes, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N)


@dataclass(frozen=True)
class Tensors:
    weights: Tensor = field(default_factory=lambda: torch.zeros(1))


def of_tensors(inputs: LossInputs, fields: Tensors, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N)


@dataclass(frozen=True)
class TooFew:
    def advantages(self, rewards: Sequence[float]) -> list[float]:
        return [1.0]


def too_few(inputs: LossInputs, fields: TooFew, shared: OwnObjectiveConfig) -> TokenLoss:
    return TokenLoss(-inputs.logprobs_N)


not_callable = 3
