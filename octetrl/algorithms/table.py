"""Every algorithm, as one frozen record of functions. The trainer and the rollout know only this record.

To add one: a file with its loss or its advantages, its section in `config/algorithm.py`, and a line in `_BUILDERS`
(docs/algorithms.md works an example).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor

from octetrl.algorithms.advantages import Advantages, by_group, group_relative_advantages
from octetrl.algorithms.bradley_terry import RewardLoss, bradley_terry_loss
from octetrl.algorithms.cispo import cispo_loss
from octetrl.algorithms.distillation import divergence_loss, teacher_advantages
from octetrl.algorithms.dpo import preference_loss
from octetrl.algorithms.dual_clip import dual_clip_loss
from octetrl.algorithms.filters import has_baseline, has_reward, has_variance, is_not_overlong
from octetrl.algorithms.grpo import grpo_loss
from octetrl.algorithms.gspo import gspo_loss, gspo_token_loss
from octetrl.algorithms.kl_control import adapted_kl_scale
from octetrl.algorithms.kl_reward import compare_less_kl, less_kl
from octetrl.algorithms.own_objective import load_objective
from octetrl.algorithms.policy_loss import step_means
from octetrl.algorithms.ppo import ppo_advantages, ppo_returns
from octetrl.algorithms.ratios import kl_of_ratio
from octetrl.algorithms.reinforce_pp import batch_normalized, plain_rewards
from octetrl.algorithms.rejection import best_of_group
from octetrl.algorithms.rloo import leave_one_out_advantages, rloo_loss
from octetrl.algorithms.sapo import sapo_loss
from octetrl.algorithms.sft import sft_loss
from octetrl.algorithms.spread import differences_from_mean
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.algorithms.weighting import TokenWeighting
from octetrl.config.algorithm import (
    DistillConfig,
    OwnObjectiveConfig,
    PolicyConfig,
    PpoConfig,
    RewardModelConfig,
    RftConfig,
    SftConfig,
)
from octetrl.config.objective_settings import (
    AlgorithmConfig,
    NormalizationSettings,
    OverlongSettings,
    PreferenceSettings,
    TokenWeightingSettings,
)
from octetrl.records import Rollout, RolloutGroup

StepMean = Callable[[LossInputs], Tensor]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The functions and settings that define an algorithm."""

    name: str
    keeps: Callable[[RolloutGroup], bool]  # whether the group has a learning signal
    advantages: Advantages  # rewards of every kept group of a step -> as many advantages
    trains: Callable[[Rollout], bool]  # whether the rollout is trained on; if not, it is only in the baseline
    token_weighting: TokenWeighting
    loss: Callable[[LossInputs], TokenLoss]
    needs_reference: bool  # log-probs of the weights the run began with, or of later ones (`reference_every`)
    needs_proximal: bool  # the trainer's log-probs before the first of several updates
    shape: Callable[[TokenRewards], Tensor] | None = None  # advantages [N]; None: the sample's on each token
    shaping_kl: Callable[[Tensor], Tensor] | None = None  # log-ratios -> the KL that `shape` subtracts; None: no KL
    needs_values: bool = False  # a critic
    returns: Callable[[TokenRewards], Tensor] | None = None  # the critic's targets [N]; None: no critic
    reward_loss: RewardLoss | None = None  # of a pair's rewards: a reward model is trained and `loss` is not used
    needs_teacher: bool = False  # the reference is another model's: `algorithm.teacher`
    teacher_top_k: int = 0  # tokens of the teacher's distribution that the loss reads; 0: only the sampled ones
    step_means: Mapping[str, StepMean] = field(default_factory=dict)  # field of LossInputs -> values to average
    adapt_kl: Callable[[float, float], float] | None = None  # KL scale and mean KL of a step -> scale of the next
    reference_every: int = 0  # the reference becomes the current policy after so many steps; 0: never


def build_algorithm(config: AlgorithmConfig) -> Algorithm:
    """The algorithm of the recipe's section."""
    if isinstance(config, OwnObjectiveConfig):
        own = load_objective(config)
        return _policy(own.loss, own.rule)(config)
    return _BUILDERS[config.name](config)


Builder = Callable[[Any], Algorithm]  # the section of its objective
Rule = Callable[[Sequence[float]], list[float]]  # rewards of one group -> advantages


def _policy(
    loss: Callable[..., TokenLoss],
    rule: Rule | None = None,
    shape: Callable[..., Tensor] | None = None,
) -> Builder:
    """A policy objective. `loss` and `shape` take `config=`.

    `rule` None: group-relative advantages. `shape` None: no shaping, or KL in the reward if the recipe asks for it.
    """

    def build(config: PolicyConfig) -> Algorithm:
        keeps = has_baseline if config.needs_siblings else has_reward
        charges_kl = config.keeps_reference and config.kl_in != "loss"
        compare: Rule = rule or _group_relative(config)
        waits = charges_kl and config.kl_in == "reward_before_baseline"  # compare siblings when their KL is known
        shaped = shape or (less_kl if charges_kl else None)
        if waits and shape is None:
            shaped = partial(compare_less_kl, rule=compare)
        target = config.kl_target
        return Algorithm(
            name=config.name,
            keeps=has_variance if config.drop_zero_variance else keeps,
            advantages=by_group(differences_from_mean if waits else compare),
            trains=_trained(config),
            token_weighting=_weighting(config),
            loss=partial(loss, config=config),
            needs_reference=config.keeps_reference,
            needs_proximal=config.ratio_base != "generator",
            shape=shaped and partial(shaped, config=config),
            shaping_kl=partial(kl_of_ratio, estimator=config.kl_estimator) if charges_kl else None,
            step_means=step_means(config),
            adapt_kl=None if target is None else partial(adapted_kl_scale, target=target),
            reference_every=config.reference_every,
        )

    return build


def _group_relative(config: PolicyConfig) -> Rule:
    assert isinstance(config, NormalizationSettings), f"{config.name} has its own rule of advantages"
    return partial(group_relative_advantages, normalize=config.normalize_advantages)


def _build_ppo(config: PpoConfig) -> Algorithm:
    policy = _policy(grpo_loss, plain_rewards, ppo_advantages)(config)
    return replace(policy, needs_values=True, returns=partial(ppo_returns, config=config))


def _supervised(name: str, token_weighting: TokenWeighting) -> Algorithm:
    """An objective that trains on every given sample, with advantages of 1."""
    return Algorithm(
        name=name,
        keeps=_always,
        advantages=by_group(_ones),
        trains=_always,
        token_weighting=token_weighting,
        loss=sft_loss,
        needs_reference=False,
        needs_proximal=False,
    )


def _build_sft(config: SftConfig) -> Algorithm:
    return _supervised(config.name, _weighting(config))


def _build_reward_model(config: RewardModelConfig) -> Algorithm:
    reward_loss = partial(bradley_terry_loss, center=config.reward_center)
    return replace(_supervised(config.name, "token"), reward_loss=reward_loss)


def _build_preference(config: PreferenceSettings) -> Algorithm:
    pairs = _supervised(config.name, "sequence")  # the mean over pairs, see dpo.py
    return replace(pairs, loss=partial(preference_loss, config=config), needs_reference=True)


def _build_rft(config: RftConfig) -> Algorithm:
    rule = partial(best_of_group, best=config.best_of_group, threshold=config.reward_threshold)
    return replace(
        _supervised(config.name, _weighting(config)),
        advantages=by_group(rule),
        trains=_trained(config),
    )


def _build_distill(config: DistillConfig) -> Algorithm:
    samples = config.distillation == "sampled"
    return replace(
        _supervised(config.name, _weighting(config)),
        trains=_trained(config),
        loss=partial(grpo_loss if samples else divergence_loss, config=config),
        shape=teacher_advantages if samples else None,
        shaping_kl=partial(kl_of_ratio, estimator="k1") if samples else None,
        needs_proximal=samples,
        needs_reference=True,
        needs_teacher=True,
        step_means=step_means(config) if samples else {},
        teacher_top_k=0 if samples else config.teacher_top_k,
    )


def _weighting(config: TokenWeightingSettings) -> TokenWeighting:
    return config.constant_length if config.token_weighting == "constant" else config.token_weighting


def _trained(config: OverlongSettings) -> Callable[[Rollout], bool]:
    return is_not_overlong if config.overlong == "mask" else _always


def _always(_: object) -> bool:
    return True


def _ones(rewards: Sequence[float]) -> list[float]:
    return [1.0] * len(rewards)


_BUILDERS: dict[str, Builder] = {
    "grpo": _policy(grpo_loss),
    "dapo": _policy(grpo_loss),
    "dual_clip": _policy(dual_clip_loss),
    "gspo": _policy(gspo_loss),
    "gspo_token": _policy(gspo_token_loss),
    "cispo": _policy(cispo_loss),
    "sapo": _policy(sapo_loss),
    "rloo": _policy(rloo_loss, leave_one_out_advantages),
    "reinforce_pp": _policy(grpo_loss, plain_rewards, batch_normalized),
    "reinforce_pp_baseline": _policy(grpo_loss, differences_from_mean, batch_normalized),
    "ppo": _build_ppo,
    "sft": _build_sft,
    "reward_model": _build_reward_model,
    "dpo": _build_preference,
    "ipo": _build_preference,
    "rft": _build_rft,
    "distill": _build_distill,
}
