"""Every algorithm, as one frozen record of functions. The trainer and the rollout know only this record.

To add one: a file with its loss, an entry in `_BUILDERS`, its name in `config/schema.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from octetrl.algorithms.advantages import Advantages, by_group, group_relative_advantages
from octetrl.algorithms.distillation import divergence_loss, teacher_advantages
from octetrl.algorithms.dpo import preference_loss
from octetrl.algorithms.filters import has_baseline, has_variance, is_not_overlong
from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.rejection import best_of_group
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
    needs_teacher: bool = False  # the reference is another model's: `algorithm.teacher`
    teacher_top_k: int = 0  # tokens of the teacher's distribution that the loss reads; 0: the drawn ones alone


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


def _build_preference(config: AlgorithmConfig) -> Algorithm:
    return replace(
        _build_sft(config),
        name=config.name,
        token_weighting="sequence",  # the mean over pairs, see dpo.py
        loss=partial(preference_loss, config=config),
        needs_reference=True,
    )


def _build_rft(config: AlgorithmConfig) -> Algorithm:
    rule = partial(best_of_group, best=config.best_of_group, threshold=config.reward_threshold)
    return replace(
        _build_sft(config),
        name="rft",
        advantages=by_group(rule),
        trains=is_not_overlong if config.overlong == "mask" else _always,
    )


def _build_distill(config: AlgorithmConfig) -> Algorithm:
    samples = config.distillation == "sampled"
    return replace(
        _build_sft(config),
        name="distill",
        trains=is_not_overlong if config.overlong == "mask" else _always,
        loss=partial(grpo_loss if samples else divergence_loss, config=config),
        shape=teacher_advantages if samples else None,
        needs_proximal=samples,
        needs_reference=True,
        needs_teacher=True,
        teacher_top_k=0 if samples else config.teacher_top_k,
    )


def _always(_: object) -> bool:
    return True


def _ones(rewards: Sequence[float]) -> list[float]:
    return [1.0] * len(rewards)


_BUILDERS: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {
    "grpo": _build_grpo,
    "sft": _build_sft,
    "dpo": _build_preference,
    "ipo": _build_preference,
    "rft": _build_rft,
    "distill": _build_distill,
}
