"""The processes of a run's workers on Ray: placed, called with a deadline, watched, ended.

Ray carries records and supervises; tensors go between the workers themselves. Each worker is one actor, a
`HostedWorker` (hosted.py) with a GPU of its own or on the CPU.

A thread asks every worker about once a second what it does. The answers are the run folder's status file and the proof
that the process lives: a worker that dies is noticed at once, a stopped one after `cluster.deadlines.silent_seconds`,
and one that answers without getting done at the deadline of its phase. Each ends the step with a `WorkerLost`, which
names worker, host, GPU, phase and seconds, and ends with the last lines that it printed.
"""

from __future__ import annotations

import os
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from octetrl.system.process import terminable, uncollected

with uncollected():  # a worker's process begins with this module
    from octetrl.config.schema import Recipe
    from octetrl.system.errors import UserError
    from octetrl.trainer.peers import PeersLost
    from octetrl.workers.build import BuildWorker, build_worker
    from octetrl.workers.hosted import HostedWorker, WorkerPlan
    from octetrl.workers.ray_cluster import RayCluster, connect, reserve_nodes
    from octetrl.workers.ray_watcher import LOGS, remove_logs
    from octetrl.workers.status import STATUS_FILE, StatusReport, WorkerStatus, last_lines, write_status
    from octetrl.workers.team import Call, Deadlines, ProcessTeam, WorkerLost

CALLS_AT_ONCE = 8  # of one worker: a verb, a poll, a submission, a status
LOOK_SECONDS = 0.2  # between two looks at the other workers while a call is in flight
STATUS_SECONDS = 1.0
DEATH_SECONDS = 5.0  # until a worker that died is known as dead
IMPORT_ERROR = re.compile(r"^(?:AttributeError|ImportError|ModuleNotFoundError): (.{1,200})", re.MULTILINE)
EXIT = re.compile(r"Worker exit type: (?P<kind>\w+) Worker exit detail: (?P<detail>[^.]{1,200})")


class _RayWorker(HostedWorker):
    """A `HostedWorker` that knows from Ray which GPU it has."""

    def __init__(self, plan: WorkerPlan) -> None:
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        super().__init__(plan, ",".join(gpus))


class RayTeam(ProcessTeam):
    """The actors of a run. `folder`: the run's, for logs and status; None: it has none."""

    def __init__(
        self,
        recipe: Recipe,
        folder: Path | None,
        deadlines: Deadlines,
        *,
        trains: bool,
        build: BuildWorker = build_worker,
    ) -> None:
        self._folder = None if folder is None else folder.absolute()
        self._deadlines, self._trains, self._build = deadlines, trains, build
        self._recipe = recipe
        self._lock = threading.Lock()
        self._actors: list[Any] = []
        self._heard: list[WorkerStatus | None] = []
        self._heard_at: list[float] = []
        self._died: dict[int, str] = {}
        self._places: PlacementGroup | None = None
        self._ends = threading.Event()
        self._watch = threading.Thread(target=self._watch_all, name="workers", daemon=True)
        self._logs_before = set() if self._folder is None else set(self._folder.glob(LOGS))
        with terminable():
            self._cluster: RayCluster | None = connect(recipe.cluster, self._folder)
            self._logs = self._folder or self._cluster.folder
            try:
                self._start()
            except BaseException:
                self.close()
                raise

    @property
    def size(self) -> int:
        return len(self._actors)

    @property
    def host(self) -> str:
        return str(ray.util.get_node_ip_address())

    def place(self, worker: int) -> str:
        status = self._heard[worker]
        return f"worker {worker}" if status is None else status.place

    def lines(self) -> list[str]:
        """What each worker does now, by what it last said."""
        reports = self._reports()
        many = len({one.status.host for one in reports}) > 1
        return [one.short_line(with_host=many) for one in reports]

    def _reports(self) -> list[StatusReport]:
        now, said = time.monotonic(), zip(self._heard, self._heard_at, strict=True)
        return [StatusReport(status, now - at) for status, at in said if status is not None]

    # ------------------------------------------------------------ starting and ending

    def _start(self) -> None:
        cluster = self._recipe.cluster
        options: dict[str, Any] = {"max_concurrency": CALLS_AT_ONCE, "max_restarts": 0, "num_cpus": 0}
        if cluster.num_gpus:
            options["num_gpus"] = 1 / cluster.workers_per_gpu
        if cluster.nodes is not None:
            self._places = reserve_nodes(cluster)
        if self._logs is not None:
            (self._logs / "logs").mkdir(parents=True, exist_ok=True)
        actor = ray.remote(_RayWorker)
        for rank in range(cluster.num_workers):
            plan = WorkerPlan(
                recipe=self._recipe,
                rank=rank,
                count=cluster.num_workers,
                trains=self._trains,
                directory=os.getcwd(),
                log=None if self._logs is None else str(self._log_of(rank)),
                build=self._build,
                modules=tuple(sys.path),
            )
            if self._places is not None:
                bundle = rank * cluster.nodes // cluster.num_workers if cluster.nodes else 0
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(self._places, bundle)
            self._actors.append(actor.options(**options).remote(plan))
            self._heard.append(None)
            self._heard_at.append(time.monotonic())
        for worker, status in enumerate(self.ask("start", "status")):
            self._hear(worker, status)
        self._write_status()
        self._watch.start()

    def close(self) -> None:
        self._ends.set()
        if self._watch.is_alive():
            self._watch.join()
        if self._cluster is not None and self._cluster.answers:
            for actor in self._actors:
                ray.kill(actor)
            if self._recipe.cluster.num_gpus:
                self._await_ends()
            if self._places is not None:
                remove_placement_group(self._places)
        self._actors, self._places = [], None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None
        if self._folder is not None:
            (self._folder / STATUS_FILE).unlink(missing_ok=True)
            if not (self._folder / "config.yaml").exists():  # a refused run; one that has begun keeps its logs
                remove_logs(self._folder, self._logs_before)

    def _await_ends(self) -> None:
        """Waits for the processes on this machine: until then they hold memory of their GPUs."""
        here = socket.gethostname()
        ends = [status.pid for status in self._heard if status is not None and status.host == here]
        until = time.monotonic() + DEATH_SECONDS
        while any(map(_runs, ends)) and time.monotonic() < until:
            time.sleep(0.05)

    def _log_of(self, worker: int) -> Path:
        assert self._logs is not None
        return self._logs / "logs" / f"worker_{worker}.log"

    # ------------------------------------------------------------ calls

    def ask(self, phase: str, verb: str, *arguments: Any) -> list[Any]:
        self._check_ray()
        small = (int, str, type(None))  # travels with the call
        stored = [one if isinstance(one, small) else ray.put(one) for one in arguments]  # once, not once a worker
        return self.collect(phase, [self.begin(worker, verb, *stored) for worker in range(self.size)])

    def begin(self, worker: int, verb: str, *arguments: Any) -> Call:
        self._check_ray()
        return Call(worker, getattr(self._actors[worker], verb).remote(*arguments))

    def wait_any(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        by_reference = {call.reference: call for call in calls}
        until = time.monotonic() + seconds
        while True:
            self._check_ray()
            left = max(0.0, min(LOOK_SECONDS, until - time.monotonic()))
            ready, _ = ray.wait(list(by_reference), num_returns=1, timeout=left)
            if ready:
                ready, _ = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=0)
                return [by_reference[reference] for reference in ready]
            self._check()
            if time.monotonic() >= until:
                return []

    def result(self, call: Call) -> Any:
        self._check_ray()
        try:
            return ray.get(call.reference)
        except RayTaskError as error:
            if not isinstance(error.cause, Exception):
                raise
            if isinstance(error.cause, PeersLost):
                raise self._without_peer(call.worker, error.cause) from None
            raise self._named(error.cause, call.worker) from None
        except RayActorError as error:
            raise self._dead(call.worker, error) from None
        except RayError as error:
            self._check_ray()
            raise self.lose(
                call.worker, *self._doing(call.worker), f"Ray has lost its result: {_first(error)}"
            ) from None

    def _check_ray(self) -> None:
        """Waits while a process of Ray is stopped, and raises RayLost if one has ended; a call would end this one."""
        if self._cluster is not None:
            self._cluster.check()

    def _named(self, error: Exception, worker: int) -> Exception:
        """With the worker's name, where the workers' machines differ."""
        hosts = {status.host for status in self._heard if status is not None}
        if isinstance(error, UserError) and len(hosts) > 1:
            return UserError(f"{self.place(worker)}: {error}")
        error.add_note(f"raised on {self.place(worker)}")
        return error

    def collect(self, phase: str, calls: Sequence[Call]) -> list[Any]:
        began, limit = time.monotonic(), self._deadlines.limit(phase)
        by_reference = {call.reference: call for call in calls}
        results: dict[int, Any] = {}
        while by_reference:
            self._check_ray()
            ready, _ = ray.wait(list(by_reference), num_returns=len(by_reference), timeout=LOOK_SECONDS)
            for reference in ready:
                call = by_reference.pop(reference)
                results[call.worker] = self.result(call)
            if not by_reference:
                break
            self._check()
            seconds = time.monotonic() - began
            if seconds > limit:
                late = next(iter(by_reference.values())).worker
                raise self.lose(late, phase, seconds, f"the limit is {limit:.0f} s (cluster.deadlines)")
        self._deadlines.took(phase, time.monotonic() - began)
        return [results[call.worker] for call in calls]

    # ------------------------------------------------------------ losing a worker

    def lose(self, worker: int, phase: str, seconds: float, why: str) -> WorkerLost:
        self._check_ray()  # whose end takes the workers with it
        status = self._heard[worker]
        lines = () if self._logs is None else last_lines(self._log_of(worker))
        if not lines and status is not None:  # its log lies on another machine
            lines = status.last_lines
        printed = "; it printed:" * bool(lines) + "".join(f"\n    {line}" for line in lines)
        return WorkerLost(f"{self.place(worker)} was lost in phase {phase} after {seconds:.1f} s: {why}{printed}")

    def _without_peer(self, worker: int, error: PeersLost) -> WorkerLost:
        """The WorkerLost of a worker whose connection to another one broke: of that one if it died, else of the one
        that noticed it."""
        until = time.monotonic() + DEATH_SECONDS
        while time.monotonic() < until:
            try:
                self._check()
            except WorkerLost as lost:
                return lost
            time.sleep(LOOK_SECONDS)
        return self.lose(worker, *self._doing(worker), str(error))

    def _dead(self, worker: int, error: RayActorError) -> Exception:
        lacks = lacking_module(error)
        if lacks is not None:
            return UserError(
                f"cluster.address: {self.place(worker)} cannot import this machine's OctetRL ({lacks}); install the"
                " same OctetRL and packages on all machines, for the Python that starts Ray there"
            )
        phase, seconds = self._doing(worker)
        return self.lose(worker, phase, seconds, _why(error))

    def _doing(self, worker: int) -> tuple[str, float]:
        """Phase of a worker and seconds in it, by what it last said."""
        status = self._heard[worker]
        if status is None:
            return "start", time.monotonic() - self._heard_at[worker]
        return status.phase, status.seconds + time.monotonic() - self._heard_at[worker]

    def _check(self) -> None:
        """Raises WorkerLost for a worker that died, or that has been silent for too long."""
        with self._lock:
            died = dict(self._died)
        for worker, why in died.items():
            raise self.lose(worker, *self._doing(worker), why)
        self._check_ray()
        limit = self._deadlines.config.silent_seconds
        for worker, heard_at in enumerate(self._heard_at):
            silent = time.monotonic() - heard_at
            if self._watch.is_alive() and silent > limit and self._cluster is not None and self._cluster.answers:
                raise self.lose(worker, *self._doing(worker), f"it has been silent for {silent:.1f} s")

    # ------------------------------------------------------------ the watching thread

    def _watch_all(self) -> None:
        asked: dict[Any, int] = {}
        looked = time.monotonic()
        while not self._ends.wait(STATUS_SECONDS):
            if self._cluster is None or not self._cluster.answers:
                continue
            now = time.monotonic()
            pause, looked = now - looked - STATUS_SECONDS, now
            if pause > STATUS_SECONDS:  # this process itself was stopped and heard no worker
                self._heard_at = [heard_at + pause for heard_at in self._heard_at]
            for worker in set(range(self.size)) - set(asked.values()) - set(self._died):
                asked[self._actors[worker].status.remote()] = worker
            if asked:
                self._listen(asked)
            self._write_status()

    def _write_status(self) -> None:
        if self._folder is not None:
            write_status(self._folder, self._reports())

    def _listen(self, asked: dict[Any, int]) -> None:
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_SECONDS)
        for reference in ready:
            worker = asked.pop(reference)
            try:
                self._hear(worker, ray.get(reference))
            except RayActorError as error:
                with self._lock:
                    self._died[worker] = _why(error)

    def _hear(self, worker: int, status: WorkerStatus) -> None:
        self._heard[worker], self._heard_at[worker] = status, time.monotonic()


def _runs(pid: int) -> bool:
    """Whether a process exists and has not ended. An ended one may wait for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _first(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def lacking_module(error: RayActorError) -> str | None:
    """What a worker's machine could not import. None: the worker died of something else."""
    text = str(error)
    if "failed to import on the worker" not in text:
        return None
    return (IMPORT_ERROR.findall(text) or ["an import failed"])[-1].strip()


def _why(error: RayActorError) -> str:
    """Ray's reason in one line, without its advice, which names the OOM killer whatever the cause. A lost connection
    says nothing more; if Ray ended the process itself, its own words are the only trace."""
    text = " ".join(str(error).split())
    if "memory pressure" in text or "low on memory" in text:
        return "its process died (out of memory)"
    ended = EXIT.search(text)
    if ended is None or "connection error" in ended["detail"]:
        return "its process died"
    return f"its process died (Ray: {ended['kind']}, {ended['detail'].strip()})"
