"""`LearningWorkers` and `Workers` on many workers: the driver's side.

    rollouts      any worker draws any sibling (session.py, assignment.py)
    training      every worker runs its part of the micro-batches (balance.py); they meet inside `Worker.train`
    publishing    into every worker's engine; the digests of all are compared
    state         each worker writes the rows that it owns, and reads them

Every verb is one call to each worker, with the deadline of its phase.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from octetrl.engine.admission import Admission
from octetrl.environments.score import Score
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationRequest,
    OnCompletions,
    OnProgress,
    PackedBatch,
    PolicyUpdate,
    Published,
    Task,
)
from octetrl.rollout.backend import GenerationMetrics
from octetrl.system.errors import RunFailed
from octetrl.telemetry.console import Console
from octetrl.telemetry.spans import Spans
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import serve_store
from octetrl.workers.many.assignment import Room
from octetrl.workers.many.balance import Costs, deal
from octetrl.workers.many.deadlines import Deadlines, WorkerLost
from octetrl.workers.many.plan import RolloutFacts, WorkerState
from octetrl.workers.many.session import ManySession
from octetrl.workers.many.status import size
from octetrl.workers.many.team import PartOfTeam, Team
from octetrl.workers.session_sum import SessionSum
from octetrl.workers.training_progress import most_tokens, rollout_shown

LINGER_SECONDS = 0.05  # of `generate`, whose completions nobody waits for
SCORING_SECONDS = 0.1  # at most between two calls of `on_completions`
BACKLOG_SECONDS = 0.005  # the same while it has something to do: each call gives a reward process one answer


class WorkersDiffer(RunFailed):
    """A worker holds other weights than its peers."""


@dataclass(frozen=True, slots=True)
class TeamContext:
    """What several workers of a run share beside their team."""

    costs: Costs  # of micro-batches, by which these are dealt out
    deadlines: Deadlines
    console: Console
    spans: Spans


class ManyLearningWorkers:
    """`LearningWorkers` on the workers of `team`, which have not loaded their model yet."""

    def __init__(self, team: Team, context: TeamContext, *, trains: bool = True, size: int = 1) -> None:
        """`size`: of each group of workers that share one model. Workers of a group follow one another."""
        self._team, self._costs, self._deadlines = team, context.costs, context.deadlines
        self._console, self._spans = context.console, context.spans
        self._size = size  # of a group of workers that share one model
        address: str | None = None
        if team.size > 1:
            self._store, address = serve_store(team.host)  # NCCL asks it for as long as the workers live
        states: list[WorkerState] = team.ask("load", "build", address)
        self._layout, self._policy_version = states[0].layout, states[0].policy_version
        self._needs_calibration = states[0].needs_calibration
        self.link_gb_per_second = min(state.link_gb_per_second for state in states)  # 0: no weights are exchanged
        self._weights_are_whole = True
        if trains:
            _say_what_was_read(context.console, states)

    @property
    def layout(self) -> PackingLayout:
        return self._layout

    @property
    def policy_version(self) -> int:
        return self._policy_version

    @property
    def weights_are_whole(self) -> bool:
        return self._weights_are_whole

    def train(self, batch: PackedBatch) -> PolicyUpdate:
        dealt = deal(batch, self._team.size // self._size, self._costs)
        parts = [part for part in dealt for _ in range(self._size)]
        return self._update("train", [(part,) for part in parts])

    def _update(self, verb: str, arguments: Sequence[tuple[Any, ...]]) -> PolicyUpdate:
        """One update by a verb that all workers call together."""
        self._weights_are_whole = False
        with self._console.phase("train"), self._spans("train"):
            try:
                updates: list[PolicyUpdate] = self._team.ask_each("train", verb, arguments)
            except NonFiniteError:  # before any worker's step; or after it, by a weight or the next minibatch
                states: list[WorkerState] = self._team.ask("state", "state")
                self._weights_are_whole = all(state.weights_are_whole for state in states)
                raise
        self._weights_are_whole = True
        self._take_state()
        return updates[0]

    def publish(self, policy_version: int) -> Published:
        with self._console.phase("publish"), self._spans("publish"):
            published: list[Published] = self._team.ask("publish", "publish", policy_version)
        for part in range(self._size):  # workers with the same rows of the model
            self._check_equal([one.weights_digest for one in published[part :: self._size]], part)
        return published[0]

    def _check_equal(self, digests: Sequence[str], part: int) -> None:
        """Raises WorkersDiffer naming the first worker whose weights are not those of most workers; if no weights are
        those of most, one worker for each of two digests."""
        (common, count), *others = Counter(digests).most_common(2)
        places = [self._team.place(digests.index(one) * self._size + part) for one in (common, *(d for d, _ in others))]
        if others and 2 * count <= len(digests):
            raise WorkersDiffer(
                f"publish: {places[0]} and {places[1]} hold different weights (digests {common[:12]} and"
                f" {others[0][0][:12]}); one of their machines may be faulty: try each without the other, and continue"
                " with --resume"
            )
        for place, digest in enumerate(digests):
            if digest != common:
                worker = self._team.place(place * self._size + part)
                raise WorkersDiffer(
                    f"publish: {worker} holds other weights than most workers (digest {digest[:12]},"
                    f" not {common[:12]}); its machine may be faulty: leave it out, and continue with --resume"
                )

    def prepare_saving(self) -> None:
        self._team.ask("checkpoint", "prepare_saving")

    def copy_state(self) -> str | None:
        refusals: list[str | None] = self._team.ask("checkpoint", "copy_state")
        return next((refusal for refusal in refusals if refusal is not None), None)

    def write_state(self, folder: Path, *, copied: bool) -> Sequence[WrittenFile]:
        written: list[list[WrittenFile]] = self._team.ask("write", "write_state", folder.absolute(), copied)
        return [file for files in written for file in files]

    def load(self, saved: Checkpoint, policy_version: int) -> None:
        self._team.ask("load", "load", saved, policy_version)
        self._take_state()

    def _take_state(self) -> None:
        state: WorkerState = self._team.ask_one(0, "state", "state")
        self._policy_version, self._needs_calibration = state.policy_version, state.needs_calibration

    def memory_metrics(self) -> dict[str, float]:
        return memory_of(self._team)

    def path_metrics(self) -> dict[str, float]:
        return paths_of(self._team)

    def time_metrics(self) -> dict[str, float]:
        return times_of(self._team, self.link_gb_per_second)

    def close(self) -> None:
        self._team.close()


class ManyWorkers(ManyLearningWorkers):
    """`Workers` on the workers of `team`. `admission` refuses a request before it is sent."""

    def __init__(
        self,
        team: Team,
        context: TeamContext,
        admission: Admission,
        *,
        trains: bool = True,
        size: int = 1,
    ) -> None:
        super().__init__(team, context, trains=trains, size=size)
        self._drawing = team if size == 1 else PartOfTeam(team, range(0, team.size, size))
        self._admission = admission
        self._rollout: list[RolloutFacts] = []  # of the last session
        self._sessions = SessionSum()

    @property
    def needs_calibration(self) -> bool:
        return self._needs_calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> None:
        with self._console.phase("calibrate"), self._spans("calibrate"):
            self._team.ask("calibrate", "calibrate", token_lists)
        self._take_state()

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None
    ) -> list[list[Completion]]:
        drawn: dict[str, dict[int, Completion]] = {request.id: {} for request in requests}
        places = {request.id: place for place, request in enumerate(requests)}
        with self._opened(LINGER_SECONDS, most_tokens(requests)) as session:
            for request in requests:
                session.submit(request)
            wait = SCORING_SECONDS if on_completions else 1.0
            while session.has_work:
                ended: list[tuple[int, int, Completion]] = []
                for event in session.events(wait):
                    if event.completion is not None:
                        drawn[event.request_id][event.sibling] = event.completion
                        ended.append((places[event.request_id], event.sibling, event.completion))
                if on_completions is not None:
                    wait = BACKLOG_SECONDS if on_completions(ended) else SCORING_SECONDS
        return [[completion for _, completion in sorted(drawn[request.id].items())] for request in requests]

    @contextmanager
    def session(self) -> Iterator[ManySession]:
        with self._opened(0.0) as session:
            yield session

    @contextmanager
    def _opened(self, linger_seconds: float, most: int | None = None) -> Iterator[ManySession]:
        with rollout_shown(self._console, most) as on_progress, self._spans("rollout"):
            rooms = self._team.ask("rollout", "open_session")[:: self._size]
            session = self._session_of(rooms, linger_seconds, on_progress)
            try:
                yield session
            except (WorkerLost, NonFiniteError):
                raise  # a lost worker's peers end with it
            except BaseException:
                self._close(session)
                raise
            self._rollout = self._close(session)
            self._sessions.add(self.last_session)

    def _session_of(self, rooms: Sequence[Room], linger_seconds: float, on_progress: OnProgress) -> ManySession:
        parts = (self._drawing, rooms, self._admission, self._deadlines)
        return ManySession(*parts, linger_seconds=linger_seconds, on_progress=on_progress)

    def _close(self, session: ManySession) -> list[RolloutFacts]:
        """Of each worker that draws; what is unfinished is cancelled."""
        facts: list[RolloutFacts] = self._team.ask("rollout", "close_session")
        return facts[:: self._size]

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        """Each worker scores a contiguous part."""
        bounds = [len(completions) * part // self._team.size for part in range(self._team.size + 1)]
        parts = [(list(completions[start:end]),) for start, end in pairwise(bounds)]
        return [score for part in self._team.ask_each("score", "score", parts) for score in part]

    def remember(self, answers: Sequence[EarlierAnswer]) -> None:
        """Each worker gets all answers, because any worker may sample the next one to the same prompt."""
        self._team.ask("load", "remember", answers)

    def forget_prefixes(self) -> None:
        self._team.ask("rollout", "forget_prefixes")

    @property
    def last_session(self) -> GenerationMetrics | None:
        """Of all workers, as one. None before the first session."""
        parts = [facts.metrics for facts in self._rollout if facts.metrics is not None]
        return parts[0].merged(parts[1:]) if parts else None

    def rollout_metrics(self) -> dict[str, float]:
        calibrated = bool(self._rollout) and self._rollout[0].scales_are_calibrated
        return self._sessions.take(scales_are_calibrated=calibrated)


def _say_what_was_read(console: Console, states: Sequence[WorkerState]) -> None:
    read = max(state.loaded.read_bytes for state in states) / 1e9
    if read:  # not of random weights
        quantized = max(state.loaded.quantized_bytes for state in states) / 1e9
        seconds = max(state.loaded.seconds for state in states)
        console.note(
            f"each worker read at most {size(read)} of weights and quantised {size(quantized)}, in {seconds:.1f} s"
        )


def memory_of(team: Team) -> dict[str, float]:
    """Of the worker with the largest peak."""
    parts: list[Mapping[str, float]] = team.ask("state", "memory_metrics")
    return {name: max(part[name] for part in parts) for name in parts[0]}


def paths_of(team: Team) -> dict[str, float]:
    """The slower path of any worker."""
    parts: list[dict[str, float]] = team.ask("state", "path_metrics")
    worst = {name: min if name.endswith(("/fused", "/captured")) else max for name in parts[0]}
    return {name: choose(part[name] for part in parts) for name, choose in worst.items()}


def times_of(team: Team, link_gb_per_second: float, but: str = "") -> dict[str, float]:
    """`phases_of` all phases except `but`. With several workers also the bytes of new weights that a worker received,
    their speed, and that of the link."""
    parts: list[dict[str, float]] = team.ask("state", "times", "", but)
    metrics: dict[str, float] = {}
    received = max(part.pop("publish/bytes", 0.0) for part in parts)
    if received:
        slowest = max(part.get("time/gather", 0.0) for part in parts)
        metrics = {"publish/bytes": received, "publish/gb_per_second": received / 1e9 / slowest}
        metrics["publish/link_gb_per_second"] = link_gb_per_second
    return metrics | phases_of(parts)


def phases_of(parts: Sequence[Mapping[str, float]], first: int = 0) -> dict[str, float]:
    """`time/PHASE/worker_N`, and in `time/PHASE/slowest` the number of the slowest worker.

    first: number of the worker that `parts` begins with."""
    metrics: dict[str, float] = {}
    for name in sorted({name for part in parts for name in part}):
        seconds = [part.get(name, 0.0) for part in parts]
        metrics |= {f"{name}/worker_{worker}": value for worker, value in enumerate(seconds, first)}
        metrics[f"{name}/slowest"] = float(first + seconds.index(max(seconds)))
    return metrics
