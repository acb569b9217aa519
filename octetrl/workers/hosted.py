"""A worker in a process of its own: what the driver calls there.

One thread computes: it builds the worker, trains, and steps an open session. The calls come in other threads and wait
for it, and `status` answers at once, whatever the computing thread does. A process that does not answer has stalled.

An open session is a loop of the computing thread (hosted_session.py). The driver submits requests and polls events; it
never calls for a forward.

**Streamed.** One update of a worker whose batch arrives in parts (trainer/streamed.py), with what `Worker.train` does
besides.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from octetrl.config.in_words import in_flight
from octetrl.config.schema import Recipe
from octetrl.config.worker_memory import BufferChoice
from octetrl.environments.scoring import Score
from octetrl.layers.weight_memory import LoadCount
from octetrl.records import EarlierAnswer, GenerationRequest, PackedBatch, PolicyUpdate, Published, Task, joined
from octetrl.rollout.backend import GenerationMetrics, SessionRecord
from octetrl.system.host import num_cores
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.peers import ALONE, Peers, join_store
from octetrl.trainer.shards import Share
from octetrl.trainer.streamed import StreamedCall
from octetrl.trainer.tensor_peers import GridPeers, connect_grid
from octetrl.trainer.without_update import Sums
from octetrl.workers.assignment import Room
from octetrl.workers.build import BuildWorker, BuiltWorker, Role, WorkerState, build_worker
from octetrl.workers.hosted_session import HostedSession, SessionNews, Withdrawn, with_pause
from octetrl.workers.nodes import NodeInfo, look
from octetrl.workers.reward_model_worker import RewardModelWorker
from octetrl.workers.status import WorkerStatus, last_lines, print_into
from octetrl.workers.team import counted
from octetrl.workers.transfer import Transfer, WeightReceiver, WeightSender, keep_scales
from octetrl.workers.worker import Worker

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """All that a worker is built from. Its process must see the files that the recipe names."""

    recipe: Recipe
    rank: int
    count: int
    trains: bool
    directory: str  # in which the recipe's relative paths begin
    log: str | None  # file for what the process prints; None: where Ray puts it
    build: BuildWorker = build_worker  # another function with its arguments, for a bench
    modules: tuple[str, ...] = ()  # folders in which modules of the recipe are found, such as the recipe's own

    @property
    def role(self) -> Role:
        """Outside training all workers do both."""
        roles = self.recipe.cluster.roles
        if roles is None or not self.trains:
            return "both"
        return "trains" if self.rank < roles[0] else "generates"


class HostedWorker:
    """Starts without a model; `build` loads it. Every verb of a step is one call."""

    def __init__(self, plan: WorkerPlan, gpu: str) -> None:
        """gpu: as the cluster numbers the worker's GPU, which is the only one that the process sees. Empty: CPU."""
        self._plan, self._gpu = plan, gpu
        self._log = None if plan.log is None else Path(plan.log)
        if self._log is not None:
            print_into(self._log)
        if os.path.isdir(plan.directory):
            os.chdir(plan.directory)
        sys.path[:0] = [path for path in (plan.directory,) if path not in sys.path]
        sys.path += [path for path in plan.modules if path not in sys.path]
        self._computing = ThreadPoolExecutor(1, thread_name_prefix="computing")
        self._phase, self._since, self._busy = "start", time.monotonic(), False
        self._micro_batches = (0, 0)  # done and in all, while it trains
        self._link_gb_per_second = 0.0
        self._built: BuiltWorker | None = None
        self._sender: WeightSender | None = None
        self._receiver: WeightReceiver | None = None
        self._session: HostedSession | None = None
        self._session_end: Future[None] | None = None
        self._record = SessionRecord({"time/rollout": 0.0})  # of the last session
        self._update: StreamedUpdate | None = None  # whose batch arrives in parts
        self._opens = threading.Lock()  # held while a session is opened, and while weights are adopted
        self._closes = threading.Lock()  # held while a session is closed

    def status(self) -> WorkerStatus:
        return WorkerStatus(
            rank=self._plan.rank,
            host=socket.gethostname(),
            gpu=self._gpu,
            pid=os.getpid(),
            phase=self._phase,
            seconds=time.monotonic() - self._since,
            busy=self._busy,
            memory_gb=self._memory_gb(),
            last_lines=() if self._log is None else last_lines(self._log),
            done=self._micro_batches[0],
            total=self._micro_batches[1],
            read_gb=self._loaded.read_bytes / 1e9,
            quantized_gb=self._loaded.quantized_bytes / 1e9,
            role="" if self._plan.role == "both" else self._plan.role,
        )

    @property
    def _loaded(self) -> LoadCount:
        return LoadCount() if self._built is None else self._built.loaded

    def _memory_gb(self) -> float:
        if self._gpu:
            return torch.cuda.memory_allocated() / 1e9 if torch.cuda.is_initialized() else 0.0
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e9

    # ------------------------------------------------------------ the verbs

    def look(self, paths: Sequence[str]) -> NodeInfo:
        """Versions of this machine, and the paths that it does not see."""
        return look(paths)

    def run(self, phase: str, work: Callable[[torch.device], Result]) -> Result:
        """What `work` returns on the worker's device, without a model of a run: for the doctor and the benches."""
        return self._compute(phase, lambda: work(self._device()))

    def build(self, store: str | None) -> WorkerState:
        """Loads the model. `store`: address at which the workers meet that load it together, and train it if they do.
        None: this worker is alone.

        Raises UserError.
        """
        return self._compute("load", lambda: self._build(store))

    def _build(self, store: str | None) -> WorkerState:
        plan, device = self._plan, self._device()
        met = ALONE if store is None else self._meet(store, device)
        role = plan.role
        only_loads = (role == "generates" or not plan.trains) and met.group.size == 1
        if not only_loads:
            self._link_gb_per_second = met.link_speed()
        peers = ALONE if only_loads else met
        self._built = plan.build(plan.recipe, device, trains=plan.trains, peers=peers, loaders=met, role=role)
        if only_loads:
            met.close()
        return self.state()

    def _device(self) -> torch.device:
        """The worker's device. It uses its share of the machine's cores."""
        cluster = self._plan.recipe.cluster
        here = cluster.per_node * cluster.workers_per_gpu if cluster.per_node else self._plan.count
        torch.set_num_threads(cluster.cpu_threads or max(1, num_cores() // here))
        return torch.device("cuda", 0) if self._gpu else torch.device("cpu")

    def _meet(self, store: str, device: torch.device) -> Peers:
        cluster, share = self._plan.recipe.cluster, Share(self._plan.rank, self._plan.count)
        if self._plan.role != "both":
            trainers = cluster.num_trainers
            first, last = (0, trainers) if self._plan.role == "trains" else (trainers, self._plan.count)
            share = Share(self._plan.rank - first, last - first)
        return connect_grid(
            join_store(store),
            share,
            cluster.tensor_parallel,
            self._exchanges_on(device),
            gradients=cluster.gradients,
            deadline_seconds=cluster.deadlines.first_seconds,
        )

    def _exchanges_on(self, device: torch.device) -> torch.device:
        """Where tensors are exchanged. NCCL refuses two workers on one GPU; these exchange through the host."""
        return torch.device("cpu") if self._plan.recipe.cluster.workers_per_gpu > 1 else device

    def state(self) -> WorkerState:
        assert self._built is not None, "`build` comes first"
        return self._built.state(self._link_gb_per_second)

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        def count(done: int, total: int) -> None:
            self._micro_batches = (done, total)

        def work() -> PolicyUpdate:
            with counted(self._worker.trainer, batch, count):
                return self._worker.train(batch)

        try:
            return self._compute("train", work)
        finally:
            self._micro_batches = (0, 0)

    def begin_update(self, divisor: float) -> None:
        """An update whose batch arrives in parts, in place of `train`. Forgets one that was not finished."""
        self._update = StreamedUpdate(self._policy, divisor)

    def train_part(self, part: PackedBatch) -> None:
        """Once the session is closed, while other workers may still draw."""
        assert self._update is not None, "`begin_update` comes first"
        self._compute("train", partial(self._update.add, part))

    def finish_update(self, whole: PackedBatch) -> PolicyUpdate:
        assert self._update is not None, "`begin_update` comes first"
        update, self._update = self._update, None
        return self._compute("train", lambda: update.finish(whole))

    def measure_held_out(self, batch: PackedBatch) -> list[Sums]:
        return self._compute("evaluate", lambda: self._worker.measure_held_out(batch))

    def publish(self, policy_version: int) -> Published:
        if self._plan.role != "generates" and isinstance(self._worker, Worker):
            keep_scales(self._worker, policy_version)
        return self._compute("publish", lambda: self._worker.publish(policy_version))

    # ------------------------------------------------------------ weights from a trainer to workers that generate

    def meet_for_weights(self, store: str) -> BufferChoice | None:
        """Connects the first trainer and all workers that generate, which return whether they have room for a second
        buffer. `store`: the address at which they meet."""
        cluster = self._plan.recipe.cluster
        assert cluster.roles is not None, "every worker has the weights that it trains"
        is_trainer = self._plan.role == "trains"
        transfer = Transfer(
            join_store(store),
            Share(0 if is_trainer else 1 + self._plan.rank - cluster.num_trainers, 1 + cluster.roles[1]),
            self._exchanges_on(self._device()),
            deadline_seconds=cluster.deadlines.first_seconds,
            name="weights",
        )
        if is_trainer:
            self._sender = WeightSender(self._policy, transfer)
            return None
        self._receiver = WeightReceiver(self._policy, transfer)
        return self._receiver.choose_buffer()

    def send_weights(self) -> int:
        """Returns the bytes sent to each worker."""
        assert self._sender is not None, "`meet_for_weights` comes first"
        return self._compute("publish", self._sender.send)

    def double_weights(self) -> None:
        """Allocates the second buffer for new weights."""
        assert self._receiver is not None, "`meet_for_weights` comes first"
        self._receiver.double()

    def receive_weights(self) -> float:
        """Into the second buffer, also beside an open session. Returns the seconds that they took to arrive."""
        assert self._receiver is not None, "`meet_for_weights` comes first"
        self._receiver.receive()
        return self._receiver.seconds

    def adopt_weights(self) -> Published:
        """Generates with new weights from now on: those in the second buffer, otherwise those that it receives now. An
        open session takes them between two forwards. `time/publish_pause` is how long nothing was generated."""
        assert self._receiver is not None, "`meet_for_weights` comes first"
        put, how = self._receiver.put_into_engine, in_flight(self._plan.recipe.cluster, self._policy.policy.kv_mode)
        with self._opens:
            session = self._session
            published = None if session is None else session.adopt(put, keeps_cache=how == "keep_cache")
            if published is None:
                began = time.perf_counter()
                published = with_pause(self._compute("publish", put), began)
        return published

    # ------------------------------------------------------------ further verbs

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> dict[str, float]:
        return self._compute("calibrate", lambda: self._policy.calibrate(token_lists))

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        assert self._built is not None, "`build` comes first"
        return self._compute("score", partial(self._built.verb("score"), completions))

    def prepare_saving(self) -> None:
        self._compute("checkpoint", lambda: self._worker.prepare_saving())

    def copy_state(self) -> str | None:
        return self._compute("checkpoint", lambda: self._worker.copy_state())

    def write_state(self, folder: Path, copied: bool) -> list[WrittenFile]:
        """A copy is written beside whatever the computing thread does."""
        if copied:
            return self._worker.write_state(folder, copied=True)
        return self._compute("checkpoint", lambda: self._worker.write_state(folder, copied=False))

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        self._compute("load", lambda: self._worker.load(saved, policy_version))

    def remember(self, answers: Sequence[EarlierAnswer]) -> None:
        self._compute("load", partial(self._policy.remember, answers))

    def forget_prefixes(self) -> None:
        self._compute("rollout", lambda: self._policy.forget_prefixes())

    # ------------------------------------------------------------ an open session

    def open_session(self) -> Room:
        """Opens it, and steps it until `close_session`. Ends one that another worker's failure has left open."""
        opened: Future[Room] = Future()
        peers = self._policy.peers
        with self._opens:
            if self._session is not None:
                self._session.close()
            self._session = HostedSession(peers.group if isinstance(peers, GridPeers) else None)
            self._session_end = self._computing.submit(self._phased, "rollout", partial(self._run_session, opened))
        while not opened.done():
            if self._session_end.done():
                self._session_end.result()  # raises what kept it from opening
            time.sleep(0.001)
        return opened.result()

    def _run_session(self, opened: Future[Room]) -> None:
        assert self._session is not None
        engine = self._plan.recipe.engine
        with self._policy.session(on_end=self._keep_record) as session:
            opened.set_result(Room(engine.max_batch, session.num_pages * engine.page_size, session.num_pages))
            self._session.run(session)

    def _keep_record(self, record: SessionRecord) -> None:
        self._record = record

    def submit(self, requests: Sequence[GenerationRequest], streams: bool) -> None:
        self._open.submit(requests, streams)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._open.cancel(request_ids)

    def poll(self, wait_seconds: float, linger_seconds: float) -> SessionNews:
        """Raises what ended the session."""
        session, end = self._session, self._session_end  # `withdraw` sets both to None while a poll waits
        if session is None and self._update is not None:  # `withdraw` has returned its events
            return SessionNews((), None)
        assert session is not None, "there is no open session"
        news = session.poll(wait_seconds, linger_seconds)
        if end is not None and end.done():
            end.result()
        return news

    def measure(self) -> GenerationMetrics | None:
        """Metrics of the open session so far; None if it has ended."""
        return self._open.measure()

    def withdraw(self) -> Withdrawn:
        """Closes the session before its answers have ended, so that they can continue on another worker."""
        answers, events = self._open.withdraw()
        return Withdrawn(answers, events, self.close_session())

    def close_session(self) -> SessionRecord:
        """Cancels what is unfinished. Of a closed session the same again: Ctrl-C may come during `withdraw`."""
        with self._closes:
            if self._session is not None and self._session_end is not None:
                self._session.close()
                self._session_end.result()
                self._session = self._session_end = None
                if self._update is not None:
                    self._compute("train", self._policy.free_cache)  # once, and not for each part
        return self._record

    @property
    def _open(self) -> HostedSession:
        session = self._session
        assert session is not None, "there is no open session"
        return session

    # ------------------------------------------------------------ the computing thread

    def _compute(self, phase: str, work: Callable[[], Result]) -> Result:
        return self._computing.submit(self._phased, phase, work).result()

    def _phased(self, phase: str, work: Callable[[], Result]) -> Result:
        self._phase, self._since, self._busy = phase, time.monotonic(), True
        try:
            return work()
        finally:
            self._since, self._busy = time.monotonic(), False

    @property
    def _worker(self) -> Worker | RewardModelWorker:
        assert self._built is not None, "`build` comes first"
        return self._built.worker

    @property
    def _policy(self) -> Worker:
        assert isinstance(self._worker, Worker), "a reward model's worker draws nothing"
        return self._worker


class StreamedUpdate:
    """`divisor`: of the loss, until its denominator is known. The caller frees the KV cache's memory before the first
    part (`Worker.free_cache`)."""

    def __init__(self, worker: Worker, divisor: float) -> None:
        self._worker, self._call = worker, StreamedCall(worker.trainer, divisor)
        self._took: dict[str, float] = {}  # by the parts so far

    def add(self, part: PackedBatch) -> None:
        """Trains on some micro-batches, without other workers."""
        worker = self._worker
        with worker.clock("train") as took:
            self._call.add(part, worker.replay(part.policy_version), worker.policy.digest)
        self._took = joined(self._took, took)

    def finish(self, whole: PackedBatch) -> PolicyUpdate:
        """The update with all workers; the metrics are those of all. `whole`: without its micro-batches."""
        own = replace(whole, minibatches=(tuple(self._call.micro_batches),))
        update = self._worker.train(own, self._call.finish)
        return replace(update, metrics=joined(update.metrics, self._took))
