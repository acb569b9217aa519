"""Measure the difference between the trainer's and the engine's log-probs under the same weights, and limit it.

g is the engine's log-prob of a trained token, p the trainer's. N is the number of trained tokens whose p is from before
the step's first update. In a step with several updates, N excludes later tokens if the objective does not need their p.

    mismatch/tokens                  N
    mismatch/token_mult_prob_error   mean exp(|g - p|)                 normal: below 1.03
    mismatch/gen_kl                  mean exp(p - g) - (p - g) - 1     normal: below 1e-3
    mismatch/max_abs_diff            max |g - p|
    mismatch/importance_ratio        mean exp(p - g)                   normal: 1 ± 0.01
    mismatch/equal_fraction          share of tokens with g equal to p in every bit
    mismatch/unequal_tokens          number of other tokens; only if parity is promised, so that it must be 0

`token_mult_prob_error` and `gen_kl` are also measured by decile of the token's position in its sequence
(`mismatch/decile_0/...` is the first tenth). An error that grows along the sequence comes from the KV cache. A constant
one comes from the linears. A decile without tokens is left out. Where several versions sampled a batch
(`cluster.weights_in_flight`), `gen_kl` and `max_abs_diff` are measured by the age of the tokens as well. Sums are in
float64, so the metrics add no error.

The loss corrects a small mismatch by importance weights. `MismatchGate` reports a mismatch that is too large for that.
If parity is promised (fp8/parity.py), the log-probs of on-policy samples are equal. Then even one different token means
that an op is wrong. It ends the run, unless `mismatch.fail_on_difference` is false.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.schema import MismatchConfig
from octetrl.records import TokenLogprobs
from octetrl.system.errors import RunFailed
from octetrl.telemetry.metrics import MISMATCH, lower_staleness, stale_share

UNEQUAL, KV_SATURATION = "mismatch/unequal_tokens", "fp8/kv_saturation"
DECILES = 10
CLEARLY_WORSE = 1.1  # times the largest mismatch - 1 that was reported
NOTABLE_SATURATION = 1e-4  # share of K and V that is shown as more than 0.00%


def mismatch_of(
    logprobs: TokenLogprobs | None, policy_version: int, *, equality_is_promised: bool = False
) -> dict[str, float]:
    """All metrics of a batch, also by the age of its tokens. `policy_version`: the trainer's, before the update."""
    if logprobs is None:
        return {}
    both, places = (
        (logprobs.generator_N, logprobs.trainer_N),
        (logprobs.target_positions_N, logprobs.sequence_lengths_N),
    )
    metrics = mismatch_metrics(*both, *places, equality_is_promised=equality_is_promised)
    return metrics | mismatch_by_age(logprobs, policy_version)


def mismatch_metrics(
    generator_logprobs_N: Tensor,
    trainer_logprobs_N: Tensor,
    positions_N: Tensor,
    sequence_lengths_N: Tensor,
    *,
    equality_is_promised: bool = False,
) -> dict[str, float]:
    """Compute all metrics above. Works on any device, with one host synchronisation.

    generator_logprobs_N, trainer_logprobs_N: g and p of each trained token.
    positions_N, sequence_lengths_N: position of each token in its sequence, and that sequence's length in tokens.
    Returns {} without tokens.
    """
    if generator_logprobs_N.numel() == 0:
        return {}
    difference_N = trainer_logprobs_N.double() - generator_logprobs_N.double()
    error_N = difference_N.abs().exp()
    kl_N = kl_terms(difference_N)
    decile_N = (positions_N.long() * DECILES // sequence_lengths_N.long()).clamp(0, DECILES - 1)
    zeros = error_N.new_zeros(DECILES)
    count_by_decile = zeros.scatter_add(0, decile_N, torch.ones_like(error_N))
    error_by_decile = zeros.scatter_add(0, decile_N, error_N)
    kl_by_decile = zeros.scatter_add(0, decile_N, kl_N)
    overall = {
        "token_mult_prob_error": error_N.mean(),
        "gen_kl": kl_N.mean(),
        "max_abs_diff": difference_N.abs().max(),
        "importance_ratio": difference_N.exp().mean(),
        "equal_fraction": (difference_N == 0).double().mean(),
        "unequal_tokens": (difference_N != 0).double().sum(),
    }
    by_decile = count_by_decile, error_by_decile, kl_by_decile
    numbers = torch.cat([torch.stack([*overall.values()]), *by_decile]).tolist()
    metrics = {f"mismatch/{name}": value for name, value in zip(overall, numbers, strict=False)}
    metrics["mismatch/tokens"] = float(generator_logprobs_N.numel())
    if not equality_is_promised:
        del metrics[UNEQUAL]
    counts, errors, kls = (numbers[len(overall) + DECILES * part :][:DECILES] for part in range(3))
    for decile, (count, error, kl) in enumerate(zip(counts, errors, kls, strict=True)):
        if count:
            metrics[f"mismatch/decile_{decile}/token_mult_prob_error"] = error / count
            metrics[f"mismatch/decile_{decile}/gen_kl"] = kl / count
    return metrics


def kl_terms(difference_N: Tensor) -> Tensor:
    """Terms of `gen_kl`, from the log-probs' differences trainer - engine: e^d - 1 - d."""
    return difference_N.expm1() - difference_N


def mismatch_by_age(logprobs: TokenLogprobs, policy_version: int) -> dict[str, float]:
    """The same by the age of a token: how many versions before `policy_version`, the trainer's, sampled it.

    `mismatch/age_0/...` are tokens of the trainer's own weights. Returns {} if one version sampled the batch."""
    if logprobs.versions_N is None:
        return {}
    metrics: dict[str, float] = {}
    difference_N = logprobs.trainer_N.double() - logprobs.generator_N.double()
    for version in sorted(set(logprobs.versions_N.tolist()), reverse=True):
        of_version_n = difference_N[logprobs.versions_N == version]
        age = f"mismatch/age_{policy_version - version}"
        metrics[f"{age}/tokens"] = float(of_version_n.numel())
        metrics[f"{age}/gen_kl"] = float(kl_terms(of_version_n).mean())
        metrics[f"{age}/max_abs_diff"] = float(of_version_n.abs().max())
    return metrics


class MismatchError(RunFailed):
    """The run was stopped because trainer and engine disagree about the policy that sampled the tokens."""


class MismatchGate:
    """Checks each step's mismatch: warns above `warn_above`, and ends the run above `fail_above`.

    A run that is above `warn_above` in one step is in most, so later steps are reported only if they are clearly worse.
    It also reports log-probs that differ although parity is promised."""

    def __init__(self, config: MismatchConfig, max_staleness: int = 1) -> None:
        """max_staleness: the recipe's `cluster.max_staleness`."""
        self._config, self._max_staleness = config, max_staleness
        self._worst_reported = 0.0  # mismatch - 1

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return a warning to show, or None.

        Raises MismatchError above `mismatch.fail_above`, and for NaN if that limit is set. Raises it also for a token
        that differs although parity is promised, unless `mismatch.fail_on_difference` is false. A step without a
        measured mismatch (SFT, no trained tokens) passes."""
        if MISMATCH not in metrics:
            return None
        value, limit = metrics[MISMATCH], self._config.fail_above
        if limit is not None and not value <= limit:
            stopped, more = "stopped before more steps are trained on wrong log-probs", ""
            if stale_share(metrics):
                stopped = "stopped; it contains the change of the policy since it sampled these tokens"
                more = " Or raise mismatch.fail_above."
            raise MismatchError(
                f"step {step}: {MISMATCH} is {value:.4f}, above mismatch.fail_above={limit}; {stopped}."
                f" {self._advice(metrics)}{more}"
            )
        warnings = []
        if not value <= self._config.warn_above and not value - 1 <= CLEARLY_WORSE * self._worst_reported:
            warnings.append(self._above(step, value, metrics))
        if metrics.get(UNEQUAL, 0.0) > 0:
            broken = (
                f"step {step}: parity is promised, but the log-probs of {metrics[UNEQUAL]:,.0f} trained tokens"
                f" ({1 - metrics['mismatch/equal_fraction']:.2%}) differ between trainer and engine, by up to"
                f" {metrics['mismatch/max_abs_diff']:.2e}: `octetrl doctor RECIPE` names the first op whose bits differ"
            )
            if self._config.fail_on_difference is not False:
                raise MismatchError(f"{broken}; set mismatch.fail_on_difference: false to continue with a warning")
            warnings.append(broken)
        return " ".join(warnings) or None

    def _above(self, step: int, value: float, metrics: Mapping[str, float]) -> str:
        is_first, limit, advice = not self._worst_reported, self._config.warn_above, self._advice(metrics)
        self._worst_reported = max(self._worst_reported, value - 1)  # NaN does not replace it
        if not is_first:
            return f"step {step}: {MISMATCH} has risen to {value:.4f}, mismatch.warn_above={limit}. {advice}"
        return (
            f"step {step}: {MISMATCH} is {value:.4f}, above mismatch.warn_above={limit}. {advice} Raise"
            " mismatch.warn_above if this run may have such a mismatch. Said again only if it rises by a further"
            f" {CLEARLY_WORSE - 1:.0%}."
        )

    def _advice(self, metrics: Mapping[str, float]) -> str:
        """Where to look first, based on the other metrics of the step."""
        if stale := stale_share(metrics):
            return (
                f"{stale:.0%} of the tokens were sampled by earlier weights, so it contains the change of the policy:"
                f" {lower_staleness(self._max_staleness)}."
            )
        saturation = metrics.get(KV_SATURATION, 0.0)
        if saturation >= NOTABLE_SATURATION:
            return f"{saturation:.2%} of K and V were clamped: raise fp8.calibration_margin, or use fp8.kv_cache=int8."
        deciles = (f"mismatch/decile_{decile}/token_mult_prob_error" for decile in range(DECILES))
        errors = [metrics[name] for name in deciles if name in metrics]
        if len(errors) > 1 and errors[-1] - 1 > 2 * (errors[0] - 1):
            return (
                "It grows along the sequence, so look at the KV cache: try fp8.kv_replay=true, fp8.calibration=exact,"
                " or fp8.kv_cache=none to compare."
            )
        return (
            "It does not grow along the sequence, so look at the linears: try the same FP8 on both sides"
            " (precision=fp8), fp8.bf16_last_layers or fp8.ignore for sensitive ones, or precision=bf16 to compare."
        )


def kv_saturation_warning(metrics: Mapping[str, float], config: Fp8Config) -> str | None:
    """Return a warning if the share of K and V values clamped to ±448 exceeds `fp8.saturation_warn`, otherwise None.

    Without a measurement it returns None. Calibrated scales come from the previous step, so they may be too small for
    growing K and V."""
    share = metrics.get(KV_SATURATION)
    if share is None or share <= config.saturation_warn:
        return None
    remedy = "look for non-finite or huge activations, and use fp8.kv_cache=none to compare"
    if config.kv_cache == "calibrated":
        margin = config.calibration_margin
        exact = "" if config.calibration == "exact" else "fp8.calibration=exact (measured with the new weights) or "
        larger = f"fp8.calibration_margin={min(4.0, 1.5 * margin):.2f} (now {margin})"
        remedy = f"set {larger}, or use {exact}fp8.kv_cache=int8"
    return (
        f"{KV_SATURATION} is {share:.2%}, above fp8.saturation_warn={config.saturation_warn:.2%}: that share of K and V"
        f" was clamped in the cache; {remedy}"
    )
