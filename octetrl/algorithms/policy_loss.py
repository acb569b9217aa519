"""What every policy objective shares: the ratio's base, the importance correction, the KL term and the entropy bonus.

    loss = -w * gain + kl_coefficient * KL(policy || reference) - entropy_coefficient * entropy

`gain` is the objective's own (grpo.py, gspo.py, cispo.py, sapo.py ...), larger is better. w is the correction of base /
g (corrections.py), where g is the engine that drew the tokens and `base` (ratios.py) is what the ratio is taken
against. The entropy is that of the whole distribution at the token's place, with its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from octetrl.algorithms.corrections import correct
from octetrl.algorithms.ratios import MAX_LOG_RATIO, base_logprobs, kl_estimate
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.schema import AlgorithmConfig


class Gain(NamedTuple):
    gain_N: Tensor  # differentiable; what the policy gains by the token
    clipped_N: Tensor  # share of the token's gradient that the clip takes away; 1.0 all of it


Objective = Callable[[LossInputs, Tensor, AlgorithmConfig], Gain]  # the Tensor: base_logprobs_N


def policy_loss(inputs: LossInputs, config: AlgorithmConfig, objective: Objective) -> TokenLoss:
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
    if inputs.reference_logprobs_N is not None and config.kl_in == "loss" and config.kl_coefficient:
        kl_N = kl_estimate(inputs.logprobs_N, inputs.reference_logprobs_N, config.kl_estimator)
        loss_N = loss_N + config.kl_coefficient * inputs.kl_scale * kl_N
        metrics["kl"] = kl_N.detach()
    if config.entropy_coefficient:
        loss_N = loss_N - config.entropy_coefficient * inputs.entropy_N
    return TokenLoss(loss_N, metrics)


def correction_weights(inputs: LossInputs, config: AlgorithmConfig) -> Tensor:
    """The weights alone, [N], for their mean over the optimizer step; `logprobs_N` are those before an update."""
    assert inputs.generator_logprobs_N is not None, "a correction needs the engine's log-probs"
    base_N = base_logprobs(inputs, config.ratio_base)
    return correct(base_N, inputs.generator_logprobs_N, inputs.sequence_N, inputs.num_sequences, config).weights_N
