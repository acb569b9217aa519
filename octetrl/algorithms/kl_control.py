"""Adaptive KL (arXiv 1909.08593, section 2.2): a coefficient that steers the KL to a target.

    error = clip(KL / kl_target - 1, -0.2, 0.2)
    scale <- scale * (1 + 0.1 * error)           the coefficient is kl_coefficient * scale; scale begins at 1

Once a `train` call, from its mean KL a token. It moves by at most 2% a step: tens of steps to answer, no oscillation.
Use it where the coefficient that keeps the policy near enough is not known beforehand.
"""

from __future__ import annotations

HORIZON = 0.1
LARGEST_ERROR = 0.2


def adapted_kl_scale(scale: float, kl: float, target: float) -> float:
    """The scale for the next step. `kl` and `target` are a token's, in nats."""
    error = min(max(kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return scale * (1.0 + HORIZON * error)
