"""Measures generation on one and more workers: on Ray, and by the embedded worker beside them (on_workers.py).

A turn builds the workers of one precision, warms up on the workload's own prompts, then times one `generate` of the
whole workload, which is the same for every number of workers. A worker holds what rollouts need, and no optimizer.

    tail          share of the decode time with less than half of a worker's largest batch running
    idle          share of the time in which a worker has no request left, in the mean over workers
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from octetrl.bench.on_workers import (
    BenchWorkers,
    Peaks,
    StartTeam,
    cluster_fields,
    compare_workers,
    digest_of,
    measure_on,
    measured_generate,
    now,
    peak_fields,
    recipe_on,
)
from octetrl.bench.rollout import Bench
from octetrl.bench.turns import Row, take_in_turn
from octetrl.bench.workload import Workload, calibration_prompts
from octetrl.config.algorithm import GrpoConfig
from octetrl.config.cluster import ClusterConfig
from octetrl.config.load import PRECISIONS
from octetrl.config.schema import EngineConfig, Fp8Config, ModelConfig, Recipe, RolloutConfig
from octetrl.workers.many.build import start_team

RolloutArm = tuple[Workload, str, int]  # the last: workers


@dataclass(frozen=True, slots=True)
class ClusterRollout:
    """What is measured on how many workers. `cluster`: with the largest number, and the Ray cluster to use."""

    bench: Bench
    cluster: ClusterConfig
    counts: tuple[int, ...]

    def recipe(self, workload: Workload, precision: str, workers: int) -> Recipe:
        """The recipe of one arm."""
        bench, longest = self.bench, workload.longest
        recipe = Recipe(
            model=ModelConfig(path="random", init="random", context_length=max(16, longest.prompt + longest.answer)),
            fp8=Fp8Config(**PRECISIONS[precision]),
            rollout=RolloutConfig(
                prompts_per_step=len(workload.requests),
                max_prompt_tokens=max(prompt for prompt, _ in workload.siblings),
                max_new_tokens=max(answer for _, answer in workload.siblings),
            ),
            engine=EngineConfig(
                kv_memory_fraction=bench.kv_fraction,
                max_batch=bench.rows_of(workload),
                prefill_chunk=bench.prefill_chunk,
            ),
            algorithm=GrpoConfig(),
            seed=bench.seed,
            steps=1,
        )
        return recipe_on(self.cluster, recipe, workers)


@dataclass(frozen=True, slots=True)
class RolloutTurn:
    """One measurement of a workload, a precision and a number of workers."""

    workload: Workload
    precision: str
    workers: int  # 0: embedded
    seconds: float
    tail_share: float  # of the decode time, the mean over workers
    idle_share: float  # of the time, the mean over workers
    preemptions: int
    peak_gb: tuple[float, ...]  # of each worker; empty: not known
    digest: str  # of the tokens and log-probs
    startup_seconds: float  # nothing -> the end of the untimed call


def measure(
    plan: ClusterRollout,
    on_turn: Callable[[int, RolloutTurn], None] | None = None,
    start: StartTeam = start_team,
) -> list[RolloutTurn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each. `start`: for tests."""
    bench = plan.bench
    arms = product(bench.workloads, bench.precisions, plan.counts)
    return take_in_turn(arms, bench.rounds, lambda _, arm: take_turn(plan, arm, start), on_turn)


def take_turn(plan: ClusterRollout, arm: RolloutArm, start: StartTeam) -> RolloutTurn:
    """Build, measure and end the workers of one arm."""
    bench, measured = plan.bench, partial(_measured, plan.bench, arm, time.perf_counter())
    return measure_on(bench.model, plan.recipe(*arm), arm[2], bench.device, measured, trains=False, start=start)


def _measured(bench: Bench, arm: RolloutArm, began: float, workers: BenchWorkers, peaks: Peaks) -> RolloutTurn:
    workload = arm[0]
    if workers.needs_calibration:
        workers.calibrate(calibration_prompts(workload))
    if bench.warmup_tokens:
        workers.generate(workload.short(bench.warmup_tokens))
        workers.forget_prefixes()  # the prompts are prefilled in the time that counts
    peaks()  # forgets the peak so far
    up = now(workers, bench.device)
    completions, record = measured_generate(workers, workload.requests)
    seconds = now(workers, bench.device) - up
    done = record.metrics
    assert done is not None
    shares = record.named()["time/rollout_tail_share"], done.idle_share, done.preemptions
    return RolloutTurn(*arm, seconds, *shares, peaks(), digest_of(completions), up - began)


def rows_of(plan: ClusterRollout, turns: Sequence[RolloutTurn]) -> list[Row]:
    """A row for each workload, precision and number of workers: medians over rounds; of memory the largest
    peak."""
    by_arm: dict[tuple[str, str, int], list[RolloutTurn]] = {}
    for turn in turns:
        by_arm.setdefault((turn.workload.name, turn.precision, turn.workers), []).append(turn)
    rows = {arm: _row(plan, rounds) for arm, rounds in by_arm.items()}
    compare_workers(rows, ("rollout",))
    return list(rows.values())


def _row(plan: ClusterRollout, rounds: Sequence[RolloutTurn]) -> Row:
    first = rounds[0]
    lengths = [answer for _, answer in first.workload.siblings]
    speeds = [sum(lengths) / turn.seconds for turn in rounds]
    row: Row = {
        "precision": first.precision,
        **cluster_fields(plan.cluster, plan.bench.device, first.workers),
        "workload": first.workload.name,
        "weights": "drawn" if plan.bench.model.folder is None else "files",
        "rounds": len(rounds),
        "rollout/tokens_per_second": statistics.median(speeds),
        "rollout/tokens_per_second_min": min(speeds),
        "rollout/tokens_per_second_max": max(speeds),
        "rollout/tokens_per_second_per_worker": statistics.median(speeds) / max(1, first.workers),
        "rollout/generated_tokens": sum(lengths),
        "rollout/mean_length": statistics.fmean(lengths),
        "rollout/max_length": max(lengths),
        "rollout/max_batch": plan.bench.rows_of(first.workload),
        "rollout/digest": first.digest,
        "rollout/tail_share": statistics.median(turn.tail_share for turn in rounds),
        "rollout/idle_share": statistics.median(turn.idle_share for turn in rounds),
        "rollout/preemptions": max(turn.preemptions for turn in rounds),
        "time/rollout": statistics.median(turn.seconds for turn in rounds),
        "time/startup": first.startup_seconds,
    }
    return row | peak_fields([turn.peak_gb for turn in rounds])
