"""What is wrong with the settings of a policy objective: corrections, KL, and options that nothing would read."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.objectives import NEED_SIBLINGS
from octetrl.config.problems import Problem
from octetrl.config.schema import Recipe

MASKS = ("token_mask", "sequence_mask", "geometric_mask", "veto")


def objective_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    named = algorithm.corrections
    if len(set(named)) < len(named) or {"tis", "sequence_tis"} <= set(named):
        text = (
            f"algorithm.corrections: {list(named)} would weigh a token twice; name each once, and tis or sequence_tis,"
            f" not both"
        )
        yield Problem(("algorithm.corrections",), text)
    useful = {"tis", "veto"} if algorithm.veto_by == "probability" else {"tis"}
    if algorithm.ratio_base == "generator" and set(named) - useful:
        text = (
            f"algorithm.corrections: {list(named)} have nothing to correct with algorithm.ratio_base: generator, which"
            f" takes the engine's log-probs for the policy's; remove them, or use auto or proximal"
        )
        yield Problem(("algorithm.corrections", "algorithm.ratio_base"), text)
    for name in ("token_mask_range", "sequence_mask_range", "geometric_mask_range"):
        low, high = getattr(algorithm, name)
        if not 0.0 <= low <= 1.0 <= high:
            text = f"algorithm.{name}: [{low}, {high}] must hold 1, where both sides agree, and begin at 0 or above"
            yield Problem((f"algorithm.{name}",), text)
    for name, off in (("kl_target", None), ("reference_every", 0), ("kl_gradient", "auto")):
        if getattr(algorithm, name) != off and algorithm.kl_coefficient == 0:
            text = (
                f"algorithm.{name}: {getattr(algorithm, name)} has no effect, there is no reference while"
                f" algorithm.kl_coefficient is 0; set that, to 0.01 say, or {name}={'null' if off is None else off}"
            )
            yield Problem((f"algorithm.{name}", "algorithm.kl_coefficient"), text)
    if algorithm.max_refills and not algorithm.drop_zero_variance:
        text = (
            f"algorithm.max_refills: {algorithm.max_refills} replaces groups that are left out, and"
            f" drop_zero_variance: false leaves none out; set it to true, or max_refills: 0"
        )
        yield Problem(("algorithm.max_refills", "algorithm.drop_zero_variance"), text)
    yield from _masking_problems(recipe)
    yield from _kl_problems(recipe)
    if algorithm.preference_logprobs != "sum":
        text = (
            f"algorithm.preference_logprobs: '{algorithm.preference_logprobs}' has no effect with {algorithm.name}; use"
            f" dpo or ipo, or leave it out"
        )
        yield Problem(("algorithm.preference_logprobs", "algorithm.name"), text)
    if algorithm.rloo_ratio == "sequence":
        yield from _whole_answer_problems(recipe)


def _masking_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    if algorithm.veto_by == "ratio" and "veto" not in algorithm.corrections:
        text = "algorithm.veto_by: 'ratio' has no effect without veto in algorithm.corrections; add it, or leave it out"
        yield Problem(("algorithm.veto_by", "algorithm.corrections"), text)
    if algorithm.masked_tokens == "left_out" and not set(MASKS) & set(algorithm.corrections):
        text = (
            f"algorithm.masked_tokens: 'left_out' has no effect while algorithm.corrections mask nothing; add one of"
            f" {', '.join(MASKS)}, or use in_denominator"
        )
        yield Problem(("algorithm.masked_tokens", "algorithm.corrections"), text)


def _kl_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    if algorithm.kl_gradient != "auto" and algorithm.kl_in != "loss":
        text = (
            f"algorithm.kl_gradient: '{algorithm.kl_gradient}' has no effect with algorithm.kl_in: {algorithm.kl_in},"
            f" which differentiates no KL; use kl_in: loss, or kl_gradient: auto"
        )
        yield Problem(("algorithm.kl_gradient", "algorithm.kl_in"), text)
    if algorithm.kl_in != "reward_before_baseline":
        return
    if algorithm.name not in NEED_SIBLINGS:
        text = (
            f"algorithm.kl_in: 'reward_before_baseline' needs a baseline of siblings, and {algorithm.name} has none;"
            f" use reward or loss"
        )
        yield Problem(("algorithm.kl_in", "algorithm.name"), text)
    if algorithm.kl_coefficient == 0:
        text = (
            "algorithm.kl_in: 'reward_before_baseline' has no effect, there is no reference while"
            " algorithm.kl_coefficient is 0; set that, to 0.01 say, or kl_in=loss"
        )
        yield Problem(("algorithm.kl_in", "algorithm.kl_coefficient"), text)
    if algorithm.overlong == "mask":
        text = (
            "algorithm.overlong: 'mask' leaves answers out of training, so their KL is not known to the baseline of"
            " algorithm.kl_in: reward_before_baseline; use keep, or kl_in: reward"
        )
        yield Problem(("algorithm.overlong", "algorithm.kl_in"), text)


def _whole_answer_problems(recipe: Recipe) -> Iterator[Problem]:
    algorithm = recipe.algorithm
    if algorithm.name != "rloo":
        text = f"algorithm.rloo_ratio: 'sequence' has no effect with {algorithm.name}; use rloo, or rloo_ratio: token"
        yield Problem(("algorithm.rloo_ratio", "algorithm.name"), text)
        return
    if algorithm.token_weighting != "constant":
        text = (
            f"algorithm.token_weighting: '{algorithm.token_weighting}' would divide the gain of a whole answer by its"
            f" length; with algorithm.rloo_ratio: sequence use constant"
        )
        yield Problem(("algorithm.token_weighting", "algorithm.rloo_ratio"), text)
    if algorithm.kl_in == "reward" and algorithm.kl_coefficient > 0:
        text = (
            "algorithm.kl_in: 'reward' charges each token for its own KL, and algorithm.rloo_ratio: sequence has one"
            " advantage an answer; use reward_before_baseline or loss"
        )
        yield Problem(("algorithm.kl_in", "algorithm.rloo_ratio"), text)
