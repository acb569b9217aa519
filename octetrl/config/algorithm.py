"""The recipe's `algorithm` section: one class for each objective, chosen by `name`.

    algorithm: {name: dapo, max_refills: 4}      ->      DapoConfig(max_refills=4)

A class has only the fields that its objective reads. Shared fields come from `config/objective_settings.py`. A class
repeats a shared field to change its default to that of the objective's paper (docs/algorithms.md). A field that the
objective does not have is an error (`config/problems.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import ConfigDict, Discriminator, Field, Tag

from octetrl.config.objective_settings import (
    AlgorithmConfig,
    ClipHigh,
    ClipLow,
    ClipSettings,
    Correction,
    DatasetSettings,
    GroupFilterSettings,
    KlEstimator,
    KlPlace,
    KlSettings,
    LearnsFrom,
    LengthPenaltySettings,
    NormalizationSettings,
    OverlongSettings,
    PolicyLossSettings,
    PreferenceSettings,
    Refills,
    TokenWeightingSettings,
    Weighting,
)
from octetrl.config.section import Fraction


class PolicyConfig(
    TokenWeightingSettings, KlSettings, GroupFilterSettings, LengthPenaltySettings, OverlongSettings, PolicyLossSettings
):
    """Settings of every objective that learns from rewarded rollouts by a policy gradient."""

    needs_siblings: ClassVar[bool] = True


class GrpoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """GRPO (arXiv 2402.03300): advantages relative to the group, no critic. The first choice."""

    name: Literal["grpo"] = "grpo"


class DapoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """DAPO (arXiv 2503.14476): GRPO with a wider upper clip, dynamic sampling and a penalty on overlong answers."""

    name: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28
    """How far the ratio may rise above 1 before a token's gradient is clipped. 0.28 as published."""
    max_refills: Refills = 10
    """Largest number of extra sampling rounds in a step. A round follows while fewer than `rollout.prompts_per_step`
    groups are kept. 0: none."""
    overlong_buffer: Fraction = 0.2
    """Penalty on long answers. 0.2: in the last 20% of `max_new_tokens` each token lowers the reward, by 1 in total at
    the limit. 0: no penalty."""


class DualClipConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """Dual-clip PPO (arXiv 1912.09729): limits the loss of tokens with negative advantage. For many updates per
    batch."""

    name: Literal["dual_clip"] = "dual_clip"
    dual_clip: float = Field(default=3.0, gt=1.0)
    """Largest loss of a token with negative advantage, as a multiple of the advantage's size. 3 as published."""


class GspoSettings(NormalizationSettings, ClipSettings, PolicyConfig):
    """GSPO (arXiv 2507.18071): the ratio of a whole answer."""

    clip_low: ClipLow = 3e-4
    """How far the ratio of a whole answer may fall below 1. 3e-4 as published."""
    clip_high: ClipHigh = 4e-4
    """How far the ratio of a whole answer may rise above 1. 4e-4 as published."""
    token_weighting: Weighting = "sequence"
    """Weight of a trained token in the loss. `sequence`: all samples have the same weight, as published."""
    corrections: tuple[Correction, ...] = ("sequence_tis",)
    """Importance corrections, applied in this order. The default corrects an answer as a whole, because the clip also
    applies to a whole answer."""


class GspoConfig(GspoSettings):
    """GSPO (arXiv 2507.18071): the ratio of a whole answer. For long answers and mixtures of experts."""

    name: Literal["gspo"] = "gspo"


class GspoTokenConfig(GspoSettings):
    """GSPO-token (arXiv 2507.18071): the ratio's value is that of the whole answer, its gradient is each token's."""

    name: Literal["gspo_token"] = "gspo_token"


class CispoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """CISPO (arXiv 2506.13585): clips the weight, so every token keeps its gradient. For many updates per batch."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    """How far the weight may fall below 1. 1: no lower bound, as published."""
    clip_high: ClipHigh = 4.0
    """How far the weight may rise above 1. 4 limits the weight to 5, as in ScaleRL (arXiv 2510.13786)."""


class SapoConfig(NormalizationSettings, PolicyConfig):
    """SAPO (arXiv 2511.20347): a smooth gate instead of the clip. For many updates per batch."""

    name: Literal["sapo"] = "sapo"
    token_weighting: Weighting = "sequence"
    """Weight of a trained token in the loss. `sequence`: all samples have the same weight, as published."""
    sapo_tau_positive: float = Field(default=1.0, gt=0.0)
    """How fast the gate closes for a token with positive advantage as its ratio moves away from 1. 1.0 as published.
    Raise it to trust stale samples less."""
    sapo_tau_negative: float = Field(default=1.05, gt=0.0)
    """The same for tokens with negative advantage. 1.05 as published, so that their gate closes faster."""


class RlooConfig(ClipSettings, PolicyConfig):
    """RLOO (arXiv 2402.14740): compares each answer's reward with the mean of the prompt's other answers."""

    name: Literal["rloo"] = "rloo"
    token_weighting: Weighting = "constant"
    """Weight of a trained token in the loss. `constant`: an answer's log-prob is the sum over its tokens, as
    published."""
    rloo_ratio: Literal["token", "sequence"] = "token"
    """Ratio that is clipped. token: each token's own. sequence: the whole answer's, the product over its tokens
    (TRL)."""


class ReinforcePpConfig(ClipSettings, PolicyConfig):
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the batch. For one answer per prompt."""

    needs_siblings: ClassVar[bool] = False

    name: Literal["reinforce_pp"] = "reinforce_pp"
    drop_zero_variance: bool = False
    """Leave out groups whose rewards are all equal, and count them. false by default: the baseline is the whole batch,
    so these groups have advantages too."""
    kl_in: KlPlace = "reward"
    """Where the KL enters. `reward`: a token's advantage is reduced by the KL of this token and all later ones, as
    published. `loss`: each token's KL is a term of the loss."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of a token's KL, in nats. k1 as published."""


class ReinforcePpBaselineConfig(ClipSettings, PolicyConfig):
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_estimator: KlEstimator = "k2"
    """Estimator of a token's KL, in nats. k2 as published."""


class PpoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """PPO with a critic (arXiv 1707.06347). The section `critic` has the critic's own settings."""

    needs_siblings: ClassVar[bool] = False

    name: Literal["ppo"] = "ppo"
    drop_zero_variance: bool = False
    """Leave out groups whose rewards are all equal, and count them. false by default: the critic is the baseline, so
    these groups have advantages too."""
    kl_in: KlPlace = "reward"
    """Where the KL enters. `reward`: a token's KL is subtracted from its reward, and GAE propagates it to earlier
    tokens (InstructGPT). `loss`: each token's KL is a term of the loss."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of a token's KL, in nats. k1 as in InstructGPT (arXiv 2203.02155)."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """Discount of rewards per token. 1, no discount, because answers are short episodes."""
    gae_lambda: Fraction = 0.95
    """Lambda of GAE. 1: advantages use the whole return. 0: they use only the next predicted value. Raise it for long
    answers."""
    return_lambda: Fraction | None = None
    """Lambda of the returns that the value head learns. None: `gae_lambda`. 1: it learns the whole returns, without
    bias; use it for long answers (VAPO, arXiv 2504.05118)."""
    truncated: Literal["terminal", "bootstrap"] = "terminal"
    """What follows an answer truncated at `max_new_tokens`, or a conversation that ran out of turns or context, in GAE.
    `terminal`: nothing, as after a finished answer (verl). `bootstrap`: what the critic expects of the rest. Use it if
    the limit is not part of the task."""


class SftConfig(DatasetSettings, TokenWeightingSettings):
    """Supervised fine-tuning on given conversations."""

    name: Literal["sft"] = "sft"


class DpoConfig(PreferenceSettings):
    """DPO (arXiv 2305.18290): preference pairs without a reward model."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Assumed share of pairs with a wrong label (cDPO). Set it to the share that you expect."""


class IpoConfig(PreferenceSettings):
    """IPO (arXiv 2310.12036): like DPO, with a bounded margin. For noisy labels, or labels that nearly all agree."""

    name: Literal["ipo"] = "ipo"


class RewardModelConfig(DatasetSettings):
    """A reward model from preference pairs (Bradley-Terry)."""

    learns_from: ClassVar[LearnsFrom] = "preferences"

    name: Literal["reward_model"] = "reward_model"
    reward_center: float = Field(default=0.0, ge=0.0)
    """Weight of the loss term that pulls the sum of a pair's rewards towards 0. 0: no such term. Commonly 0.01 if PPO
    will use the rewards."""


class RftConfig(TokenWeightingSettings, LengthPenaltySettings, OverlongSettings):
    """Rejection-sampling fine-tuning (arXiv 2308.01825): supervised steps on the best answers of each group."""

    name: Literal["rft"] = "rft"
    best_of_group: int = Field(default=1, ge=1, le=100_000)
    """Number of answers per group to learn from, the highest rewards first. At most `rollout.group_size`."""
    reward_threshold: float = 0.0
    """Learn only from answers with a reward above this. Set it just below the reward of a right answer."""


class DistillConfig(ClipSettings, TokenWeightingSettings, OverlongSettings):
    """On-policy distillation (arXiv 2306.13649): a teacher scores what the policy sampled."""

    name: Literal["distill"] = "distill"
    teacher: str | None = None
    """Hugging Face folder of the teacher. It may have any size and must have the policy's tokenizer. Required."""
    teacher_precision: Literal["bf16", "fp8"] = "bf16"
    """Precision of the teacher's linears. fp8 halves its memory."""
    distillation: Literal["sampled", "reverse_kl", "forward_kl"] = "sampled"
    """What the policy learns from the teacher. sampled: the teacher's log-prob of each sampled token gives its
    advantage (MiniLLM). reverse_kl, forward_kl: a KL over the teacher's top-k tokens (GKD). With reverse_kl the policy
    prefers the teacher's likeliest answers, with forward_kl it covers all of them. Only `sampled` reads corrections,
    clips and the entropy bonus."""
    teacher_top_k: int = Field(default=64, ge=1, le=1 << 24)
    """Number of the teacher's most likely tokens that the KL compares at each position. All other tokens together
    count as one. Raise it for teachers that are unsure."""


class OwnObjectiveConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """An objective of your own: `name` is `module:name` of its loss (algorithms/own_objective.py, docs/algorithms.md).

    Besides the shared fields the section may have the fields of the loss's dataclass.
    """

    model_config = ConfigDict(extra="allow")

    name: str
    """`module:name` of the loss, a function of (inputs, fields, shared)."""

    @property
    def own_fields(self) -> Mapping[str, Any]:
        """What the recipe gives besides the shared fields."""
        return dict(self.model_extra or {})


ShippedAlgorithm = Annotated[
    GrpoConfig
    | DapoConfig
    | DualClipConfig
    | GspoConfig
    | GspoTokenConfig
    | CispoConfig
    | SapoConfig
    | RlooConfig
    | ReinforcePpConfig
    | ReinforcePpBaselineConfig
    | PpoConfig
    | SftConfig
    | DpoConfig
    | IpoConfig
    | RewardModelConfig
    | RftConfig
    | DistillConfig,
    Field(discriminator="name"),
]


def _who_wrote(section: Any) -> str:
    name = section.get("name") if isinstance(section, dict) else getattr(section, "name", None)
    return OWN if isinstance(name, str) and ":" in name else SHIPPED


SHIPPED, OWN = "shipped", "own"  # tags in the locations of pydantic's errors
ChosenAlgorithm = Annotated[
    Annotated[ShippedAlgorithm, Tag(SHIPPED)] | Annotated[OwnObjectiveConfig, Tag(OWN)], Discriminator(_who_wrote)
]
OBJECTIVES: dict[str, type[AlgorithmConfig]] = {
    section.model_fields["name"].default: section for section in get_args(get_args(ShippedAlgorithm)[0])
}
