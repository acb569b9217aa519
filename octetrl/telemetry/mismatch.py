"""Measures the difference between the trainer's and the engine's log-probs under the same weights, and limits it.

With g the engine's and p the trainer's log-prob of a trained token, over the N trained tokens of a step whose p was
taken before the step's first update: all of them, but in a step of several updates whose objective needs no p itself.

    mismatch/tokens                  N
    mismatch/token_mult_prob_error   mean exp(|g - p|)                 < 1.03 in health
    mismatch/gen_kl                  mean exp(p - g) - (p - g) - 1     < 1e-3
    mismatch/max_abs_diff            max |g - p|
    mismatch/importance_ratio        mean exp(p - g)                   1 ± 0.01
    mismatch/equal_fraction          share of tokens with g == p, to the bit
    mismatch/unequal_tokens          how many differ; only where parity promises that none does

and the first two again by decile of the token's position in its sequence (`mismatch/decile_0/...` is the first tenth):
an error that grows along the sequence comes through the KV cache, one that is flat comes from the linears. A decile
without tokens is left out. Sums are taken in float64, so the metrics themselves add no error.

The importance correction of the loss makes up for a small mismatch; `MismatchGate` says when it is no longer small.
Where parity is promised (fp8/parity.py) the log-probs of on-policy samples are equal. A single token that differs is a
fault of an op, however small the difference. It ends the run, unless `mismatch.fail_on_difference` is false.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from octetrl.config.errors import RunFailed
from octetrl.config.schema import MismatchConfig

GATED = "mismatch/token_mult_prob_error"
UNEQUAL = "mismatch/unequal_tokens"
DECILES = 10


def mismatch_metrics(
    generator_logprobs_N: Tensor,
    trainer_logprobs_N: Tensor,
    positions_N: Tensor,
    sequence_lengths_N: Tensor,
    *,
    equality_is_promised: bool = False,
) -> dict[str, float]:
    """All metrics above, from the log-probs of N trained tokens, the position of each in its sequence and the length
    of that sequence (tokens). Any device; one host synchronisation. Without tokens there is nothing to say: {}."""
    if generator_logprobs_N.numel() == 0:
        return {}
    difference_N = trainer_logprobs_N.double() - generator_logprobs_N.double()
    error_N = difference_N.abs().exp()
    kl_N = difference_N.expm1() - difference_N
    decile_N = (positions_N.long() * DECILES // sequence_lengths_N.long()).clamp(0, DECILES - 1)
    zeros = error_N.new_zeros(DECILES)
    count_by_decile = zeros.scatter_add(0, decile_N, torch.ones_like(error_N))
    error_by_decile = zeros.scatter_add(0, decile_N, error_N)
    kl_by_decile = zeros.scatter_add(0, decile_N, kl_N)
    overall = torch.stack(
        [
            error_N.mean(),
            kl_N.mean(),
            difference_N.abs().max(),
            difference_N.exp().mean(),
            (difference_N == 0).double().mean(),
            (difference_N != 0).double().sum(),
        ]
    )
    numbers = torch.cat([overall, count_by_decile, error_by_decile, kl_by_decile]).tolist()
    names = ("token_mult_prob_error", "gen_kl", "max_abs_diff", "importance_ratio", "equal_fraction", "unequal_tokens")
    metrics = {f"mismatch/{name}": value for name, value in zip(names, numbers, strict=False)}
    metrics["mismatch/tokens"] = float(generator_logprobs_N.numel())
    if not equality_is_promised:
        del metrics[UNEQUAL]
    counts, errors, kls = (numbers[len(names) + DECILES * part :][:DECILES] for part in range(3))
    for decile, (count, error, kl) in enumerate(zip(counts, errors, kls, strict=True)):
        if count:
            metrics[f"mismatch/decile_{decile}/token_mult_prob_error"] = error / count
            metrics[f"mismatch/decile_{decile}/gen_kl"] = kl / count
    return metrics


class MismatchError(RunFailed):
    """The run was stopped because the trainer no longer sees the policy that the engine sampled from."""


class MismatchGate:
    """Looks at each step's mismatch: advice above `warn_above`, the end of the run above `fail_above`; and at tokens
    that parity promised to be equal and are not."""

    def __init__(self, config: MismatchConfig) -> None:
        self._config = config

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """A warning to show, or None. Raises MismatchError above `mismatch.fail_above`, or when the value is NaN and
        a limit is set, or for a token that differs although parity was promised, unless `mismatch.fail_on_difference`
        is false. A step that measured no mismatch (SFT, no trained tokens) passes."""
        if GATED not in metrics:
            return None
        value, limit = metrics[GATED], self._config.fail_above
        if limit is not None and not value <= limit:
            raise MismatchError(
                f"step {step}: {GATED} is {value:.4f}, above mismatch.fail_above={limit}; stopped before more steps are"
                f" learnt from the wrong log-probs. {advice(metrics)}"
            )
        said = []
        if not value <= self._config.warn_above:
            said.append(
                f"step {step}: {GATED} is {value:.4f}, above mismatch.warn_above={self._config.warn_above}."
                f" {advice(metrics)}"
            )
        if metrics.get(UNEQUAL, 0.0) > 0:
            broken = broken_parity(step, metrics)
            if self._config.fail_on_difference is not False:
                raise MismatchError(f"{broken}; mismatch.fail_on_difference: false goes on with a warning")
            said.append(broken)
        return " ".join(said) or None


def broken_parity(step: int, metrics: Mapping[str, float]) -> str:
    """How many log-probs differ that should not, and who can tell why."""
    return (
        f"step {step}: parity is promised, and {metrics[UNEQUAL]:,.0f} trained tokens"
        f" ({1 - metrics['mismatch/equal_fraction']:.2%}) have another log-prob in the trainer than in the engine, by"
        f" up to {metrics['mismatch/max_abs_diff']:.2e}: `octetrl doctor RECIPE` names the first op whose bits differ"
    )


def advice(metrics: Mapping[str, float]) -> str:
    """Where to look first, from the other metrics of the step."""
    saturation = metrics.get("fp8/kv_saturation", 0.0)
    errors = [metrics[name] for name in _decile_names() if name in metrics]
    if saturation > 0:
        return f"{saturation:.2%} of K and V were clamped: raise fp8.calibration_margin, or use fp8.kv_cache=dynamic."
    if len(errors) > 1 and errors[-1] - 1 > 2 * (errors[0] - 1):
        return (
            "It grows along the sequence, so look at the KV cache: fp8.kv_replay=true, fp8.calibration=exact,"
            " or fp8.kv_cache=none to compare."
        )
    return (
        "It does not grow along the sequence, so look at the linears: the same FP8 on both sides (precision=fp8),"
        " fp8.bf16_last_layers or fp8.ignore for sensitive ones, and precision=bf16 to compare."
    )


def _decile_names() -> list[str]:
    return [f"mismatch/decile_{decile}/token_mult_prob_error" for decile in range(DECILES)]
