"""Every algorithm, as one frozen record of functions. The trainer and the rollout know only this record.

To add one: a file with its loss, an entry in `_BUILDERS`, its name in `config/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from octetrl.algorithms.advantages import group_relative_advantages
from octetrl.algorithms.bradley_terry import RewardLoss, bradley_terry_loss
from octetrl.algorithms.filters import has_baseline, has_variance, is_not_overlong
from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.sft import sft_loss
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.weighting import TokenWeighting
from octetrl.config.schema import AlgorithmConfig
from octetrl.records import Rollout, RolloutGroup


@dataclass(frozen=True, slots=True)
class Algorithm:
    """What tells one algorithm from another."""

    name: str
    keeps: Callable[[RolloutGroup], bool]  # does the group teach anything?
    advantages: Callable[[Sequence[float]], list[float]]  # rewards of one group -> as many advantages
    trains: Callable[[Rollout], bool]  # is this rollout trained on, or only in the baseline?
    token_weighting: TokenWeighting
    loss: Callable[[LossInputs], TokenLoss]
    needs_reference: bool  # log-probs of the weights the run began with
    needs_proximal: bool  # the trainer's log-probs before the first of several updates
    reward_loss: RewardLoss | None = None  # of a pair's rewards: a reward model is trained, and `loss` unused


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm that the recipe names."""
    return _BUILDERS[config.name](config)


def _build_grpo(config: AlgorithmConfig) -> Algorithm:
    return Algorithm(
        name="grpo",
        keeps=has_variance if config.drop_zero_variance else has_baseline,
        advantages=partial(group_relative_advantages, normalize=config.normalize_advantages),
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
        advantages=_ones,
        trains=_always,
        token_weighting=config.token_weighting,
        loss=sft_loss,
        needs_reference=False,
        needs_proximal=False,
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
    "reward_model": _build_reward_model,
}
