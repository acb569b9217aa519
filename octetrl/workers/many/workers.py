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
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from octetrl.engine.admission import Admission
from octetrl.environments.scoring import Score
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
    worker_times,
)
from octetrl.rollout.backend import OnSession, SessionRecord, not_asked
from octetrl.system.errors import RunFailed
from octetrl.telemetry.console import Console
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import PackingLayout
from octetrl.trainer.peers import serve_store
from octetrl.workers.clock import Clock
from octetrl.workers.many.assignment import Room
from octetrl.workers.many.balance import Costs, deal
from octetrl.workers.many.plan import WorkerState
from octetrl.workers.many.session import ManySession
from octetrl.workers.many.status import size
from octetrl.workers.many.team import Deadlines, PartOfTeam, Team, WorkerLost
from octetrl.workers.training_progress import most_tokens, rollout_shown

LINGER_SECONDS = 0.05  # of `generate`, whose completions nobody waits for
SCORING_SECONDS = 0.1  # at most between two calls of `on_completions`
PHASES = frozenset({"time/train", "time/calibrate", "time/publish", "time/gather"})  # timed on each worker
BACKLOG_SECONDS = 0.005  # the same while it has something to do: each call gives a reward process one answer


class WorkersDiffer(RunFailed):
    """A worker holds other weights than its peers."""


@dataclass(frozen=True, slots=True)
class TeamContext:
    """What several workers of a run share beside their team."""

    costs: Costs  # of micro-batches, by which these are dealt out
    deadlines: Deadlines
    console: Console


class ManyLearningWorkers:
    """`LearningWorkers` on the workers of `team`, which have not loaded their model yet."""

    def __init__(self, team: Team, context: TeamContext, *, trains: bool = True, size: int = 1, first: int = 0) -> None:
        """`size`: of each group of workers that share one model. Workers of a group follow one another."""
        self._team, self._costs, self._deadlines = team, context.costs, context.deadlines
        self._console, self._clock = context.console, Clock()
        self._size = size  # of a group of workers that share one model
        self._first = first  # number of the first worker among all of the run
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
        with self._console.phase("train"), self._clock("train") as took:
            try:
                updates: list[PolicyUpdate] = self._team.ask_each("train", verb, arguments)
            except NonFiniteError:  # before any worker's step; or after it, by a weight or the next minibatch
                states: list[WorkerState] = self._team.ask("state", "state")
                self._weights_are_whole = all(state.weights_are_whole for state in states)
                raise
        self._weights_are_whole = True
        self._take_state()
        return replace(updates[0], metrics=self._of_all([one.metrics for one in updates], took))

    def publish(self, policy_version: int) -> Published:
        with self._console.phase("publish"), self._clock("publish") as took:
            published: list[Published] = self._team.ask("publish", "publish", policy_version)
        for part in range(self._size):  # workers with the same rows of the model
            self._check_equal([one.weights_digest for one in published[part :: self._size]], part)
        return replace(published[0], metrics=self._of_all([one.metrics for one in published], took))

    def _of_all(self, parts: Sequence[Mapping[str, float]], took: Mapping[str, float]) -> dict[str, float]:
        """The metrics of one verb, from those of each worker; `took`: the driver's times."""
        found = of_workers(parts)
        if received := found.get("publish/bytes", 0.0):
            slowest = max(part["time/gather"] for part in parts)
            found["publish/gb_per_second"] = received / 1e9 / slowest
            found["publish/link_gb_per_second"] = self.link_gb_per_second
        else:
            found.pop("publish/bytes", None)
        return {**found, **took}

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
        first: int = 0,
    ) -> None:
        super().__init__(team, context, trains=trains, size=size, first=first)
        self._drawing = team if size == 1 else PartOfTeam(team, range(0, team.size, size))
        self._admission = admission

    @property
    def needs_calibration(self) -> bool:
        return self._needs_calibration

    def calibrate(self, token_lists: Sequence[Sequence[int]]) -> dict[str, float]:
        with self._console.phase("calibrate"), self._clock("calibrate") as took:
            parts: list[Mapping[str, float]] = self._team.ask("calibrate", "calibrate", token_lists)
        self._take_state()
        return self._of_all(parts, took)

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        drawn: dict[str, dict[int, Completion]] = {request.id: {} for request in requests}
        places = {request.id: place for place, request in enumerate(requests)}
        with self._opened(on_end, LINGER_SECONDS, most_tokens(requests)) as session:
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
    def session(self, on_end: OnSession = not_asked) -> Iterator[ManySession]:
        with self._opened(on_end, 0.0) as session:
            yield session

    @contextmanager
    def _opened(self, on_end: OnSession, linger_seconds: float, most: int | None = None) -> Iterator[ManySession]:
        with rollout_shown(self._console, most) as on_progress, self._clock("rollout") as took:
            rooms = self._team.ask("rollout", "open_session")[:: self._size]
            session = self._session_of(rooms, linger_seconds, on_progress)
            try:
                yield session
            except (WorkerLost, NonFiniteError):
                raise  # a lost worker's peers end with it
            except BaseException:
                self._close(session)
                raise
            records = self._close(session)
        on_end(self._record(records, took))

    def _session_of(self, rooms: Sequence[Room], linger_seconds: float, on_progress: OnProgress) -> ManySession:
        parts = (self._drawing, rooms, self._admission, self._deadlines)
        return ManySession(*parts, linger_seconds=linger_seconds, on_progress=on_progress)

    def _close(self, session: ManySession) -> list[SessionRecord]:
        """Of each worker; what is unfinished is cancelled."""
        return self._team.ask("rollout", "close_session")

    def _record(self, records: Sequence[SessionRecord], took: Mapping[str, float]) -> SessionRecord:
        """Of all workers, as one."""
        parts = [one.metrics for one in records[:: self._size] if one.metrics is not None]
        peaks = [record.took["memory/peak_gb"] for record in records if "memory/peak_gb" in record.took]
        return SessionRecord(
            took={**took, "memory/peak_gb": max(peaks)} if peaks else took,
            metrics=parts[0].merged(parts[1:]) if parts else None,
            scales_are_calibrated=records[0].scales_are_calibrated,
            worker_seconds=tuple(record.took["time/rollout"] for record in records),
            first_worker=self._first,
        )

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


def _say_what_was_read(console: Console, states: Sequence[WorkerState]) -> None:
    read = max(state.loaded.read_bytes for state in states) / 1e9
    if read:  # not of random weights
        quantized = max(state.loaded.quantized_bytes for state in states) / 1e9
        seconds = max(state.loaded.seconds for state in states)
        console.note(
            f"each worker read at most {size(read)} of weights and quantised {size(quantized)}, in {seconds:.1f} s"
        )


def of_workers(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The metrics of a verb that all workers ran: the largest peak of memory, the slower path of any worker, and of
    each phase the seconds of each (`worker_times`). Of what else they say, the first worker's counts."""
    found: dict[str, float] = {}
    for name in {name: None for part in parts for name in part}:
        values = [part.get(name, 0.0) for part in parts]
        if name in PHASES:
            found |= worker_times(name, values)
        elif name.endswith(("/fused", "/captured")):
            found[name] = min(values)
        elif name.startswith("memory/") or name in ("fp8/gluon_fallbacks", "publish/bytes"):
            found[name] = max(values)
        else:
            found[name] = parts[0][name]
    return found
