"""The learning rate as a pure function of the step. A resumed run needs no state for it.

    warm-up   lr * (step + 1) / warmup_steps          the first step already has a positive rate
    after     lr * (min + (1 - min) * f(progress))    progress from 0 at the end of warm-up to 1 at total_steps
              f = 1 (constant), 1 - progress (linear), (1 + cos(pi * progress)) / 2 (cosine)

`constant` ignores min_lr_fraction.
"""

from __future__ import annotations

import math

from octetrl.config.schema import OptimizerConfig


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of update number `step` (from 0) of `total_steps`. After the end it keeps its last value."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps))
    fraction = 1.0 - progress if config.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * fraction)
