"""A `Team` whose workers are threads of this process: everything of many workers except their processes."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.config.schema import Recipe
from octetrl.data.tokenizer import Tokenizer
from octetrl.records import RolloutGroup
from octetrl.run.build import build_run, method_of
from octetrl.run.folder.journal import NO_FILES, Journal
from octetrl.run.loop import one_step
from octetrl.run.state import Run
from octetrl.shapes.spec import ModelSpec
from octetrl.telemetry.console import Console
from octetrl.workers.assignment import Costs
from octetrl.workers.build import BuildWorker, build_worker
from octetrl.workers.build_workers import admission_of, workers_on
from octetrl.workers.hosted import HostedWorker, WorkerPlan
from octetrl.workers.model_shape import model_spec
from octetrl.workers.status import StatusReport
from octetrl.workers.team import Call, Deadlines, PartOfTeam, ProcessTeam, WorkerLost
from octetrl.workers.workers import Workers, WorkersDiffer
from tests.e2e.test_turns import UNTIMED
from tests.e2e.tiny_run import timeless, tiny_recipe

# of all that was written: a prompt once for each worker that sampled it; bytes between workers
SPREAD = UNTIMED | {"fp8/kv_saturation", "publish/bytes"}


class ThreadTeam(ProcessTeam):
    def __init__(self, recipe: Recipe, count: int, *, trains: bool = True, build: BuildWorker = build_worker) -> None:
        plans = [WorkerPlan(recipe, rank, count, trains, os.getcwd(), None, build) for rank in range(count)]
        self.workers = [HostedWorker(plan, "") for plan in plans]
        self.begun: list[tuple[int, str]] = []  # (worker, verb)
        self._pool = ThreadPoolExecutor(4 * count)

    @property
    def size(self) -> int:
        return len(self.workers)

    host = "127.0.0.1"

    def place(self, worker: int) -> str:
        return f"worker {worker}"

    def lines(self) -> list[str]:
        return [StatusReport(worker.status(), 0.0).line for worker in self.workers]

    def collect(self, phase: str, calls: Sequence[Call]) -> list[Any]:
        return [self.result(call) for call in calls]

    def begin(self, worker: int, verb: str, *arguments: Any) -> Call:
        self.begun.append((worker, verb))
        sent = pickle.loads(pickle.dumps(arguments))  # as between processes
        return Call(worker, self._pool.submit(getattr(self.workers[worker], verb), *sent))

    def wait_any(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        futures: dict[Future[Any], Call] = {call.reference: call for call in calls}
        done, _ = wait(futures, seconds, return_when=FIRST_COMPLETED)
        return [futures[future] for future in done]

    def result(self, call: Call) -> Any:
        return pickle.loads(pickle.dumps(call.reference.result()))

    def lose(self, worker: int, phase: str, seconds: float, why: str) -> WorkerLost:
        return WorkerLost(f"worker {worker} was lost in phase {phase}: {why}")

    def close(self) -> None:
        for worker in self.workers:
            if worker._session is not None:  # a process would end with it
                worker._session.close()
        self._pool.shutdown(wait=False)


def team_of(run: Run) -> Any:
    """All workers of a run, also where some only train."""
    team = run.workers._team
    return team._team if isinstance(team, PartOfTeam) else team


class RunTeam(ThreadTeam):
    """In place of `octetrl.workers.build_workers.start_team`, or of a `RayTeam`: the workers of a run are threads."""

    def __init__(self, recipe: Recipe, *_: Any, **__: Any) -> None:
        super().__init__(recipe, recipe.cluster.num_workers)


def workers_of(
    team: ThreadTeam,
    recipe: Recipe,
    spec: ModelSpec,
    tokenizer: Tokenizer,
    console: Console,
    *,
    trains: bool,
) -> Workers:
    admission = admission_of(spec, tokenizer, recipe.model.context_length)
    deadlines = Deadlines(recipe.cluster.deadlines)
    return workers_on(team, recipe, Costs.of(spec, recipe.cluster), deadlines, console, admission, trains=trains)


@contextmanager
def run_on(
    count: int,
    model: Path,
    folder: Path,
    *,
    size: int = 1,
    engines: int = 0,
    ahead: int = 0,
    in_flight: str = "off",
    buffer: str = "auto",
    beside_tail: bool = False,
    backend: str = "octetrl",
    build: BuildWorker = build_worker,
    **changes: Any,
) -> Iterator[Run]:
    """A run whose workers are `count` threads in groups of `size` that share a model; 0: the embedded worker.
    `engines`: as many more generate, and the others only train. `ahead`: by how many versions. `in_flight`, `buffer`:
    `cluster.weights_in_flight` and `weight_buffer`. `backend`: what generates, also one that a recipe for the CPU may
    not name."""
    recipe = tiny_recipe(model, folder / "run", changes)
    recipe = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"backend": backend})})
    run = build_run(recipe)
    if count:
        roles: dict[str, Any] = {"trainer_cpus": count, "engine_cpus": engines, "max_staleness": ahead}
        roles |= {"weights_in_flight": in_flight, "weight_buffer": buffer}
        counts = roles if engines else {"cpus": count, "tensor_parallel": size}
        cluster = recipe.cluster.model_copy(update=counts)
        rollout = recipe.rollout.model_copy(update={"learn_beside_tail": beside_tail})
        recipe = recipe.model_copy(update={"cluster": cluster, "rollout": rollout})
        team = ThreadTeam(recipe, count + engines, build=build)
        workers = workers_of(team, recipe, model_spec(recipe), run.tokenizer, run.console, trains=True)
        run = replace(run, config=recipe, workers=workers, method=method_of(recipe, workers))
    try:
        yield run
    finally:
        run.close()


def steps_of(
    run: Run, steps: int, journal: Journal = NO_FILES
) -> tuple[list[tuple[RolloutGroup, ...]], list[dict[str, Any]]]:
    """What each step drew, and its metrics without those of the clock and of how the work was spread."""
    results = [one_step(run, step, journal) for step in range(1, steps + 1)]
    return [tuple(one.groups) for one in results], unspread([dict(one.metrics) for one in results])


def unspread(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without what the clock says, and without how the work was spread over workers."""
    return [{name: line[name] for name in line if name not in SPREAD} for line in timeless(lines)]


def assert_a_wrong_worker_is_named(run: Run) -> None:
    """Of one trainer and two workers that generate, the last gets one byte that was not sent."""
    receiver = team_of(run).workers[2]._receiver
    receive = receiver.receive

    def receive_with_a_fault() -> None:
        receive()
        held = next(receiver._worker.trainer_model.parameters()).detach()
        held.view(torch.uint8).flatten()[0] ^= 1

    receiver.receive = receive_with_a_fault
    with pytest.raises(WorkersDiffer, match="publish: worker 2 holds other weights than were sent to it"):
        run.workers.publish(0)


def assert_same_measures(found: dict[str, float], expected: dict[str, float]) -> None:
    """Metrics of one step, whose weights are equal up to the order of float32 sums. The backward of other rows or
    micro-batches rounds some gradients to another BF16 or FP8 value: measured, the norm differs by up to 5e-4."""
    backward = {name for name in expected if name.endswith("grad_norm")}
    assert found == pytest.approx(expected | {name: found[name] for name in backward}, rel=1e-5, abs=1e-6)
    for name in backward:
        assert found[name] == pytest.approx(expected[name], rel=1e-2), name
