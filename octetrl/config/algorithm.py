"""The recipe's `algorithm` section: one class for each objective, chosen by `name`.

    algorithm: {name: dapo, max_refills: 4}      ->      DapoConfig(max_refills=4)

A class lists only what its objective reads. Shared fields come from `config/objective_settings.py`. A field that a
class repeats has another default there, that of the objective's paper (docs/algorithms.md). A recipe that gives a field
which its objective does not have is refused (`config/objective_keys.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import Field

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
from octetrl.config.section import Fraction, Problem


class PolicyConfig(
    TokenWeightingSettings, KlSettings, GroupFilterSettings, LengthPenaltySettings, OverlongSettings, PolicyLossSettings
):
    """An objective that learns from rewarded rollouts by a policy gradient."""

    needs_siblings: ClassVar[bool] = True

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.kl_in == "reward_before_baseline" and self.overlong == "mask":
            text = (
                "algorithm.overlong: 'mask' leaves answers out of training, so their KL is not known to the baseline of"
                " algorithm.kl_in: reward_before_baseline; use keep, or kl_in: reward"
            )
            yield Problem(("algorithm.overlong", "algorithm.kl_in"), text)


class GrpoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """GRPO (arXiv 2402.03300): advantages relative to the group, no critic. The first choice."""

    name: Literal["grpo"] = "grpo"


class DapoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """DAPO (arXiv 2503.14476): GRPO with a wider upper clip, dynamic sampling and a penalty on overlong answers."""

    name: Literal["dapo"] = "dapo"
    clip_high: ClipHigh = 0.28
    """How far the ratio may rise above 1 before a token's gradient is clipped. 0.28 as published."""
    max_refills: Refills = 10
    """At most so many further draws a step, until `rollout.prompts_per_step` groups are kept. 0: one draw."""
    overlong_buffer: Fraction = 0.2
    """Last share of `max_new_tokens` in which an answer loses reward with its length, up to 1 at the limit. 0: no
    penalty."""


class DualClipConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """Dual-clip PPO (arXiv 1912.09729): a floor under what a bad token can cost. For many updates a batch."""

    name: Literal["dual_clip"] = "dual_clip"
    dual_clip: float = Field(default=3.0, gt=1.0)
    """How many times its advantage a bad token may cost at most. 3 as published."""


class GspoSettings(NormalizationSettings, ClipSettings, PolicyConfig):
    """GSPO (arXiv 2507.18071): the ratio of a whole answer."""

    clip_low: ClipLow = 3e-4
    """How far the ratio of a whole answer may fall below 1. 3e-4 as published."""
    clip_high: ClipHigh = 4e-4
    """How far the ratio of a whole answer may rise above 1. 4e-4 as published."""
    token_weighting: Weighting = "sequence"
    """How much a trained token counts in the loss. `sequence`, all samples count the same, as published."""
    corrections: tuple[Correction, ...] = ("sequence_tis",)
    """Importance corrections, one upon the other. An answer is corrected as one, as it is clipped as one."""


class GspoConfig(GspoSettings):
    """GSPO (arXiv 2507.18071): the ratio of a whole answer. For long answers and mixtures of experts."""

    name: Literal["gspo"] = "gspo"


class GspoTokenConfig(GspoSettings):
    """GSPO-token (arXiv 2507.18071): the answer's ratio in value, each token's own in the gradient."""

    name: Literal["gspo_token"] = "gspo_token"


class CispoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """CISPO (arXiv 2506.13585): the weight is clipped, so each token keeps its gradient. For many updates a batch."""

    name: Literal["cispo"] = "cispo"
    clip_low: ClipLow = 1.0
    """How far the weight may fall below 1. 1: no lower bound, as published."""
    clip_high: ClipHigh = 4.0
    """How far the weight may rise above 1. 4, at most 5 times, as in ScaleRL (arXiv 2510.13786)."""


class SapoConfig(NormalizationSettings, PolicyConfig):
    """SAPO (arXiv 2511.20347): a smooth gate in the place of the clip. For many updates a batch."""

    name: Literal["sapo"] = "sapo"
    token_weighting: Weighting = "sequence"
    """How much a trained token counts in the loss. `sequence`, all samples count the same, as published."""
    sapo_tau_positive: float = Field(default=1.0, gt=0.0)
    """How fast a token of positive advantage fades as its ratio leaves 1. 1.0 as published; raise it to trust stale
    samples less."""
    sapo_tau_negative: float = Field(default=1.05, gt=0.0)
    """The same for negative advantages. 1.05 as published: bad tokens fade sooner."""


class RlooConfig(ClipSettings, PolicyConfig):
    """RLOO (arXiv 2402.14740): each answer against the mean of its siblings, itself left out."""

    name: Literal["rloo"] = "rloo"
    token_weighting: Weighting = "constant"
    """How much a trained token counts in the loss. `constant`, the answer's log-prob is a sum, as published."""
    rloo_ratio: Literal["token", "sequence"] = "token"
    """What is clipped: each token's ratio, or the ratio of the whole answer, the product over its tokens (TRL)."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.rloo_ratio == "sequence" and self.token_weighting != "constant":
            text = (
                f"algorithm.token_weighting: '{self.token_weighting}' would divide the gain of a whole answer by its"
                f" length; with algorithm.rloo_ratio: sequence use constant"
            )
            yield Problem(("algorithm.token_weighting", "algorithm.rloo_ratio"), text)
        if self.rloo_ratio == "sequence" and self.kl_in == "reward" and self.kl_coefficient > 0:
            text = (
                "algorithm.kl_in: 'reward' charges each token for its own KL, and algorithm.rloo_ratio: sequence has"
                " one advantage an answer; use reward_before_baseline or loss"
            )
            yield Problem(("algorithm.kl_in", "algorithm.rloo_ratio"), text)


class ReinforcePpConfig(ClipSettings, PolicyConfig):
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the batch. For one answer a prompt."""

    needs_siblings: ClassVar[bool] = False

    name: Literal["reinforce_pp"] = "reinforce_pp"
    drop_zero_variance: bool = False
    """Leave out, and count, groups whose rewards are all equal. false: other prompts are the baseline."""
    kl_in: KlPlace = "reward"
    """`reward`: each token is charged for the KL of itself and all that follow it, as published. `loss`: each token's
    KL, differentiated."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of a token's KL, in nats. k1 as published."""


class ReinforcePpBaselineConfig(ClipSettings, PolicyConfig):
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262)."""

    name: Literal["reinforce_pp_baseline"] = "reinforce_pp_baseline"
    kl_estimator: KlEstimator = "k2"
    """Estimator of a token's KL, in nats. k2 as published."""


class PpoConfig(NormalizationSettings, ClipSettings, PolicyConfig):
    """PPO with a critic (arXiv 1707.06347). The critic's own settings are the section `critic`."""

    needs_siblings: ClassVar[bool] = False

    name: Literal["ppo"] = "ppo"
    drop_zero_variance: bool = False
    """Leave out, and count, groups whose rewards are all equal. false: the critic is the baseline."""
    kl_in: KlPlace = "reward"
    """`reward`: each token is charged for its own KL and GAE carries it back (InstructGPT). `loss`: each token's KL,
    differentiated."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of a token's KL, in nats. k1 as in InstructGPT (arXiv 2203.02155)."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """What a reward one token later is worth. Answers are short episodes: 1."""
    gae_lambda: Fraction = 0.95
    """How far advantages look past the value head: 1 waits for the outcome, 0 trusts the next value alone. Raise it
    for long answers."""
    return_lambda: Fraction | None = None
    """The lambda of the returns that the value head is fitted to. None: `gae_lambda`. 1 fits the outcomes themselves,
    without bias, where answers are long (VAPO, arXiv 2504.05118)."""


class SftConfig(DatasetSettings, TokenWeightingSettings):
    """Supervised fine-tuning on given conversations."""

    name: Literal["sft"] = "sft"


class DpoConfig(PreferenceSettings):
    """DPO (arXiv 2305.18290): preference pairs without a reward model."""

    name: Literal["dpo"] = "dpo"
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """Share of pairs whose label is taken to be wrong (cDPO). Set it to the share of wrong labels you expect."""


class IpoConfig(PreferenceSettings):
    """IPO (arXiv 2310.12036): like DPO, with a bounded margin. For noisy labels, or labels that nearly all agree."""

    name: Literal["ipo"] = "ipo"


class RewardModelConfig(DatasetSettings):
    """A reward model from preference pairs (Bradley-Terry)."""

    learns_from: ClassVar[LearnsFrom] = "preferences"

    name: Literal["reward_model"] = "reward_model"
    reward_center: float = Field(default=0.0, ge=0.0)
    """Weight that pulls the sum of a pair's rewards towards 0. Commonly 0.01, for rewards that PPO will use; 0 leaves
    the sum free."""


class RftConfig(TokenWeightingSettings, LengthPenaltySettings, OverlongSettings):
    """Rejection-sampling fine-tuning (arXiv 2308.01825): supervised steps on the best answers of each group."""

    name: Literal["rft"] = "rft"
    best_of_group: int = Field(default=1, ge=1, le=100_000)
    """How many siblings of a group are learnt from, the best first. At most `rollout.group_size`."""
    reward_threshold: float = 0.0
    """Only siblings with a reward above it are learnt from. Set it to just below the reward of a right answer."""


class DistillConfig(ClipSettings, TokenWeightingSettings, OverlongSettings):
    """On-policy distillation (arXiv 2306.13649): a teacher judges what the policy drew."""

    name: Literal["distill"] = "distill"
    teacher: str | None = None
    """Hugging Face folder of the teacher, of any size, with the policy's tokenizer. Required."""
    teacher_precision: Literal["bf16", "fp8"] = "bf16"
    """Precision of the teacher's linears. fp8 halves its memory."""
    distillation: Literal["sampled", "reverse_kl", "forward_kl"] = "sampled"
    """The teacher's log-prob of each drawn token as its advantage (MiniLLM), or a KL over the teacher's top-k tokens
    (GKD): reverse, the policy keeps to what the teacher would say; forward, it covers all that the teacher might.
    `sampled` alone reads corrections, clips and the entropy bonus."""
    teacher_top_k: int = Field(default=64, ge=1, le=1 << 24)
    """Tokens of the teacher's distribution that a KL tells apart at each place; the rest counts as one. Raise it for
    teachers that are unsure."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.teacher is None:
            text = "algorithm.teacher: missing; distill needs the Hugging Face folder of a teacher with the same"
            yield Problem(("algorithm.teacher", "algorithm.name"), f"{text} tokenizer")


ChosenAlgorithm = Annotated[
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
OBJECTIVES: dict[str, type[AlgorithmConfig]] = {
    section.model_fields["name"].default: section for section in get_args(get_args(ChosenAlgorithm)[0])
}
