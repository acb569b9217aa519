"""Settings that several objectives share, one small class per topic.

`config/algorithm.py` composes each objective's section from these classes, so a section has only the fields that its
objective reads. rules_training.py has what does not go together. The defaults here are GRPO's. An objective with
another default repeats the field in its own section.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from octetrl.config.section import Fraction, Section

LearnsFrom = Literal["rollouts", "conversations", "preferences"]
Correction = Literal[
    "tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask", "veto", "self_normalize"
]  # fmt: skip
MASKS = ("token_mask", "sequence_mask", "geometric_mask", "veto")
KlEstimator = Literal["k1", "k2", "k3"]
KlPlace = Literal["loss", "reward", "reward_before_baseline"]
Weighting = Literal["token", "sequence", "constant"]
ClipLow = Annotated[float, Field(ge=0.0, le=1.0)]
ClipHigh = Annotated[float, Field(ge=0.0)]
Refills = Annotated[int, Field(ge=0, le=1000)]


class AlgorithmConfig(Section):
    """Base class of all objectives' sections."""

    learns_from: ClassVar[LearnsFrom] = "rollouts"  # input of a step
    needs_siblings: ClassVar[bool] = False  # whether a rollout is compared with others of its prompt

    name: str
    """The objective. docs/algorithms.md compares them and lists the fields of each."""

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the policy stays in memory."""
        return False


class TokenWeightingSettings(AlgorithmConfig):
    token_weighting: Weighting = "token"
    """Weight of a trained token in the loss. `token`: all tokens have the same weight (DAPO). `sequence`: all samples
    have the same weight (GRPO as published). `constant`: the sum over a sample is divided by `constant_length`
    (Dr.GRPO). Change it to compare with another library."""
    constant_length: int = Field(default=1024, ge=1, le=1 << 24)
    """Divisor for `token_weighting: constant`, in tokens. Commonly `rollout.max_new_tokens`. It scales the loss, so it
    matters little if gradients are clipped."""


class OverlongSettings(AlgorithmConfig):
    overlong: Literal["keep", "mask"] = "keep"
    """What to do with answers truncated at `max_new_tokens` and conversations that ran out of turns or context.
    `keep`: train on them as on others. `mask`: count them in the baseline, but do not train on them (DAPO). Use it if
    many good answers are truncated."""


class LengthPenaltySettings(AlgorithmConfig):
    overlong_buffer: Fraction = 0.0
    """Penalty on long answers (DAPO's soft overlong punishment). 0.2: in the last 20% of `max_new_tokens` each token
    lowers the reward, by 1 in total at the limit. 0: no penalty. Set 0.1 to 0.2 if answers grow up to the limit."""


class GroupFilterSettings(AlgorithmConfig):
    drop_zero_variance: bool = True
    """Leave out groups whose rewards are all equal, and count them. Their advantages are 0 (DAPO). Set false to keep
    the number of trained groups constant."""
    max_refills: Refills = 0
    """Dynamic sampling (DAPO): largest number of extra sampling rounds in a step. A round follows while fewer than
    `rollout.prompts_per_step` groups are kept. 0: none. Raise it if `rollout/kept_groups` is low."""


def refills_of(algorithm: AlgorithmConfig) -> int:
    """The largest number of extra sampling rounds in a step; 0 for an objective that leaves out no groups."""
    return algorithm.max_refills if isinstance(algorithm, GroupFilterSettings) else 0


class NormalizationSettings(AlgorithmConfig):
    normalize_advantages: bool = True
    """Divide advantages by their standard deviation: over the group (GRPO), over the batch's tokens (PPO). false as in
    Dr.GRPO: groups whose answers are nearly all right or all wrong then get no extra weight."""


class KlSettings(AlgorithmConfig):
    """KL to a reference policy. The reference has the run's initial weights, or later ones (`reference_every`)."""

    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy. 0: no KL, and no reference model in memory. Set 0.001 to 0.05 if the
    policy drifts too far."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of a token's KL, in nats (by Schulman; algorithms/ratios.py explains them). Change it to compare with
    another library."""
    kl_gradient: Literal["auto", "estimator", "k2"] = "auto"
    """Gradient of the KL in the loss. auto: k2's gradient for k1, and each one's own for k2 and k3. estimator: always
    the estimator's own; k1's is zero in expectation (verl's k1). k2: always k2's (verl's k1+ and k3+)."""
    kl_in: KlPlace = "loss"
    """Where the KL enters. `loss`: each token's KL is a term of the loss. `reward`: a token's advantage is reduced by
    the KL of this token and all later ones, after the baseline. `reward_before_baseline`: an answer's reward is reduced
    by its whole KL before answers are compared (RLOO in TRL, use_kl_in_reward in verl). With one update per batch, both
    kinds of reward need an extra forward."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Target KL, in nats per token. `kl_coefficient` is adapted towards it, by at most 2% per step (arXiv 1909.08593).
    None: the coefficient is fixed. Set it if no fixed coefficient suits the whole run."""
    reference_every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of steps after which the current policy becomes the reference. 0: never. Set it for long runs that should
    move away from the initial weights slowly."""

    @property
    def keeps_reference(self) -> bool:
        return self.kl_coefficient > 0


class CorrectionSettings(AlgorithmConfig):
    """Importance corrections between the engine, which sampled a token, and the trainer (algorithms/corrections.py).

    p is the trainer's probability of a token, g the engine's. Each bound is read only by its own correction.
    """

    ratio_base: Literal["auto", "proximal", "generator"] = "auto"
    """Log-probs in the denominator of the ratio. auto: the engine's for stale samples; otherwise the policy's own, from
    before the first update if there are several. proximal: always the trainer's from before the first update, and
    corrections handle staleness. generator: always the engine's, and corrections then have no effect."""
    corrections: tuple[Correction, ...] = ("tis",)
    """Importance corrections, applied in this order. Per token: tis, token_mask. Per sample: sequence_tis,
    sequence_mask, geometric_mask, veto. Per batch: self_normalize. Add a mask if a run suffers from mismatch
    (`mismatch/` metrics) or stale samples."""
    tis_cap: float = Field(default=2.0, ge=1.0)
    """Largest weight p / g of a token. 2 as in FlashRL. For tis."""
    sequence_tis_cap: float = Field(default=2.0, ge=1.0)
    """Largest weight of a sample, which is the product of p / g over its tokens. For sequence_tis."""
    token_mask_range: tuple[float, float] = (0.5, 5.0)
    """Allowed range of p / g. Tokens outside are left out (IcePop). For token_mask."""
    sequence_mask_range: tuple[float, float] = (0.0, 3.0)
    """Allowed range of a sample's product of p / g. Samples outside are left out (MIS). For sequence_mask."""
    geometric_mask_range: tuple[float, float] = (0.999, 1.002)
    """Allowed range of a sample's geometric mean of p / g. Samples outside are left out. For geometric_mask."""
    veto_floor: Fraction = 1e-6
    """Lowest allowed value of a token, as `veto_by` measures it. A sample with a lower token is left out. For veto."""
    veto_by: Literal["probability", "ratio"] = "probability"
    """What veto compares with `veto_floor`: the trainer's probability p of a token, or the ratio p / g (verl, whose
    floors are 1e-4 to 1e-6)."""
    masked_tokens: Literal["in_denominator", "left_out"] = "in_denominator"
    """How tokens count that a mask or veto leaves out. in_denominator: in the loss's denominator and in the KL and
    entropy terms, so the other tokens keep their weight. left_out: nowhere, as in verl; only the denominator of
    `token_weighting: constant` stays the same."""


class PolicyLossSettings(CorrectionSettings):
    """Settings of every policy loss (algorithms/policy_loss.py)."""

    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus. Entropy is that of the full distribution at each token's position. Set 0.001 to 0.01
    if `entropy` falls to 0 before rewards have risen."""


class ClipSettings(PolicyLossSettings):
    """Settings of the clip: the ratio p / base is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: ClipLow = 0.2
    """How far the ratio may fall below 1 before a token's gradient is clipped (PPO's 0.2)."""
    clip_high: ClipHigh = 0.2
    """How far the ratio may rise above 1 (PPO's 0.2). 0.28 keeps more exploration (DAPO)."""


class DatasetSettings(AlgorithmConfig):
    """Settings of objectives that learn from rows of files instead of rollouts."""

    learns_from: ClassVar[LearnsFrom] = "conversations"

    conversations: str | None = None
    """One file or folder to learn from. It is short for `data.sources` with a single source. None: use `data.sources`.
    docs/data.md has the formats."""
    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Number of conversations or pairs per step. Raise it for a less noisy gradient; a step then takes longer."""


class PreferenceSettings(DatasetSettings):
    """Settings of objectives that compare a chosen and a rejected answer under policy and reference."""

    learns_from: ClassVar[LearnsFrom] = "preferences"

    preference_beta: float = Field(default=0.1, gt=0.0)
    """Strength of the pull towards the initial weights. 0.1 as in DPO. Raise it if the policy forgets."""
    preference_logprobs: Literal["sum", "mean"] = "sum"
    """Log-prob of an answer. sum: the sum over its tokens, as in the papers. mean: the mean over its tokens (TRL's IPO,
    length-normalised DPO). With mean, multiply `preference_beta` by about the answers' length."""

    @property
    def keeps_reference(self) -> bool:
        return True
