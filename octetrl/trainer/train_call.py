"""The records of one call of `Trainer.train`: its optimizer steps and their sums; and the trainer's state.

L layers, K KV heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from octetrl.trainer.forward import KVReplay
from octetrl.trainer.metric_means import MetricMeans
from octetrl.trainer.prepared import PreparedMicroBatch


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The micro-batches of one optimizer step, and how their loss is computed."""

    micro_batches: Sequence[PreparedMicroBatch]  # of this worker
    kv: KVReplay
    on_policy: bool  # sampled with the current weights, and this is the only update
    denominator: float  # of the loss, from the counts of the whole step
    num_micro_batches: int  # of all workers
    most_micro_batches: int  # of one worker


@dataclass(slots=True)
class TrainCall:
    """One call of `train`, from `prepare` to `finish`."""

    steps: tuple[OptimizerStep, ...]  # of one epoch
    epochs: int
    lr: float | None  # None: only the critic is trained
    kv_amax_LS: Tensor | None  # raised by the forwards; None: not collected
    started: float  # seconds of time.perf_counter
    place: int = 0  # steps of the run before this one
    means: MetricMeans = field(default_factory=MetricMeans)
    metrics: dict[str, float] = field(default_factory=dict)  # of the whole batch, before the first update
    updates: list[dict[str, float]] = field(default_factory=list)  # of each optimizer step

    @property
    def micro_batches(self) -> Iterator[PreparedMicroBatch]:
        return (one for step in self.steps for one in step.micro_batches)


class Accumulated(NamedTuple):
    """Sums over micro-batches of an optimizer step: float32 scalars on the device."""

    loss: Tensor
    non_finite: Tensor  # count of numbers that are not finite


@dataclass(frozen=True, slots=True)
class TrainerState:
    """The complete state of the trainer. Live tensors, not copies."""

    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    policy_version: int


def check_digest(precision_digest: str | None, own: str) -> None:
    """Raise RuntimeError if the samples' precision table is not the trainer's `own`."""
    if precision_digest is not None and precision_digest != own:
        raise RuntimeError(
            f"the samples were drawn under precision table {precision_digest}, the trainer's is {own}:"
            f" build engine and trainer from one policy"
        )
