"""Measures training on one and more workers: on Ray, and by the embedded worker beside them (on_workers.py).

A turn builds the workers of one precision and trains `steps` times on the micro-batches of train.py, after one untimed
step. They are the same for every number of workers, which share them. The time is that of the verb `train` of a run:

    forward and backward of each worker's micro-batches, the sums of gradients over workers, the update, new codes, and
    the exchange of new weights (`gather`)
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch

from octetrl.bench.cluster_memory import estimated_bytes
from octetrl.bench.mix import Work, draw_work
from octetrl.bench.model import BenchModel
from octetrl.bench.on_workers import (
    Arm,
    BenchWorkers,
    Peaks,
    StartTeam,
    cluster_fields,
    compare_workers,
    measure_on,
    now,
    peak_fields,
    recipe_on,
    slowest,
)
from octetrl.bench.train import TrainBench, model_flops
from octetrl.bench.turns import Row, take_in_turn
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.cluster import ClusterConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import Fp8Config, ModelConfig, Recipe
from octetrl.workers.many.build import start_team

CALIBRATION_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ClusterTrain:
    """Training on several workers (`WorkersBench`)."""

    train: TrainBench
    cluster: ClusterConfig
    counts: tuple[int, ...]

    @property
    def model(self) -> BenchModel:
        return self.train.model

    @property
    def precisions(self) -> tuple[str, ...]:
        return self.train.precisions

    @property
    def device(self) -> torch.device:
        return self.train.device

    def recipe(self, precision: str, workers: int) -> Recipe:
        tokens, positions = self.train.trainer.tokens_per_micro_batch, self.model.spec.max_positions
        recipe = Recipe(
            model=ModelConfig(path="random", init="random", context_length=max(16, min(tokens, positions))),
            fp8=Fp8Config(**PRECISIONS[precision]),
            trainer=self.train.trainer,
            algorithm=GrpoConfig(),
            seed=self.train.seed,
            steps=self.train.steps + 1,
        )
        return recipe_on(self.cluster, recipe, workers)


@dataclass(frozen=True, slots=True)
class TrainTimes:
    """Seconds of one step."""

    train: float
    requantize: float  # part of train: new codes, and gather
    gather: float  # on the slowest worker


@dataclass(frozen=True, slots=True)
class ClusterTrainTurn:
    """One measurement of a precision and a number of workers."""

    precision: str
    workers: int  # 0: embedded
    steps: tuple[TrainTimes, ...]
    work: Work
    loss: float
    peak_gb: tuple[float, ...]  # of each worker; empty: not known
    startup_seconds: float  # nothing -> the end of the untimed step


def measure(
    plan: ClusterTrain,
    on_turn: Callable[[int, ClusterTrainTurn], None] | None = None,
    start: StartTeam = start_team,
) -> list[ClusterTrainTurn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each. `start`: for tests."""
    bench = plan.train
    arms = product(bench.precisions, plan.counts)
    return take_in_turn(arms, bench.rounds, lambda _, arm: take_turn(plan, arm, start), on_turn)


def take_turn(plan: ClusterTrain, arm: Arm, start: StartTeam) -> ClusterTrainTurn:
    """Build, measure and end the workers of one arm."""
    measured = partial(_measured, plan.train, arm, time.perf_counter())
    return measure_on(plan.model, plan.recipe(*arm), arm[1], plan.device, measured, start=start)


def _measured(bench: TrainBench, arm: Arm, began: float, workers: BenchWorkers, peaks: Peaks) -> ClusterTrainTurn:
    work = draw_work(bench.mix, bench.micro_batches, bench.trained_share, workers.layout, bench.model.spec, bench.seed)
    if workers.needs_calibration:
        workers.calibrate([work.batch.minibatches[0][0].token_ids_T[:CALIBRATION_TOKENS].tolist()])
    _, loss = _step(bench, workers, work)  # compiles, allocates
    up = now(workers, bench.device)
    peaks()  # forgets the peak so far
    times = []
    for _ in range(bench.steps):
        seconds, loss = _step(bench, workers, work)
        times.append(seconds)
    return ClusterTrainTurn(*arm, tuple(times), work, loss, peaks(), up - began)


def _step(bench: TrainBench, workers: BenchWorkers, work: Work) -> tuple[TrainTimes, float]:
    """One update, and its loss."""
    began = now(workers, bench.device)
    update = workers.train(replace(work.batch, policy_version=workers.policy_version))
    seconds = now(workers, bench.device) - began
    loss = update.metrics["loss"]
    assert math.isfinite(loss), f"the loss is {loss}"
    gather = slowest("time/gather", update.metrics)
    return TrainTimes(seconds, update.metrics["time/requantize"], gather), loss


def rows_of(plan: ClusterTrain, turns: Sequence[ClusterTrainTurn]) -> list[Row]:
    """A row for each precision and number of workers: medians over all steps; of memory the largest peak."""
    by_arm: dict[Arm, list[ClusterTrainTurn]] = {}
    for turn in turns:
        by_arm.setdefault((turn.precision, turn.workers), []).append(turn)
    rows = {arm: _row(plan, rounds) for arm, rounds in by_arm.items()}
    compare_workers(rows, ("train",))
    return list(rows.values())


def _row(plan: ClusterTrain, rounds: Sequence[ClusterTrainTurn]) -> Row:
    first, bench = rounds[0], plan.train
    work, count = first.work, max(1, first.workers)
    steps = [step for turn in rounds for step in turn.steps]
    seconds = statistics.median(step.train for step in steps)
    gather = statistics.median(step.gather for step in steps)
    flops = model_flops(bench.model.spec, work.lengths, work.trained_tokens)
    row: Row = {
        "precision": first.precision,
        **cluster_fields(plan.cluster, plan.device, first.workers),
        "workload": bench.name,
        "rounds": len(rounds),
        "steps": len(steps),
        "train/tokens": work.tokens,
        "train/trained_tokens": work.trained_tokens,
        "train/micro_batches": bench.micro_batches,
        "train/layers": bench.model.spec.num_layers,
        "train/checkpointing": bench.trainer.activation_checkpointing,
        "train/optimizer_states": bench.trainer.optimizer.states,
        "train/master": bench.trainer.optimizer.master,
        "train/gradient_sums": bench.trainer.gradients,
        "time/train": seconds,
        "train/tokens_per_second": work.tokens / seconds,
        "train/tokens_per_second_min": work.tokens / max(step.train for step in steps),
        "train/tokens_per_second_max": work.tokens / min(step.train for step in steps),
        "train/tokens_per_second_per_worker": work.tokens / seconds / count,
        "train/tflops_per_worker": flops / seconds / count / 1e12,
        "train/requantize_ms": statistics.median(step.requantize for step in steps) * 1e3,
        "train/loss": first.loss,
        "time/startup": first.startup_seconds,
        "memory/estimate_gb": estimated_bytes(plan, first.precision, first.workers) / 1e9,
    }
    if gather:
        row["train/gather_ms"] = gather * 1e3
    return row | peak_fields([turn.peak_gb for turn in rounds])
