"""The recipe's `algorithm` section: the objective and everything that shapes its loss."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from octetrl.config.objectives import LEARNS_FROM, OWN_DEFAULTS, LearnsFrom
from octetrl.config.section import Fraction, Section

Correction = Literal[
    "tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask", "veto", "self_normalize"
]  # fmt: skip


class AlgorithmConfig(Section):
    """Defaults are GRPO's; an objective's own (config/objectives.py) take their place where the recipe says nothing."""

    name: Literal[
        "grpo", "dapo", "dual_clip", "gspo", "gspo_token", "cispo", "sapo", "rloo", "reinforce_pp",
        "reinforce_pp_baseline", "ppo", "sft", "dpo", "ipo", "rft", "distill", "reward_model",
    ] = "grpo"  # fmt: skip
    """The objective; docs/algorithms.md has them in one table."""
    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    clip_high: float = Field(default=0.2, ge=0.0)
    """The ratio is clipped to [1 - clip_low, 1 + clip_high]. Own defaults: dapo 0.2 and 0.28, gspo 3e-4 and 4e-4, cispo
    1 and 4."""
    dual_clip: float = Field(default=3.0, gt=1.0)
    """dual_clip: how many times its advantage a bad token may cost at most."""
    sapo_tau_positive: float = Field(default=1.0, gt=0.0)
    sapo_tau_negative: float = Field(default=1.05, gt=0.0)
    """sapo: how fast a token fades as its ratio leaves 1, by the sign of its advantage."""
    ratio_base: Literal["auto", "proximal", "generator"] = "auto"
    """What the ratio is taken against. auto: the policy itself where it drew the tokens and there is one update, its
    log-probs before the first of several, the engine's for stale samples. proximal: the trainer's before the first
    update, always; corrections make up for staleness. generator: the engine's, always; corrections then do nothing."""
    normalize_advantages: bool = True
    """Divide by the group's standard deviation (GRPO); false is Dr.GRPO's choice."""
    token_weighting: Literal["token", "sequence", "constant"] = "token"
    """`token`: each trained token counts the same (DAPO); `sequence`: each sample does (GRPO as published); `constant`:
    a sample's tokens are summed and divided by `constant_length` (Dr.GRPO). Own defaults: gspo and sapo sequence, rloo
    constant."""
    constant_length: int = Field(default=1024, ge=1, le=1 << 24)
    """Tokens; commonly rollout.max_new_tokens. It scales the loss, so with clipped gradients it matters little."""
    drop_zero_variance: bool = True
    """Groups whose rewards are all equal teach nothing and are left out, counted. Own default: reinforce_pp false."""
    max_refills: int = Field(default=0, ge=0, le=1000)
    """Dynamic sampling: draw further prompts, at most so many times a step, until `rollout.prompts_per_step` groups are
    not left out. Own default: dapo 10."""
    overlong_buffer: Fraction = 0.0
    """Last share of max_new_tokens in which an answer loses reward with its length, up to 1 at the limit; 0: none. Own
    default: dapo 0.2."""
    overlong: Literal["keep", "mask"] = "keep"
    """Answers cut at max_new_tokens, and conversations whose turns or context ran out: learnt from like others, or
    counted in the baseline but not trained on."""
    kl_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the KL to the reference policy (the weights the run began with); 0 keeps no reference model."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """algorithms/ratios.py says how they differ. Own defaults: reinforce_pp k1, reinforce_pp_baseline k2."""
    kl_gradient: Literal["auto", "estimator", "k2"] = "auto"
    """Of the KL in the loss. auto: k1 has k2's gradient, k2 and k3 their own. estimator: each its own, so k1's is zero
    in expectation (verl's k1). k2: k2's, whatever the estimator (verl's k1+ and k3+)."""
    kl_in: Literal["loss", "reward", "reward_before_baseline"] = "loss"
    """`loss`: each token's KL, differentiated. `reward`: each token is charged for the KL of itself and all that follow
    it, after the baseline. `reward_before_baseline`: the KL of a whole answer is taken from its reward, then siblings
    are compared (RLOO in TRL, use_kl_in_reward in verl). Both kinds of reward need one more forward where there is one
    update. Own default: reinforce_pp and ppo reward."""
    kl_target: float | None = Field(default=None, gt=0.0)
    """Nats a token that the KL is steered to by adapting the coefficient, 2% a step at most; None: it is fixed."""
    reference_every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Steps after which the reference becomes the present policy; 0: it stays what the run began with."""
    entropy_coefficient: float = Field(default=0.0, ge=0.0)
    """Weight of the entropy bonus."""
    corrections: tuple[Correction, ...] = ("tis",)
    """Importance corrections between engine and trainer, one upon the other (algorithms/corrections.py). Of tokens:
    tis, token_mask. Of samples: sequence_tis, sequence_mask, geometric_mask, veto. Of the batch: self_normalize."""
    tis_cap: float = Field(default=2.0, ge=1.0)
    """Largest weight of a token."""
    sequence_tis_cap: float = Field(default=2.0, ge=1.0)
    """Largest weight of a sample, the product over its tokens."""
    token_mask_range: tuple[float, float] = (0.5, 5.0)
    """Tokens whose p / g is outside are left out."""
    sequence_mask_range: tuple[float, float] = (0.0, 3.0)
    """Samples whose product of p / g is outside are left out."""
    geometric_mask_range: tuple[float, float] = (0.999, 1.002)
    """Samples whose geometric mean of p / g is outside are left out."""
    veto_floor: Fraction = 1e-6
    """Samples with a token that the trainer finds less probable are left out."""
    veto_by: Literal["probability", "ratio"] = "probability"
    """What veto compares with `veto_floor`: the trainer's probability p of a token, or the ratio p / g (verl, whose
    floors are 1e-4 to 1e-6)."""
    masked_tokens: Literal["in_denominator", "left_out"] = "in_denominator"
    """Tokens that a mask or veto leaves out: they count in the loss's denominator, so the others keep their weight, and
    have their KL and entropy terms; or they are out of all of it, and the others weigh more (verl)."""
    rloo_ratio: Literal["token", "sequence"] = "token"
    """rloo: what is clipped, each token's ratio or the ratio of the whole answer, the product over its tokens (TRL)."""
    discount: float = Field(default=1.0, gt=0.0, le=1.0)
    """PPO: what a reward one token later is worth. Answers are short episodes: 1."""
    gae_lambda: Fraction = 0.95
    """PPO: how far advantages look past the value head: 1 waits for the outcome, 0 trusts the next value alone."""
    return_lambda: Fraction | None = None
    """PPO: the lambda of the returns that the value head is fitted to; None: `gae_lambda`. 1 fits the outcomes
    themselves, without bias, where answers are long (VAPO, arXiv 2504.05118)."""
    reward_center: float = Field(default=0.0, ge=0.0)
    """reward_model: pulls the sum of a pair's rewards towards 0 with this weight; commonly 0.01, 0 leaves it free."""
    conversations: str | None = None
    """SFT and preferences: one file or folder to learn from, short for a `data.sources` with it alone."""
    batch_size: int = Field(default=64, ge=1, le=1_000_000)
    """SFT and preferences: conversations or pairs a step."""
    preference_beta: float = Field(default=0.1, gt=0.0)
    """DPO and IPO: strength of the pull to the weights the run began with."""
    preference_logprobs: Literal["sum", "mean"] = "sum"
    """DPO and IPO: the log-prob of an answer, summed over its tokens as in the papers, or their mean (TRL's IPO;
    length-normalised DPO). A mean wants a `preference_beta` larger by about the answers' length."""
    label_smoothing: float = Field(default=0.0, ge=0.0, lt=0.5)
    """DPO: share of pairs whose label is taken to be wrong (cDPO)."""
    best_of_group: int = Field(default=1, ge=1, le=100_000)
    """RFT: how many siblings of a group are learnt from, the best first."""
    reward_threshold: float = 0.0
    """RFT: only siblings with a reward above it are."""
    teacher: str | None = None
    """distill: Hugging Face folder of the teacher, of any size, with the policy's tokenizer; required for it."""
    teacher_precision: Literal["bf16", "fp8"] = "bf16"
    """distill: of the teacher's linears."""
    distillation: Literal["sampled", "reverse_kl", "forward_kl"] = "sampled"
    """distill: the teacher's log-prob of each drawn token as its advantage, or a KL over the teacher's top-k tokens:
    reverse (the policy keeps to what the teacher would say) or forward (it covers all that the teacher might)."""
    teacher_top_k: int = Field(default=64, ge=1, le=1 << 24)
    """distill, a KL: tokens of the teacher's distribution that are told apart at each place; the rest counts as one."""

    @property
    def learns_from(self) -> LearnsFrom:
        """What a step begins with."""
        return LEARNS_FROM.get(self.name, "rollouts")

    @model_validator(mode="after")
    def _fill_own_defaults(self) -> Self:
        for name, value in OWN_DEFAULTS.get(self.name, {}).items():
            if name not in self.model_fields_set:
                self.__dict__[name] = value  # the model is frozen, and not yet anybody's
        return self
