"""Settings that several objectives share, one small class for each idea.

`config/algorithm.py` composes an objective's section from them, so a section lists only what its objective reads. Each
class also checks its own fields (`problems`). A default here is GRPO's; an objective with another default repeats the
field in its own section.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from octetrl.config.section import Fraction, Problem, Section

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
    """What the sections of all objectives have in common."""

    learns_from: ClassVar[LearnsFrom] = "rollouts"  # what a step begins with
    needs_siblings: ClassVar[bool] = False  # a rollout is compared with others of its prompt

    name: str
    """The objective. docs/algorithms.md compares them and lists the fields of each."""

    @property
    def keeps_reference(self) -> bool:
        """Whether a frozen copy of the policy stays in memory."""
        return False

    def problems(self) -> Iterator[Problem]:
        """Fields of this section that cannot stand together."""
        yield from ()


class TokenWeightingSettings(AlgorithmConfig):
    token_weighting: Weighting = "token"
    """How much a trained token counts in the loss. `token`: all tokens count the same (DAPO). `sequence`: all samples
    count the same (GRPO as published). `constant`: the sum over a sample is divided by `constant_length` (Dr.GRPO).
    Change it to compare with another library."""
    constant_length: int = Field(default=1024, ge=1, le=1 << 24)
    """Tokens; the divisor of `token_weighting: constant`, commonly `rollout.max_new_tokens`. It scales the loss, so
    with clipped gradients it matters little."""


class OverlongSettings(AlgorithmConfig):
    overlong: Literal["keep", "mask"] = "keep"
    """Answers that were cut at `max_new_tokens`, and conversations that ran out of turns or context. `keep`: learnt
    from like others. `mask`: counted in the baseline, not trained on (DAPO). Mask them when many good answers are
    cut."""


class LengthPenaltySettings(AlgorithmConfig):
    overlong_buffer: Fraction = 0.0
    """Last share of `max_new_tokens` in which an answer loses reward with its length, up to 1 at the limit (DAPO's
    soft overlong punishment). 0: no penalty. Set 0.1 to 0.2 when answers grow up to the limit."""


class GroupFilterSettings(AlgorithmConfig):
    drop_zero_variance: bool = True
    """Leave out, and count, groups whose rewards are all equal: their advantages are 0 (DAPO). Set false to keep the
    number of trained groups constant."""
    max_refills: Refills = 0
    """Dynamic sampling (DAPO): at most so many further draws a step, until `rollout.prompts_per_step` groups are kept.
    0: one draw. Raise it when `rollout/kept_groups` is low."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        if self.max_refills and not self.drop_zero_variance:
            text = (
                f"algorithm.max_refills: {self.max_refills} replaces groups that are left out, and"
                f" drop_zero_variance: false leaves none out; set it to true, or max_refills: 0"
            )
            yield Problem(("algorithm.max_refills", "algorithm.drop_zero_variance"), text)


class NormalizationSettings(AlgorithmConfig):
    normalize_advantages: bool = True
    """Divide advantages by their standard deviation: over the group (GRPO), over the batch's tokens (PPO). Dr.GRPO
    sets false, so that groups which are nearly all right or wrong do not weigh more."""


class KlSettings(AlgorithmConfig):
    """The distance to a reference policy: the weights that the run began with, or later ones (`reference_every`)."""

    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy. 0: no KL, and no reference model in memory. Set 0.001 to 0.05 when the
    policy drifts from what it should keep."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of a token's KL, in nats (Schulman; algorithms/ratios.py says how they differ). Change it to compare
    with another library."""
    kl_gradient: Literal["auto", "estimator", "k2"] = "auto"
    """Gradient of the KL in the loss. auto: k1 has k2's gradient, k2 and k3 their own. estimator: each its own, so
    k1's is zero in expectation (verl's k1). k2: k2's, whatever the estimator (verl's k1+ and k3+)."""
    kl_in: KlPlace = "loss"
    """`loss`: each token's KL, differentiated. `reward`: each token is charged for the KL of itself and all that follow
    it, after the baseline. `reward_before_baseline`: the KL of a whole answer is taken from its reward, then siblings
    are compared (RLOO in TRL, use_kl_in_reward in verl). Both kinds of reward need one more forward where there is one
    update."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Nats a token. The coefficient is adapted towards this KL, by 2% a step at most (arXiv 1909.08593). None: the
    coefficient is fixed. Set it when no fixed coefficient suits the whole run."""
    reference_every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Steps after which the reference becomes the present policy. 0: never. Set it for long runs that should leave
    the initial weights slowly."""

    @property
    def keeps_reference(self) -> bool:
        return self.kl_coefficient > 0

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        for name, off in (("kl_target", None), ("reference_every", 0), ("kl_gradient", "auto")):
            if getattr(self, name) != off and self.kl_coefficient == 0:
                text = (
                    f"algorithm.{name}: {getattr(self, name)} has no effect, there is no reference while"
                    f" algorithm.kl_coefficient is 0; set that, to 0.01 say, or {name}={'null' if off is None else off}"
                )
                yield Problem((f"algorithm.{name}", "algorithm.kl_coefficient"), text)
        if self.kl_gradient != "auto" and self.kl_in != "loss":
            text = (
                f"algorithm.kl_gradient: '{self.kl_gradient}' has no effect with algorithm.kl_in: {self.kl_in},"
                f" which differentiates no KL; use kl_in: loss, or kl_gradient: auto"
            )
            yield Problem(("algorithm.kl_gradient", "algorithm.kl_in"), text)
        if self.kl_in == "reward_before_baseline" and not self.needs_siblings:
            text = (
                f"algorithm.kl_in: 'reward_before_baseline' needs a baseline of siblings, and {self.name} has none;"
                f" use reward or loss"
            )
            yield Problem(("algorithm.kl_in", "algorithm.name"), text)
        if self.kl_in == "reward_before_baseline" and self.kl_coefficient == 0:
            text = (
                "algorithm.kl_in: 'reward_before_baseline' has no effect, there is no reference while"
                " algorithm.kl_coefficient is 0; set that, to 0.01 say, or kl_in=loss"
            )
            yield Problem(("algorithm.kl_in", "algorithm.kl_coefficient"), text)


class CorrectionSettings(AlgorithmConfig):
    """Importance corrections between the engine that drew a token and the trainer (algorithms/corrections.py).

    p is the trainer's probability of a token, g the engine's. Bounds are read only by the correction they are for.
    """

    ratio_base: Literal["auto", "proximal", "generator"] = "auto"
    """What the ratio is taken against. auto: the policy itself where it drew the tokens and there is one update, its
    log-probs before the first of several, the engine's for stale samples. proximal: the trainer's before the first
    update, always; corrections make up for staleness. generator: the engine's, always; corrections then do nothing."""
    corrections: tuple[Correction, ...] = ("tis",)
    """Importance corrections, one upon the other. Of tokens: tis, token_mask. Of samples: sequence_tis, sequence_mask,
    geometric_mask, veto. Of the batch: self_normalize. Add a mask when `mismatch/` or stale samples disturb a run."""
    tis_cap: float = Field(default=2.0, ge=1.0)
    """Largest weight of a token (FlashRL's 2)."""
    sequence_tis_cap: float = Field(default=2.0, ge=1.0)
    """Largest weight of a sample, the product of p / g over its tokens."""
    token_mask_range: tuple[float, float] = (0.5, 5.0)
    """Tokens whose p / g is outside are left out (IcePop)."""
    sequence_mask_range: tuple[float, float] = (0.0, 3.0)
    """Samples whose product of p / g is outside are left out (MIS)."""
    geometric_mask_range: tuple[float, float] = (0.999, 1.002)
    """Samples whose geometric mean of p / g is outside are left out."""
    veto_floor: Fraction = 1e-6
    """Samples with a token below this are left out: below this probability p, or ratio p / g (`veto_by`)."""
    veto_by: Literal["probability", "ratio"] = "probability"
    """What veto compares with `veto_floor`: the trainer's probability p of a token, or the ratio p / g (verl, whose
    floors are 1e-4 to 1e-6)."""
    masked_tokens: Literal["in_denominator", "left_out"] = "in_denominator"
    """Tokens that a mask or veto leaves out. in_denominator: they count in the loss's denominator, so the others keep
    their weight, and they keep their KL and entropy terms. left_out: they count nowhere (verl); only
    `constant` keeps its denominator."""

    def problems(self) -> Iterator[Problem]:
        yield from super().problems()
        named = self.corrections
        if len(set(named)) < len(named) or {"tis", "sequence_tis"} <= set(named):
            text = (
                f"algorithm.corrections: {list(named)} would weigh a token twice; name each once, and tis or"
                f" sequence_tis, not both"
            )
            yield Problem(("algorithm.corrections",), text)
        useful = {"tis", "veto"} if self.veto_by == "probability" else {"tis"}
        if self.ratio_base == "generator" and set(named) - useful:
            text = (
                f"algorithm.corrections: {list(named)} have nothing to correct with algorithm.ratio_base: generator,"
                f" which takes the engine's log-probs for the policy's; remove them, or use auto or proximal"
            )
            yield Problem(("algorithm.corrections", "algorithm.ratio_base"), text)
        for name in ("token_mask_range", "sequence_mask_range", "geometric_mask_range"):
            low, high = getattr(self, name)
            if not 0.0 <= low <= 1.0 <= high:
                text = f"algorithm.{name}: [{low}, {high}] must hold 1, where both sides agree, and begin at 0 or above"
                yield Problem((f"algorithm.{name}",), text)
        if self.veto_by == "ratio" and "veto" not in named:
            text = "algorithm.veto_by: 'ratio' has no effect without veto in algorithm.corrections; add it, or leave it"
            yield Problem(("algorithm.veto_by", "algorithm.corrections"), text + " out")
        if self.masked_tokens == "left_out" and not set(MASKS) & set(named):
            text = (
                f"algorithm.masked_tokens: 'left_out' has no effect while algorithm.corrections mask nothing; add one"
                f" of {', '.join(MASKS)}, or use in_denominator"
            )
            yield Problem(("algorithm.masked_tokens", "algorithm.corrections"), text)


class PolicyLossSettings(CorrectionSettings):
    """What every policy loss reads (algorithms/policy_loss.py)."""

    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus, of the whole distribution at each token's place. Set 0.001 to 0.01 when `entropy`
    falls to 0 before rewards have risen."""


class ClipSettings(PolicyLossSettings):
    """The ratio p / base is clipped to [1 - clip_low, 1 + clip_high]."""

    clip_low: ClipLow = 0.2
    """How far the ratio may fall below 1 before a token's gradient is clipped (PPO's 0.2)."""
    clip_high: ClipHigh = 0.2
    """How far the ratio may rise above 1 (PPO's 0.2). 0.28 keeps more exploration (DAPO)."""


class DatasetSettings(AlgorithmConfig):
    """A step begins with rows of files instead of rollouts."""

    learns_from: ClassVar[LearnsFrom] = "conversations"

    conversations: str | None = None
    """One file or folder to learn from: short for a `data.sources` with it alone. None: `data.sources`. For the
    formats see docs/data.md."""
    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """Conversations or pairs a step. More give a steadier gradient and a longer step."""


class PreferenceSettings(DatasetSettings):
    """Pairs of a chosen and a rejected answer, compared with a reference policy."""

    learns_from: ClassVar[LearnsFrom] = "preferences"

    preference_beta: float = Field(default=0.1, gt=0.0)
    """Strength of the pull to the weights that the run began with (DPO's 0.1). Raise it when the policy forgets."""
    preference_logprobs: Literal["sum", "mean"] = "sum"
    """The log-prob of an answer: summed over its tokens as in the papers, or their mean (TRL's IPO, length-normalised
    DPO). A mean needs a `preference_beta` larger by about the answers' length."""

    @property
    def keeps_reference(self) -> bool:
        return True
