"""The common part of all policy objectives: ratio base, importance correction, KL term and entropy bonus.

    loss = -w * gain + kl_coefficient * KL(policy || reference) - entropy_coefficient * entropy

`gain` is defined by the objective (grpo.py, gspo.py, cispo.py, sapo.py ...); larger is better. w is the correction of
base / g (corrections.py). g is the engine that sampled the tokens, and `base` (ratios.py) is the denominator of the
ratio. The entropy is that of the whole distribution at the token's position, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from octetrl.algorithms.corrections import Correction, correct
from octetrl.algorithms.ratios import MAX_LOG_RATIO, base_logprobs, kl_estimate
from octetrl.algorithms.sequences import sequence_mean
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.objective_settings import KlSettings, PolicyLossSettings, TokenWeightingSettings


class Gain(NamedTuple):
    gain_N: Tensor  # differentiable; the objective's value of the token
    clipped_N: Tensor  # share of the token's gradient that the clip removes; 1.0: all of it


Config = TypeVar("Config", bound=PolicyLossSettings)
Objective = Callable[[LossInputs, Tensor, Config], Gain]  # the Tensor: base_logprobs_N


def policy_loss(inputs: LossInputs, config: Config, objective: Objective[Config]) -> TokenLoss:
    """Per-token loss [N] and its metrics. `inputs` must have `generator_logprobs_N`."""
    generator_N = inputs.generator_logprobs_N
    assert generator_N is not None, f"{config.name} needs the log-probs of the engine that sampled the tokens"
    base_N = base_logprobs(inputs, config.ratio_base)
    gain = objective(inputs, base_N, config)
    correction = correct(base_N, generator_N, inputs.sequence_N, inputs.num_sequences, config)
    weights_N = correction.weights_N
    if inputs.mean_weight is not None:  # with a kept share, the mean over the tokens that stay
        over_kept = inputs.mean_weight if inputs.kept_share is None else inputs.mean_weight / inputs.kept_share
        weights_N = weights_N / over_kept
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
        loss_N = loss_N * _counted(correction, inputs, config)
        if _token_weighting(config) != "constant":  # its denominator is fixed
            loss_N = loss_N / inputs.kept_share
    return TokenLoss(loss_N, metrics)


def step_means(config: PolicyLossSettings) -> dict[str, Callable[[LossInputs], Tensor]]:
    """Means over the optimizer step that the loss needs: field of LossInputs -> function of the values [N].

    The functions receive the log-probs before the update.
    """

    leaves_out = config.masked_tokens == "left_out"

    def corrected(inputs: LossInputs) -> Correction:
        assert inputs.generator_logprobs_N is not None, "a correction needs the engine's log-probs"
        base_N = base_logprobs(inputs, config.ratio_base)
        return correct(base_N, inputs.generator_logprobs_N, inputs.sequence_N, inputs.num_sequences, config)

    def kept_share(inputs: LossInputs) -> Tensor:
        return _counted(corrected(inputs), inputs, config)

    def mean_weight(inputs: LossInputs) -> Tensor:
        weights_N = corrected(inputs).weights_N
        return weights_N * kept_share(inputs) if leaves_out else weights_N

    means: dict[str, Callable[[LossInputs], Tensor]] = {}
    if "self_normalize" in config.corrections:
        means["mean_weight"] = mean_weight
    if leaves_out:
        means["kept_share"] = kept_share
    return means


def _counted(correction: Correction, inputs: LossInputs, config: PolicyLossSettings) -> Tensor:
    """The factor of each token's weight with `masked_tokens: left_out`, [N]; 0 where a mask leaves it out.

    It is 1 for the others. With `token_weighting: sequence` it is n / k in an answer of n tokens of which k stay. Its
    weights 1 / n then become 1 / k, so every answer with a token that stays counts the same.
    """
    kept_N = correction.kept_N
    if _token_weighting(config) != "sequence":
        return kept_N
    share_N = sequence_mean(kept_N, inputs.sequence_N, inputs.num_sequences)[inputs.sequence_N]
    return torch.where(kept_N > 0, kept_N / share_N, kept_N)


def _token_weighting(config: PolicyLossSettings) -> str:
    assert isinstance(config, TokenWeightingSettings), f"{config.name} has no token weighting"
    return config.token_weighting
