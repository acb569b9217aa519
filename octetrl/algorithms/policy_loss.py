"""What every policy objective shares: the ratio's base, the importance correction, the KL term and the entropy bonus.

    loss = -w * gain + kl_coefficient * KL(policy || reference) - entropy_coefficient * entropy

`gain` is the objective's own (grpo.py, gspo.py, cispo.py, sapo.py ...), larger is better. w is the correction of base /
g (corrections.py), where g is the engine that drew the tokens and `base` (ratios.py) is what the ratio is taken
against. The entropy is that of the whole distribution at the token's place, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from torch import Tensor

from octetrl.algorithms.corrections import Correction, correct
from octetrl.algorithms.ratios import MAX_LOG_RATIO, base_logprobs, kl_estimate
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.objective_settings import KlSettings, PolicyLossSettings


class Gain(NamedTuple):
    gain_N: Tensor  # differentiable; what the policy gains by the token
    clipped_N: Tensor  # share of the token's gradient that the clip takes away; 1.0 all of it


Config = TypeVar("Config", bound=PolicyLossSettings)
Objective = Callable[[LossInputs, Tensor, Config], Gain]  # the Tensor: base_logprobs_N


def policy_loss(inputs: LossInputs, config: Config, objective: Objective[Config]) -> TokenLoss:
    """Per-token loss [N] and its metrics; `inputs.generator_logprobs_N` is required."""
    generator_N = inputs.generator_logprobs_N
    assert generator_N is not None, f"{config.name} needs the log-probs of the engine that drew the tokens"
    base_N = base_logprobs(inputs, config.ratio_base)
    gain = objective(inputs, base_N, config)
    correction = correct(base_N, generator_N, inputs.sequence_N, inputs.num_sequences, config)
    weights_N = correction.weights_N
    if inputs.mean_weight is not None:
        weights_N = weights_N / inputs.mean_weight
    loss_N = -weights_N * gain.gain_N
    too_far_N = (inputs.logprobs_N.detach() - base_N).abs() > MAX_LOG_RATIO
    metrics = {"ratio/clip_fraction": gain.clipped_N, "ratio/limited_fraction": too_far_N.float()}
    metrics |= correction.metrics
    reference_N = inputs.reference_logprobs_N
    if reference_N is not None and isinstance(config, KlSettings) and config.kl_in == "loss" and config.kl_coefficient:
        kl_N = kl_estimate(inputs.logprobs_N, reference_N, config.kl_estimator, config.kl_gradient)
        loss_N = loss_N + config.kl_coefficient * inputs.kl_scale * kl_N
        metrics["kl"] = kl_N.detach()
    if config.entropy_coefficient:
        loss_N = loss_N - config.entropy_coefficient * inputs.entropy_N
    if inputs.kept_share is not None:
        loss_N = loss_N * correction.kept_N / inputs.kept_share
    return TokenLoss(loss_N, metrics)


def step_means(config: PolicyLossSettings) -> dict[str, Callable[[LossInputs], Tensor]]:
    """What the loss needs the mean of over the optimizer step: fields of LossInputs and what they are means of, [N],
    with the log-probs before an update."""

    def corrected(inputs: LossInputs) -> Correction:
        assert inputs.generator_logprobs_N is not None, "a correction needs the engine's log-probs"
        base_N = base_logprobs(inputs, config.ratio_base)
        return correct(base_N, inputs.generator_logprobs_N, inputs.sequence_N, inputs.num_sequences, config)

    means: dict[str, Callable[[LossInputs], Tensor]] = {}
    if "self_normalize" in config.corrections:
        means["mean_weight"] = lambda inputs: corrected(inputs).weights_N
    if config.masked_tokens == "left_out":
        means["kept_share"] = lambda inputs: corrected(inputs).kept_N
    return means
