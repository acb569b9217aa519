"""Measures the whole GRPO step on one and more workers: on Ray, and by the embedded worker beside them.

A turn builds the workers of one precision, runs a short untimed step, then `steps` timed ones, by the verbs of a run
(workers/protocol.py). The workload is the same for every number of workers. Turns alternate, A B C C B A. The phases
are those of `octetrl bench step` (step.py); these belong to several workers:

    gather        part of publish: all workers receive the new codes, scales and other weights
    efficiency    tokens a second and worker, compared with one worker on Ray
    over embedded time of a step of one worker on Ray, compared with the embedded worker

The first tokens and log-probs that a turn samples have a digest. It does not depend on the number of workers.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.rollout import give_memory_back, tokenizer_of
from octetrl.bench.step import (
    DIFFERENCE,
    MISMATCH,
    StepBench,
    build_worker,
    code_bytes,
    rollout_groups,
    shorter,
    step_recipe,
)
from octetrl.bench.turns import take_in_turn
from octetrl.bench.worker import hosted_bench_worker
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.cluster import ClusterConfig
from octetrl.config.errors import UserError
from octetrl.config.schema import Numerics, Recipe
from octetrl.engine.admission import Admission
from octetrl.engine.stopping import decoder_of
from octetrl.records import Completion, GenerationRequest, Sample
from octetrl.rollout.samples import to_samples
from octetrl.telemetry.console import Console
from octetrl.telemetry.spans import Spans
from octetrl.trainer.packing import pack
from octetrl.workers.local import LocalWorkers
from octetrl.workers.many.balance import Costs
from octetrl.workers.many.build import start_team
from octetrl.workers.many.deadlines import Deadlines
from octetrl.workers.many.team import Team
from octetrl.workers.many.workers import ManyWorkers
from octetrl.workers.worker import Worker

EMBEDDED = 0  # workers: one, in this process
StartTeam = Callable[..., Team]
Arm = tuple[str, Numerics, int]  # precision, numerics, workers


@dataclass(frozen=True, slots=True)
class ClusterBench:
    """What is measured on how many workers. `cluster`: with the largest number, and the Ray cluster to use."""

    step: StepBench
    cluster: ClusterConfig
    counts: tuple[int, ...]

    def recipe(self, precision: str, numerics: Numerics, workers: int) -> Recipe:
        """The recipe of one arm, on a Ray that this process is connected to."""
        recipe = step_recipe(self.step, precision, numerics)
        if workers == EMBEDDED:
            return recipe
        kind = "cpus" if self.cluster.cpus is not None else "gpus"
        return recipe.model_copy(update={"cluster": self.cluster.model_copy(update={kind: workers, "address": "auto"})})


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """Seconds and counts of one step."""

    produce: float
    learn: float
    publish: float
    gather: float  # part of publish, on the slowest worker
    received_bytes: float  # of new weights, by a worker from the others
    calibrate: float  # part of learn
    mismatch: float
    max_abs_diff: float  # of log-probs, engine to trainer
    compared_tokens: int
    micro_batches: int
    preemptions: float

    @property
    def total(self) -> float:
        return self.produce + self.learn + self.publish


@dataclass(frozen=True, slots=True)
class ClusterTurn:
    """One measurement of a precision, a kind of numerics and a number of workers."""

    precision: str
    numerics: Numerics
    workers: int  # 0: embedded
    steps: tuple[ClusterTimes, ...]
    peak_gb: tuple[float, ...]  # of each worker, over its steps; on a CPU the process's memory. Empty: not known
    code_bytes: int  # codes and scales of the embedded worker; 0 for the others
    digest: str  # of the first tokens and log-probs
    startup_seconds: float  # nothing -> the end of the untimed step


@contextmanager
def connected(cluster: ClusterConfig) -> Iterator[None]:
    """A Ray for all turns: started here, or the one at `cluster.address`. Raises UserError."""
    if find_spec("ray") is None:
        raise UserError("--gpus, --cpus: workers need Ray; pip install 'octetrl[ray]'")
    from octetrl.workers.ray_cluster import connect

    ray = connect(cluster.model_copy(update={"address": cluster.address or "local"}), None)
    try:
        yield
    finally:
        ray.close()


def measure(
    bench: ClusterBench,
    on_turn: Callable[[int, ClusterTurn], None] | None = None,
    start: StartTeam = start_team,
) -> list[ClusterTurn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each. `start`: for tests."""
    arms = product(bench.step.precisions, bench.step.numerics, bench.counts)
    return take_in_turn(arms, bench.step.rounds, lambda _, arm: take_turn(bench, arm, start), on_turn)


def take_turn(bench: ClusterBench, arm: Arm, start: StartTeam) -> ClusterTurn:
    """Build, measure and end the workers of one arm."""
    if arm[2] == EMBEDDED:
        return _take_embedded(bench, arm)
    began, recipe, step = time.perf_counter(), bench.recipe(*arm), bench.step
    deadlines = Deadlines(recipe.cluster.deadlines)
    team = start(recipe, None, deadlines, trains=True, build=partial(hosted_bench_worker, step.model))
    try:
        admission = Admission(
            vocab_size=step.model.spec.vocab_size,
            context_length=recipe.model.context_length,
            eos_token_ids=frozenset(step.model.spec.eos_token_ids),
            decode=decoder_of(tokenizer_of(step.model)),
        )
        console = Console("quiet", recipe.steps)
        workers = ManyWorkers(team, Costs.of(step.model.spec), deadlines, console, Spans(), admission)
        return _measured(bench, arm, workers, began, lambda: _peaks(team, on_gpu=bool(recipe.cluster.num_gpus)))
    finally:
        team.close()


def _peaks(team: Team, *, on_gpu: bool) -> tuple[float, ...]:
    """GB of each worker: the peak of its GPU since the last call, or the process's memory now."""
    if on_gpu:
        return tuple(one["memory/peak_gb"] for one in team.ask("state", "memory_metrics"))
    return tuple(status.memory_gb for status in team.ask("state", "status"))


def _own_peak(worker: Worker) -> tuple[float, ...]:
    return tuple(worker.memory_metrics().values())


def _take_embedded(bench: ClusterBench, arm: Arm) -> ClusterTurn:
    began, (precision, numerics, _) = time.perf_counter(), arm
    worker = build_worker(bench.step, precision, numerics)
    workers = LocalWorkers(worker, Console("quiet", 1))
    turn = _measured(bench, arm, workers, began, partial(_own_peak, worker))
    turn = replace(turn, code_bytes=code_bytes(worker.engine_model))
    worker.engine.sleep()
    del worker, workers
    give_memory_back(bench.step.device)
    return turn


def _measured(
    bench: ClusterBench,
    arm: Arm,
    workers: ManyWorkers | LocalWorkers,
    began: float,
    peaks: Callable[[], tuple[float, ...]],
) -> ClusterTurn:
    steps = ClusterSteps(bench.step, workers, max(1, arm[2]), waits=arm[2] == EMBEDDED)
    steps.warm_up()
    up = time.perf_counter()
    peaks()  # forgets the peak so far
    times = tuple(steps.step(number) for number in range(bench.step.steps))
    return ClusterTurn(*arm, times, peaks(), 0, steps.digest, up - began)


class ClusterSteps:
    """The steps of one turn. `waits`: the device is this process's, so that a phase ends when its work does."""

    def __init__(self, bench: StepBench, workers: ManyWorkers | LocalWorkers, count: int, *, waits: bool) -> None:
        self.bench, self.workers, self._count = bench, workers, count
        self._waits = waits and bench.device.type == "cuda"
        self.algorithm = build_algorithm(GrpoConfig())
        self.digest = ""
        if workers.needs_calibration:
            workers.calibrate([request.prompt_token_ids for request in bench.workload.requests[:: bench.group_size]])

    def warm_up(self) -> None:
        """A step of short answers, which trains on two micro-batches a worker; and again with samples one token
        shorter. A kernel compiles once for multiples of 16 tokens and once for other numbers."""
        if not self.bench.warmup_tokens:
            return
        samples = self._produce(self.bench.workload.cut(self.bench.warmup_tokens), number=-1)
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
        workers.time_metrics()  # forgets what was before
        began = self._now()
        samples = self._produce(self.bench.workload.requests, number)
        produced = self._now()
        batch = pack(samples, workers.layout, self.algorithm.token_weighting)
        update = workers.train(batch)
        learnt = self._now()
        workers.publish(update.policy_version)
        ended = self._now()
        requantize, exchanged = update.metrics["time/requantize"], workers.time_metrics()
        return ClusterTimes(
            produce=produced - began,
            learn=learnt - produced - requantize,
            publish=ended - learnt + requantize,
            gather=_slowest("time/gather", exchanged),
            received_bytes=exchanged.get("publish/bytes", 0.0),
            calibrate=_slowest("time/calibrate", exchanged),
            mismatch=update.metrics[MISMATCH],
            max_abs_diff=update.metrics[DIFFERENCE],
            compared_tokens=sum(sum(sample.loss_mask) for sample in samples),
            micro_batches=len(batch.minibatches[0]),
            preemptions=workers.rollout_metrics()["rollout/preemptions"],
        )

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self.bench.device)
        return time.perf_counter()

    def _produce(self, requests: Sequence[GenerationRequest], number: int) -> list[Sample]:
        completions = self.workers.generate(requests)
        self.digest = self.digest or _digest(completions)
        rng = random.Random(f"{self.bench.seed} {number}")
        return to_samples(rollout_groups(requests, completions, self.bench.group_size, rng), self.algorithm)


def _slowest(name: str, metrics: dict[str, Any]) -> float:
    return max((value for key, value in metrics.items() if key.startswith(f"{name}/worker_")), default=0.0)


def _digest(completions: Sequence[Sequence[Completion]]) -> str:
    drawn = repr([(one.token_ids, one.logprobs) for siblings in completions for one in siblings])
    return hashlib.sha256(drawn.encode()).hexdigest()[:16]
