"""The learning rate as a pure function of the run's step. A resumed run needs no state for it.

    warm-up   lr * (step + 1) / warmup_steps          the first step already has a positive rate
    after     lr * (min + (1 - min) * f(progress))    progress from 0 after the warm-up to 1 at the end
              f = 1 (constant), 1 - progress (linear), (1 + cos(pi * progress)) / 2 (cosine)

The end is the last step: its rate is lr * min_lr_fraction. If min_lr_fraction is 0, the end is one step later, because
an update with the rate 0 would change nothing. Steps without an update count too. `constant` ignores min_lr_fraction.
The only step of a run has the rate lr.
"""

from __future__ import annotations

import math

from octetrl.config.schema import OptimizerConfig
from octetrl.records import PackedBatch


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of step number `step` (from 0) of `total_steps`. After the end it keeps its last value."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    end = total_steps - 1 if config.min_lr_fraction > 0 else total_steps
    rest = end - config.warmup_steps  # 0: the last step is the only one after the warm-up
    progress = min(1.0, (step - config.warmup_steps) / rest) if rest > 0 else float(rest == 0 < step)
    fraction = 1.0 - progress if config.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * fraction)


def rate_after(first: int, step: int, config: OptimizerConfig, total_steps: int) -> float | None:
    """The rate of step number `step` where the schedule begins after `first` steps; None before."""
    return None if step < first else learning_rate(step - first, config, total_steps - first)


def place_of(batch: PackedBatch, updates: int) -> int:
    """The number of steps before the batch's. `updates`: of the trainer, if the batch has no step."""
    return updates if batch.step is None else batch.step - 1
