"""Measures on the embedded worker, and on one and more workers on Ray; compares their rows. All benches share it.

    efficiency      speed of each worker, compared with one worker on Ray
    over embedded   time on one worker on Ray beyond that of the embedded worker

With `cluster.tensor_parallel` groups of that many workers share a model. One worker always has it whole.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar

import torch

from octetrl.bench.model import BenchModel, give_memory_back, tokenizer_of
from octetrl.bench.turns import Row
from octetrl.bench.worker import bench_worker, hosted_bench_worker
from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe
from octetrl.engine.admission import Admission
from octetrl.engine.stopping import decoder_of
from octetrl.records import Completion, GenerationRequest
from octetrl.rollout.backend import SessionRecord
from octetrl.shapes.spec import allowed_sizes, why_not_cut
from octetrl.system.errors import UserError
from octetrl.telemetry.console import Console
from octetrl.workers.local import LocalWorkers
from octetrl.workers.many.balance import Costs
from octetrl.workers.many.build import start_team, workers_on
from octetrl.workers.many.separate import SeparateWorkers
from octetrl.workers.many.team import Deadlines, Team
from octetrl.workers.many.workers import ManyWorkers, TeamContext
from octetrl.workers.worker import Worker

EMBEDDED = 0  # workers: one, in this process
StartTeam = Callable[..., Team]
Arm = tuple[str, int]  # precision, workers
BenchWorkers = ManyWorkers | LocalWorkers
Peaks = Callable[[], tuple[float, ...]]
Key = TypeVar("Key", bound=tuple[Any, ...])
Measured = TypeVar("Measured")


class WorkersBench(Protocol):
    """What is measured on how many workers."""

    @property
    def model(self) -> BenchModel: ...
    @property
    def precisions(self) -> tuple[str, ...]: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def cluster(self) -> ClusterConfig:
        """With the largest number of workers, and the Ray cluster to use."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of workers; 0: the embedded one."""

    def recipe(self, precision: str, workers: int) -> Recipe:
        """The recipe of one arm."""


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


def recipe_on(cluster: ClusterConfig, recipe: Recipe, workers: int) -> Recipe:
    """The recipe on so many workers of a Ray that this process is connected to. `cluster`: with the most workers."""
    if workers == EMBEDDED:
        return recipe
    kind = "cpus" if cluster.cpus is not None else "gpus"
    update = {kind: workers, "address": "auto", "tensor_parallel": shared_by(cluster, workers)}
    return recipe.model_copy(update={"cluster": cluster.model_copy(update=update)})


def shared_by(cluster: ClusterConfig, workers: int) -> int:
    """Number of workers that share one model."""
    return cluster.tensor_parallel if workers > 1 else 1


def check_cut(cluster: ClusterConfig, model: BenchModel) -> None:
    """Raise UserError if `cluster.tensor_parallel` workers cannot share this model."""
    why = why_not_cut(model.spec, cluster.tensor_parallel)
    if why is not None:
        allowed = " or ".join(map(str, allowed_sizes(model.spec)))
        raise UserError(f"--tensor-parallel: {cluster.tensor_parallel}, but {why}; use {allowed}")


def measure_on(
    model: BenchModel,
    recipe: Recipe,
    workers: int,
    device: torch.device,
    measured: Callable[[BenchWorkers, Peaks], Measured],
    *,
    trains: bool = True,
    start: StartTeam = start_team,
) -> Measured:
    """What `measured(workers, peaks)` returns. The workers are built before it and ended after it.

    `recipe`: of `recipe_on`. `peaks()`: GB of each worker since its last call; on a CPU of the process, or nothing.
    `start`: for tests.
    """
    if workers == EMBEDDED:
        return _on_embedded(model, recipe, device, measured, trains=trains)
    with started(model, recipe, trains=trains, start=start) as (team, many):
        assert isinstance(many, ManyWorkers), "both roles are on each worker"
        return measured(many, partial(_peaks, team, on_gpu=bool(recipe.cluster.num_gpus)))


@contextmanager
def started(
    model: BenchModel, recipe: Recipe, *, trains: bool = True, start: StartTeam = start_team
) -> Iterator[tuple[Team, ManyWorkers | SeparateWorkers]]:
    """The workers of a recipe that runs on Ray; they end with the context."""
    deadlines = Deadlines(recipe.cluster.deadlines)
    team = start(recipe, None, deadlines, trains=trains, build=partial(hosted_bench_worker, model))
    try:
        admission = Admission(
            vocab_size=model.spec.vocab_size,
            context_length=recipe.model.context_length,
            eos_token_ids=frozenset(model.spec.eos_token_ids),
            decode=decoder_of(tokenizer_of(model)),
        )
        context = TeamContext(Costs.of(model.spec), deadlines, Console("quiet", recipe.steps))
        yield team, workers_on(team, recipe, context, admission, trains=trains)
    finally:
        team.close()


def _on_embedded(
    model: BenchModel,
    recipe: Recipe,
    device: torch.device,
    measured: Callable[[BenchWorkers, Peaks], Measured],
    *,
    trains: bool,
) -> Measured:
    worker = bench_worker(model, recipe, device, trains=trains)
    found = measured(LocalWorkers(worker, Console("quiet", 1)), partial(_own_peak, worker))
    worker.engine.sleep()
    del worker
    give_memory_back(device)
    return found


def _peaks(team: Team, *, on_gpu: bool) -> tuple[float, ...]:
    """GB of each worker: the peak of its GPU in the last phase, or the process's memory now."""
    if on_gpu:
        return tuple(team.ask("state", "run", "measure", peak_gb))
    return tuple(status.memory_gb for status in team.ask("state", "status"))


def _own_peak(worker: Worker) -> tuple[float, ...]:
    return (peak_gb(worker.device),) if worker.device.type == "cuda" else ()


def peak_gb(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated(device) / 1e9


def now(workers: BenchWorkers, device: torch.device) -> float:
    """Seconds. Waits for the embedded worker's GPU; other workers answer when their work is done."""
    if isinstance(workers, LocalWorkers) and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def measured_generate(
    workers: BenchWorkers, requests: Sequence[GenerationRequest]
) -> tuple[list[list[Completion]], SessionRecord]:
    """The completions, and the record of what all workers did."""
    records: list[SessionRecord] = []
    completions = workers.generate(requests, None, records.append)
    assert records[0].metrics is not None, "our engine counts"
    return completions, records[0]


def digest_of(completions: Sequence[Sequence[Completion]]) -> str:
    """A digest of tokens and log-probs. It does not depend on the number of workers."""
    drawn = repr([(one.token_ids, one.logprobs) for siblings in completions for one in siblings])
    return hashlib.sha256(drawn.encode()).hexdigest()[:16]


def slowest(name: str, metrics: Mapping[str, Any]) -> float:
    """The largest value of any worker; 0 if no worker has the metric."""
    return max((value for key, value in metrics.items() if key.startswith(f"{name}/worker_")), default=0.0)


# ---------------------------------------------------------------- rows


class ComparedTurn(Protocol):
    """The part of a turn that `digest_warnings` compares."""

    @property
    def precision(self) -> str: ...
    @property
    def workers(self) -> int: ...
    @property
    def digest(self) -> str: ...


def cluster_fields(cluster: ClusterConfig, device: torch.device, workers: int) -> Row:
    """What every row says about the workers."""
    return {
        "cluster/kind": "embedded" if workers == EMBEDDED else "ray",
        "cluster/workers": max(1, workers),
        "cluster/device": device.type,
        "cluster/gradients": cluster.gradients,
        "cluster/tensor_parallel": shared_by(cluster, workers),
    }


def peak_fields(peaks: Sequence[Sequence[float]]) -> Row:
    """`memory/peak_gb` and that of each worker, from their peaks in each turn; nothing if they are not known."""
    largest = [max(of_worker) for of_worker in zip(*peaks, strict=True)]
    row: Row = {f"memory/peak_gb/worker_{worker}": peak for worker, peak in enumerate(largest)}
    return row | ({"memory/peak_gb": max(largest)} if largest else {})


def compare_workers(rows: Mapping[Key, Row], phases: Sequence[str]) -> None:
    """Add `PHASE/efficiency` to each row, and `PHASE/over_embedded` of the first phase, from `time/PHASE`. The last
    item of a key is the number of workers. Without one worker on Ray the embedded worker is the base."""
    by_key: dict[tuple[Any, ...], Row] = dict(rows)
    for key, row in by_key.items():
        one, embedded = by_key.get((*key[:-1], 1)), by_key.get((*key[:-1], EMBEDDED))
        base = one or embedded
        if key[-1] != EMBEDDED and base is not None:
            for phase in phases:
                row[f"{phase}/efficiency"] = _times_faster(row, base, phase) / key[-1]
        if key[-1] == 1 and embedded is not None:
            row[f"{phases[0]}/over_embedded"] = 1 / _times_faster(row, embedded, phases[0]) - 1


def _times_faster(row: Row, base: Row, phase: str) -> float:
    return float(base[f"time/{phase}"]) / float(row[f"time/{phase}"])


def digest_warnings(turns: Sequence[ComparedTurn]) -> Iterator[str]:
    """A line for each turn whose first tokens or log-probs are not those of the first turn of its precision."""
    firsts: dict[str, ComparedTurn] = {}
    for turn in turns:
        first = firsts.setdefault(turn.precision, turn)
        if turn.digest != first.digest:
            yield (
                f"warning: {turn.precision}: {name_of(turn.workers)} sampled other tokens or log-probs"
                f" than {name_of(first.workers)} ({turn.digest}, not {first.digest})"
            )


def name_of(workers: int) -> str:
    return "the embedded worker" if workers == EMBEDDED else f"{workers} worker{'s' if workers > 1 else ''}"
