"""Ratios between policies, and estimators of the KL between them, token by token.

Tokens are sampled from the policy p, q is a reference, x = log p - log q (Schulman, joschu.net/blog/kl-approx):

    k1 = x                     unbiased for KL(p||q), high variance, may be negative
    k2 = x^2 / 2               biased, low variance
    k3 = exp(-x) - 1 + x       unbiased for KL(p||q), low variance, never negative

A good estimate may have a bad gradient. The gradients as a loss, through log p, on tokens sampled from p:

    k1   E[grad] = E[grad log p] = 0: no penalty, only noise
    k2   E[grad] = E[x grad log p] = grad KL(p||q): the correct gradient
    k3   E[grad] = E[(1 - q/p) grad log p] = grad KL(q||p): of the forward KL, nearly correct while p is near q

Therefore `k1` here has the value of k1 and the gradient of k2. `k2` and `k3` have their own gradients; k3 is GRPO's
published choice. `algorithm.kl_gradient` overrides this: `estimator` differentiates the estimator itself, also k1; `k2`
gives all three the gradient of k2. No estimator is corrected for tokens that another policy than p sampled.

The base of the ratio p / base is `algorithm.ratio_base`:

    auto        depends on the batch:
                - one update, samples of the same weights (policy version and precision table agree): p itself. The
                  ratio is exactly 1 with the gradient of log p. The correction handles the engine's deviation.
                - several updates: the trainer's log-probs before the first update (the proximal policy of decoupled
                  PPO, arXiv 2110.00641).
                - one update with stale samples: g. The clip bounds the distance to the policy that sampled.
    proximal    always the trainer's before the first update: the clip bounds the updates, the correction handles
                staleness
    generator   always g: the clip handles both, and the correction of base / g is 1
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import LossInputs

RatioBase = Literal["auto", "proximal", "generator"]
KLEstimator = Literal["k1", "k2", "k3"]
KLGradient = Literal["auto", "estimator", "k2"]
MAX_LOG_RATIO = 20.0  # keeps exp finite, so that the branch a clip does not take cannot give 0 * inf = NaN


def token_ratio(logprobs_N: Tensor, base_logprobs_N: Tensor) -> Tensor:
    """exp(log p - log base), float32 [N]. With base = stop(log p), on-policy: exactly 1, with the gradient of log p."""
    return (logprobs_N - base_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def kl_estimate(
    logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KLEstimator, gradient: KLGradient = "auto"
) -> Tensor:
    """The chosen estimate of KL(policy || reference) for each token, with the gradient described above."""
    difference_N = (logprobs_N - reference_logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    k2_N = difference_N.square() / 2
    if estimator == "k2":
        return k2_N
    value_N = difference_N if estimator == "k1" else torch.expm1(-difference_N) + difference_N
    if gradient == "estimator" or (gradient == "auto" and estimator == "k3"):
        return value_N
    return k2_N + (value_N - k2_N).detach()


def kl_of_ratio(log_ratio_N: Tensor, estimator: KLEstimator) -> Tensor:
    """The same estimate from log p - log reference, float32 [N], without gradient: for a KL term in the reward."""
    return kl_estimate(log_ratio_N, torch.zeros_like(log_ratio_N), estimator)


def base_logprobs(inputs: LossInputs, choice: RatioBase) -> Tensor:
    """Log-probs of the ratio's base, float32 [N], without gradient."""
    if choice != "generator":
        if inputs.proximal_logprobs_N is not None:
            return inputs.proximal_logprobs_N
        if inputs.on_policy or choice == "proximal":
            return inputs.logprobs_N.detach()
    assert inputs.generator_logprobs_N is not None, "a ratio needs the log-probs of the engine that sampled the tokens"
    return inputs.generator_logprobs_N
