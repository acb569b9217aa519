"""Every algorithm, as one frozen record of functions. The trainer and the rollout know only this record.

To add one: a file with its loss, an entry in `_BUILDERS`, its name in `config/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from octetrl.algorithms.advantages import Advantages, by_group, group_relative_advantages
from octetrl.algorithms.bradley_terry import RewardLoss, bradley_terry_loss
from octetrl.algorithms.filters import has_baseline, has_variance, is_not_overlong
from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.ppo import ppo_advantages, ppo_loss, ppo_returns, rewards_as_they_are
from octetrl.algorithms.sft import sft_loss
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.algorithms.weighting import TokenWeighting
from octetrl.config.schema import AlgorithmConfig
from octetrl.records import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What tells one algorithm from another."""

    name: str
    keeps: Callable[[RolloutGroup], bool]  # does the group teach anything?
    advantages: Advantages  # rewards of every kept group of a step -> as many advantages
    trains: Callable[[Rollout], bool]  # is this rollout trained on, or only in the baseline?
    token_weighting: TokenWeighting
    loss: Callable[[LossInputs], TokenLoss]
    needs_reference: bool  # log-probs of the weights the run began with
    needs_proximal: bool  # the trainer's log-probs before the first of several updates
    shape: Callable[[TokenRewards], Tensor] | None = None  # per-token advantages; None: the sample's, on each token
    needs_values: bool = False  # a critic
    returns: Callable[[TokenRewards], Tensor] | None = None  # what the critic is fitted to; None: no critic
    reward_loss: RewardLoss | None = None  # of a pair's rewards: a reward model is trained, and `loss` unused


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the recipe names."""
    return _BUILDERS[config.name](config)


def _build_grpo(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(
        name="grpo",
        keeps=has_variance if config.drop_zero_variance else has_baseline,
        advantages=by_group(partial(group_relative_advantages, normalize=config.normalize_advantages)),
        trains=is_not_overlong if config.overlong == "mask" else _always,
        token_weighting=config.token_weighting,
        loss=partial(grpo_loss, config=config),
        needs_reference=config.kl_coefficient > 0,
        needs_proximal=True,
    )


def _build_sft(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(
        name="sft",
        keeps=_always,
        advantages=by_group(_ones),
        trains=_always,
        token_weighting=config.token_weighting,
        loss=sft_loss,
        needs_reference=False,
        needs_proximal=False,
    )


def _build_ppo(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(
        name="ppo",
        keeps=_always,
        advantages=by_group(rewards_as_they_are),
        trains=is_not_overlong if config.overlong == "mask" else _always,
        token_weighting=config.token_weighting,
        loss=partial(ppo_loss, config=config),
        needs_reference=config.kl_coefficient > 0,
        needs_proximal=True,
        shape=partial(ppo_advantages, config=config),
        needs_values=True,
        returns=partial(ppo_returns, config=config),
    )


def _build_reward_model(config: AlgorithmConfig) -> Algorithm:
    return replace(
        _build_sft(config), name="reward_model", reward_loss=partial(bradley_terry_loss, center=config.reward_center)
    )


def _always(_: object) -> bool:
    return True


def _ones(rewards: Sequence[float]) -> list[float]:
    return [1.0] * len(rewards)


_BUILDERS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {
    "grpo": _build_grpo,
    "sft": _build_sft,
    "ppo": _build_ppo,
    "reward_model": _build_reward_model,
}
