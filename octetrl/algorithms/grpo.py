"""GRPO's loss of one token (DeepSeekMath, arXiv 2402.03300), with DAPO's asymmetric clip (arXiv 2503.14476).

    loss = -w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A) + kl_coefficient * KL(policy || reference)

    ratio = p / base      w = the importance correction of base / g      g: the engine that drew the token

`base` is what the ratio is taken against:
- on-policy: p itself, so the ratio is exactly 1 and carries the gradient of log p; w is left to mend numerics alone;
- several updates a batch: the trainer's log-probs before the first (decoupled PPO's proximal policy, arXiv 2110.00641);
- stale samples and one update: g. The clip bounds the distance to the policy that drew, w is 1: nothing counts twice.
"""

from __future__ import annotations

from octetrl.algorithms.corrections import importance_correction
from octetrl.algorithms.ratios import kl_estimate, token_ratio
from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.schema import AlgorithmConfig


def grpo_loss(inputs: LossInputs, config: AlgorithmConfig) -> TokenLoss:
    """Per-token loss [N] and its metrics; `inputs.generator_logprobs_N` is required."""
    generator_N = inputs.generator_logprobs_N
    assert generator_N is not None, "GRPO needs the log-probs of the engine that drew the tokens"
    if inputs.on_policy:
        base_N = inputs.logprobs_N.detach()
    elif inputs.proximal_logprobs_N is not None:
        base_N = inputs.proximal_logprobs_N
    else:
        base_N = generator_N

    advantages_N = inputs.advantages_N
    ratio_N = token_ratio(inputs.logprobs_N, base_N)
    clipped_N = ratio_N.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    correction = importance_correction(base_N, generator_N, config.correction, config.correction_cap)
    gain_N = (ratio_N * advantages_N).minimum(clipped_N * advantages_N)
    loss_N = -correction.weights_N * gain_N
    metrics = {
        "ratio/clip_fraction": (clipped_N * advantages_N < ratio_N * advantages_N).float(),
        "correction/clip_fraction": correction.clipped_N,
        "correction/mean_weight": correction.weights_N,
    }
    if inputs.reference_logprobs_N is not None:
        kl_N = kl_estimate(inputs.logprobs_N, inputs.reference_logprobs_N, config.kl_estimator)
        loss_N = loss_N + config.kl_coefficient * kl_N
        metrics["kl"] = kl_N.detach()
    return TokenLoss(loss_N, metrics)
