"""Measures the whole GRPO step on one and more workers: on Ray, and by the embedded worker beside them.

A turn builds the workers of one precision, runs a short untimed step, then `steps` timed ones, by the verbs of a run
(workers/protocol.py). The workload is the same for every number of workers. Turns alternate, A B C C B A. The phases
are those of `octetrl bench step` (step.py); these belong to several workers:

    learn         with `learn_beside_tail`: what is left when the last answer has ended
    gather        part of publish: all workers receive the new codes, scales and other weights
    link          speed of an exchange alone, measured when the workers start
    efficiency    tokens a second and worker, compared with one worker on Ray
    over embedded time of a step of one worker on Ray, compared with the embedded worker

The first tokens and log-probs that a turn samples have a digest. It does not depend on the number of workers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.beside_tail import tail_step
from octetrl.bench.model import BenchModel
from octetrl.bench.on_workers import (
    Arm,
    BenchWorkers,
    Peaks,
    StartTeam,
    digest_of,
    measure_on,
    measured_generate,
    now,
    recipe_on,
    slowest,
)
from octetrl.bench.step import (
    DIFFERENCE,
    PhaseTimes,
    StepBench,
    code_bytes,
    rollout_groups,
    shorter,
    step_recipe,
)
from octetrl.bench.turns import take_in_turn
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe
from octetrl.records import GenerationRequest, PolicyUpdate, Sample
from octetrl.rollout.backend import SessionRecord
from octetrl.rollout.samples import to_samples
from octetrl.telemetry.metrics import MISMATCH
from octetrl.trainer.packing import pack
from octetrl.workers.local import LocalWorkers
from octetrl.workers.many.build import start_team
from octetrl.workers.many.tail import TailWorkers
from octetrl.workers.worker import Worker


@dataclass(frozen=True, slots=True)
class ClusterBench:
    """The step on several workers (`WorkersBench`)."""

    step: StepBench
    cluster: ClusterConfig
    counts: tuple[int, ...]

    @property
    def model(self) -> BenchModel:
        return self.step.model

    @property
    def precisions(self) -> tuple[str, ...]:
        return self.step.precisions

    @property
    def device(self) -> torch.device:
        return self.step.device

    def recipe(self, precision: str, workers: int) -> Recipe:
        """The recipe of one arm, on a Ray that this process is connected to."""
        recipe = recipe_on(self.cluster, step_recipe(self.step, precision), workers)
        if workers < 2 or not self.step.learn_beside_tail:
            return recipe
        rollout = recipe.rollout.model_copy(update={"learn_beside_tail": True})
        return recipe.model_copy(update={"rollout": rollout})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTimes(PhaseTimes):
    """Of several workers, of which the slowest counts; or of the embedded one."""

    gather: float  # part of publish
    received_bytes: float  # of new weights, by a worker from the others
    link_gb_per_second: float  # at which a worker receives, measured at the start; 0: nothing is exchanged
    beside_tail_share: float = 0.0  # of the tokens, trained on before the last answer had ended


@dataclass(frozen=True, slots=True)
class ClusterTurn:
    """One measurement of a precision and a number of workers."""

    precision: str
    workers: int  # 0: embedded
    steps: tuple[ClusterTimes, ...]
    peak_gb: tuple[float, ...]  # of each worker, over its steps; on a CPU the process's memory. Empty: not known
    code_bytes: int  # codes and scales of the embedded worker; 0 for the others
    digest: str  # of the first tokens and log-probs
    startup_seconds: float  # nothing -> the end of the untimed step


def measure(
    bench: ClusterBench,
    on_turn: Callable[[int, ClusterTurn], None] | None = None,
    start: StartTeam = start_team,
) -> list[ClusterTurn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each. `start`: for tests."""
    arms = product(bench.step.precisions, bench.counts)
    return take_in_turn(arms, bench.step.rounds, lambda _, arm: take_turn(bench, arm, start), on_turn)


def take_turn(bench: ClusterBench, arm: Arm, start: StartTeam) -> ClusterTurn:
    """Build, measure and end the workers of one arm."""
    measured = partial(_measured, bench, arm, time.perf_counter())
    return measure_on(bench.step.model, bench.recipe(*arm), arm[1], bench.step.device, measured, start=start)


def _measured(bench: ClusterBench, arm: Arm, began: float, workers: BenchWorkers, peaks: Peaks) -> ClusterTurn:
    steps = ClusterSteps(bench.step, workers, max(1, arm[1]), bench.recipe(*arm))
    steps.warm_up()
    up = time.perf_counter()
    peaks()  # forgets the peak so far
    times = tuple(steps.step(number) for number in range(bench.step.steps))
    worker = workers.worker if isinstance(workers, LocalWorkers) else None
    codes = code_bytes(worker.engine_model) if isinstance(worker, Worker) else 0
    return ClusterTurn(*arm, times, peaks(), codes, steps.digest, up - began)


class ClusterSteps:
    """The steps of one turn, on `count` workers."""

    def __init__(self, bench: StepBench, workers: BenchWorkers, count: int, recipe: Recipe) -> None:
        self.bench, self.workers, self._count, self._recipe = bench, workers, count, recipe
        self.algorithm = build_algorithm(GrpoConfig())
        self.digest = ""
        if workers.needs_calibration:
            workers.calibrate(bench.workload.prompts)

    def warm_up(self) -> None:
        """A step of short answers, which trains on two micro-batches a worker; and again with samples one token
        shorter. A kernel compiles once for multiples of 16 tokens and once for other numbers."""
        if not self.bench.warmup_tokens:
            return
        samples, _ = self._produce(self.bench.workload.stairs(self.bench.warmup_tokens), number=-1)
        room = 2 * self._count * self.bench.trainer.tokens_per_micro_batch
        few: list[Sample] = []
        for sample in samples:
            room -= len(sample.token_ids)
            if few and room < 0:
                break
            few.append(sample)
        for some in (few, [shorter(one) for one in few]):
            batch = pack(some, self.workers.layout, self.algorithm.token_weighting)
            self.workers.publish(self.workers.train(batch).policy_version)

    def step(self, number: int) -> ClusterTimes:
        workers = self.workers
        workers.forget_prefixes()
        began = self._now()
        update, produced, micro_batches, tokens, rollout = self._update(number)
        learnt = self._now()
        workers.publish(update.policy_version)
        ended = self._now()
        requantize, exchanged = update.metrics["time/requantize"], update.metrics
        return ClusterTimes(
            produce=produced - began,
            learn=learnt - produced - requantize,
            publish=ended - learnt + requantize,
            gather=slowest("time/gather", exchanged),
            received_bytes=exchanged.get("publish/bytes", 0.0),
            link_gb_per_second=exchanged.get("publish/link_gb_per_second", 0.0),
            calibrate=slowest("time/calibrate", exchanged),
            mismatch=update.metrics[MISMATCH],
            max_abs_diff=update.metrics[DIFFERENCE],
            compared_tokens=tokens,
            micro_batches=micro_batches,
            preemptions=rollout["rollout/preemptions"],
            capture=rollout.get("time/capture"),
            beside_tail_share=update.metrics.get("train/beside_tail_share", 0.0),
        )

    def _update(self, number: int) -> tuple[PolicyUpdate, float, int, int, dict[str, float]]:
        """The update, when the last answer had ended, micro-batches, trained tokens, and the rollout's metrics."""
        workers, requests = self.workers, self.bench.workload.requests
        if isinstance(workers, TailWorkers):
            seed = f"{self.bench.seed} {number}"
            one = tail_step(workers, self._recipe, requests, self.algorithm, seed, self._now)
            self.digest = self.digest or digest_of(one.completions)
            return one.update, one.produced, one.micro_batches, one.trained_tokens, one.rollout.named()
        samples, record = self._produce(requests, number)
        produced = self._now()
        batch = pack(samples, workers.layout, self.algorithm.token_weighting)
        tokens = sum(sum(sample.loss_mask) for sample in samples)
        return workers.train(batch), produced, len(batch.minibatches[0]), tokens, record.named()

    def _now(self) -> float:
        return now(self.workers, self.bench.device)

    def _produce(self, requests: Sequence[GenerationRequest], number: int) -> tuple[list[Sample], SessionRecord]:
        completions, record = measured_generate(self.workers, requests)
        self.digest = self.digest or digest_of(completions)
        rng = random.Random(f"{self.bench.seed} {number}")
        groups = rollout_groups(requests, completions, self.bench.group_size, rng)
        return to_samples(groups, self.algorithm), record
