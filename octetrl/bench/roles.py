"""Measures steps of a run with both roles on each GPU, and with roles on GPUs of their own that work at once.

    both           every worker samples, then every worker trains
    beside tail    the same with `rollout.learn_beside_tail`
    N+M            N workers train and M generate, `cluster.max_staleness` versions ahead
    N+M, HOW       the same with `cluster.weights_in_flight`

A turn builds the workers of one arm and makes steps of a run (workload_run.py) in a row: short ones, then at least one
whole one and as many as fill the pipeline, then the timed ones. Short answers end together, so the first whole step
reaches new batch sizes, captures their graphs and compiles their kernels. While the last timed step trains, the batch
after it is generated, as in the middle of a run. All arms have equal work: prompts of the same step have the same
tokens, and answers the same lengths. Turns alternate, A B C C B A.

The tokens and log-probs of the first step have a digest. All arms sample them with the same weights, so it is equal.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import torch

from octetrl.bench.model import BenchModel
from octetrl.bench.on_workers import StartTeam, digest_of, recipe_on, started
from octetrl.bench.step import StepBench, step_recipe
from octetrl.bench.turns import take_in_turn
from octetrl.bench.workload_run import workload_run
from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe
from octetrl.run.loop import one_step
from octetrl.run.state import Run
from octetrl.workers.many.build import start_team
from octetrl.workers.many.separate import SeparateWorkers

InFlight = Literal["off", "recompute_cache", "keep_cache"]


@dataclass(frozen=True, slots=True)
class RolesArm:
    """How the workers divide the work. `roles`: workers that train, and workers that generate; None: all do both."""

    roles: tuple[int, int] | None = None
    beside_tail: bool = False
    max_staleness: int = 0
    in_flight: InFlight = "off"

    @property
    def name(self) -> str:
        if self.roles is None:
            return "both, beside tail" if self.beside_tail else "both"
        trainers, engines = self.roles
        return f"{trainers}+{engines}" if self.in_flight == "off" else f"{trainers}+{engines}, {self.in_flight}"


@dataclass(frozen=True, slots=True)
class RolesBench:
    """The arms, on the workers of `cluster`."""

    step: StepBench
    cluster: ClusterConfig
    arms: tuple[RolesArm, ...]

    @property
    def model(self) -> BenchModel:
        return self.step.model

    @property
    def device(self) -> torch.device:
        return self.step.device

    @property
    def short(self) -> tuple[int, ...]:
        """Tokens of the answers of the first steps. A kernel compiles once for multiples of 16 tokens and once for
        other numbers, so there are two."""
        tokens = self.step.warmup_tokens
        return (tokens, max(1, tokens - 1)) if tokens else ()

    def untimed(self, arm: RolesArm) -> int:
        """Steps before the timed ones: the short ones, then whole ones until all batch sizes were reached and a batch
        is as old as it will be."""
        return len(self.short) + max(1, arm.max_staleness)

    def recipe(self, precision: str, arm: RolesArm) -> Recipe:
        """The recipe of one arm, on a Ray that this process is connected to."""
        recipe = step_recipe(self.step, precision)
        steps = self.untimed(arm) + self.step.steps + arm.max_staleness  # batches after the last timed step are begun
        recipe = recipe.model_copy(update={"steps": steps})
        if arm.roles is None:
            rollout = recipe.rollout.model_copy(update={"learn_beside_tail": arm.beside_tail})
            recipe = recipe.model_copy(update={"rollout": rollout})
            return recipe_on(self.cluster, recipe, self.cluster.num_workers)
        kind = "gpus" if self.cluster.cpus is None else "cpus"
        update = {kind: None, f"trainer_{kind}": arm.roles[0], f"engine_{kind}": arm.roles[1], "address": "auto"}
        update |= {"max_staleness": arm.max_staleness, "weights_in_flight": arm.in_flight}
        return recipe.model_copy(update={"cluster": self.cluster.model_copy(update=update)})


@dataclass(frozen=True, slots=True)
class RolesTurn:
    """One measurement of an arm."""

    precision: str
    arm: RolesArm
    lines: tuple[Mapping[str, float], ...]  # metrics of all steps
    seconds: tuple[float, ...]  # of each timed step, the last of `lines`
    weight_buffer: str  # double or single; empty: the trainers generate
    digest: str  # of the first step's tokens and log-probs
    startup_seconds: float  # nothing -> the first timed step

    @property
    def timed(self) -> tuple[Mapping[str, float], ...]:
        return self.lines[len(self.lines) - len(self.seconds) :]


def measure(
    bench: RolesBench, on_turn: Callable[[int, RolesTurn], None] | None = None, start: StartTeam = start_team
) -> list[RolesTurn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each. `start`: for tests."""
    arms = product(bench.step.precisions, bench.arms)
    return take_in_turn(arms, bench.step.rounds, lambda _, one: take_turn(bench, *one, start), on_turn)


def take_turn(bench: RolesBench, precision: str, arm: RolesArm, start: StartTeam) -> RolesTurn:
    """Build, measure and end the workers of one arm."""
    began, recipe = time.perf_counter(), bench.recipe(precision, arm)
    with started(bench.model, recipe, start=start) as (_, workers):
        run = workload_run(bench.model, recipe, bench.step.workload, workers, bench.short)
        try:
            lines, ends, digest = _steps(run, bench.untimed(arm) + bench.step.steps)
        finally:
            run.close()
        buffer = ""
        if isinstance(workers, SeparateWorkers):
            buffer = "double" if workers.is_doubled else "single"
    ends = [began, *ends][-bench.step.steps - 1 :]
    seconds = tuple(end - begin for begin, end in pairwise(ends))
    return RolesTurn(precision, arm, tuple(lines), seconds, buffer, digest, ends[0] - began)


def _steps(run: Run, count: int) -> tuple[list[Mapping[str, float]], list[float], str]:
    """The metrics of `count` steps, when each ended, and the digest of the first."""
    lines: list[Mapping[str, float]] = []
    ends: list[float] = []
    digest = ""
    for step in range(1, count + 1):
        result = one_step(run, step)
        lines.append(result.metrics)
        ends.append(time.perf_counter())
        digest = digest or digest_of(
            [[turn.completion for rollout in group.rollouts for turn in rollout.turns] for group in result.groups]
        )
    return lines, ends, digest


def digest_warnings(turns: Sequence[RolesTurn]) -> list[str]:
    """A line for each turn whose first step sampled other tokens or log-probs than the first turn of its precision."""
    firsts: dict[str, RolesTurn] = {}
    lines = []
    for turn in turns:
        first = firsts.setdefault(turn.precision, turn)
        if turn.digest != first.digest:
            lines.append(
                f"warning: {turn.precision}: {turn.arm.name} sampled other tokens or log-probs than"
                f" {first.arm.name} ({turn.digest}, not {first.digest})"
            )
    return lines
