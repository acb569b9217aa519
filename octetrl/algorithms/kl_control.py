"""Adaptive KL (arXiv 1909.08593, section 2.2): moves the KL coefficient until the KL is at a target.

    error = clip(KL / kl_target - 1, -0.2, 0.2)
    scale <- scale * (1 + 0.1 * error)           the coefficient is kl_coefficient * scale; scale begins at 1

It runs once per `train` call, with the mean KL of a token. The scale moves by at most 2% a step: it responds within
tens of steps and does not oscillate. Use it if a suitable coefficient is not known in advance.
"""

from __future__ import annotations

HORIZON = 0.1
LARGEST_ERROR = 0.2


def adapted_kl_scale(scale: float, kl: float, target: float) -> float:
    """The scale for the next step. `kl` and `target`: nats per token."""
    error = min(max(kl / target - 1.0, -LARGEST_ERROR), LARGEST_ERROR)
    return scale * (1.0 + HORIZON * error)
