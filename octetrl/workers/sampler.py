"""Sampling on many workers: `generate`, on an open session over all of them with one session a worker behind it.

    submit -> assignment.py -> pieces for the workers that have room -> their sessions -> polls -> events

The driver keeps what has no room yet. One poll a worker is in flight, so that events arrive as they happen and a
forward costs no call. Pieces have ids of their own; events carry the id of the whole request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from octetrl.engine.admission import Admission
from octetrl.engine.request import RequestGroup
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import Completion, GenerationProgress, GenerationRequest, OnCompletions, OnProgress, SessionEvent
from octetrl.rollout.backend import GenerationMetrics, OnSession, SessionRecord, not_asked
from octetrl.system.errors import UserError
from octetrl.workers.assignment import Assignment, RequestPiece, Room
from octetrl.workers.clock import Clock
from octetrl.workers.hosted_session import SessionNews
from octetrl.workers.team import Call, Deadlines, PartOfTeam, ProcessTeam, WorkerLost

LINGER_SECONDS = 0.05  # of `generate`, whose completions nobody waits for
SCORING_SECONDS = 0.1  # at most between two calls of `on_completions`
BACKLOG_SECONDS = 0.005  # the same while it has something to do: each call gives a reward process one answer
POLL_SECONDS = 0.5  # that a worker waits for the first event
NOTHING_YET = GenerationProgress(0, 0, 0, 0, 0.0)


class ManySession:
    """`linger_seconds`: how long a worker collects events after the first, where nobody waits for them."""

    def __init__(
        self,
        team: ProcessTeam,
        rooms: Sequence[Room],
        admission: Admission,
        deadlines: Deadlines,
        *,
        linger_seconds: float = 0.0,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._team, self._admission, self._deadlines = team, admission, deadlines
        self._linger_seconds, self._on_progress = linger_seconds, on_progress
        self._assignment = Assignment(rooms)
        self._streaming: set[str] = set()
        self._polls: dict[int, Call] = {}
        self._began = time.monotonic()
        self._progress = [NOTHING_YET] * len(rooms)
        self._pages_in_use = [0] * len(rooms)
        self.num_pages = sum(room.pages for room in rooms)
        self._smallest_cache = min(room.tokens for room in rooms)
        self._moved_at = [self._began] * len(rooms)  # when each worker's progress last changed

    @property
    def has_work(self) -> bool:
        return self._assignment.has_work

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        if self._assignment.knows(request.id):
            raise UserError(f"request '{request.id}': a request with this id is not finished yet; use a different id")
        self._check_fits(self._admission.group(0, request))
        if streams:
            self._streaming.add(request.id)
        self._assignment.add(request)

    def _check_fits(self, group: RequestGroup) -> None:
        if group.limit - 1 > self._smallest_cache:  # the last token is never a query
            raise UserError(
                f"request '{group.request.id}': prompt and answer may take {group.limit} tokens, and a worker's KV"
                f" cache holds {self._smallest_cache}; raise engine.kv_cache_tokens (or engine.kv_memory_fraction), or"
                " lower max_new_tokens"
            )

    def cancel(self, request_id: str) -> None:
        self._streaming.discard(request_id)
        for piece in self._assignment.cancel(request_id):
            self._team.ask_one(piece.worker, "submit", "cancel", [piece.request.id])

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        """New events. Gives out work first, and waits for the first event, at most `wait_seconds`."""
        until = time.monotonic() + wait_seconds
        while True:
            self._give_out()
            for worker in range(self._team.size):
                if worker not in self._polls and self._assignment.busy(worker):
                    self._polls[worker] = self._team.begin(worker, "poll", POLL_SECONDS, self._linger_seconds)
            left = until - time.monotonic()
            events = self._take(max(0.0, left))
            if events or left <= 0 or not self._polls:
                return events

    def _give_out(self) -> None:
        now = time.monotonic()
        by_worker: dict[tuple[int, bool], list[RequestPiece]] = {}
        for piece in self._assignment.give():
            by_worker.setdefault((piece.worker, piece.of in self._streaming), []).append(piece)
        begun = []
        for (worker, streams), pieces in by_worker.items():
            self._moved_at[worker] = now
            begun.append(self._team.begin(worker, "submit", [piece.request for piece in pieces], streams))
        while begun:
            limit = self._deadlines.limit("submit")
            ended = self._team.wait_any(begun, limit)
            if not ended:
                why = f"it accepted no request; the limit is {limit:.0f} s (cluster.deadlines)"
                raise self._team.lose(begun[0].worker, "submit", time.monotonic() - now, why)
            for call in ended:
                self._team.result(call)
                begun.remove(call)
            self._deadlines.took("submit", time.monotonic() - now)

    def _take(self, seconds: float) -> list[SessionEvent]:
        if not self._polls:
            return []
        events: list[SessionEvent] = []
        for call in self._team.wait_any(list(self._polls.values()), seconds):
            news: SessionNews = self._team.result(call)
            del self._polls[call.worker]
            self._note(call.worker, news.progress)
            self._pages_in_use[call.worker] = news.pages_in_use
            events += self._of_requests(call.worker, news.events)
        self._check_all_move()
        return events

    def _of_requests(self, worker: int, events: Sequence[SessionEvent]) -> Iterator[SessionEvent]:
        """Events of a worker's pieces, with the ids of the whole requests."""
        for event in events:
            whole = self._assignment.request_of(worker, event.request_id)
            if whole is None:  # it was cancelled
                continue
            if event.completion is not None:
                self._assignment.finish(worker, event.request_id, event.sibling)
                if not self._assignment.knows(whole):
                    self._streaming.discard(whole)
            yield replace(event, request_id=whole)

    def _note(self, worker: int, progress: GenerationProgress | None) -> None:
        before, now = self._progress[worker], time.monotonic()
        if progress is None or replace(progress, seconds=before.seconds) == before:
            return
        self._deadlines.took("token", now - self._moved_at[worker])
        self._progress[worker], self._moved_at[worker] = progress, now
        if self._on_progress is not None:
            self._on_progress(self.progress())

    def progress(self) -> GenerationProgress:
        """The progress of all workers, as they last reported."""
        parts = self._progress
        return GenerationProgress(
            done=sum(part.done for part in parts),
            running=sum(part.running for part in parts),
            waiting=sum(part.waiting for part in parts) + self._assignment.num_waiting,
            generated_tokens=sum(part.generated_tokens for part in parts),
            seconds=time.monotonic() - self._began,
        )

    @property
    def pages_in_use(self) -> int:
        """The pages in use on all workers, as they last reported."""
        return sum(self._pages_in_use)

    def metrics(self) -> GenerationMetrics | None:
        """Metrics of the session so far. None if it has ended on a worker."""
        parts: list[GenerationMetrics | None] = self._team.ask("measure", "measure")
        counted = [part for part in parts if part is not None]
        return counted[0].merged(counted[1:]) if len(counted) == len(parts) else None

    def _check_all_move(self) -> None:
        """Raises WorkerLost for a worker that answers, and yet draws no token of what it was given."""
        now, limit = time.monotonic(), self._deadlines.limit("token")
        for worker, moved_at in enumerate(self._moved_at):
            if self._assignment.busy(worker) and now - moved_at > limit:
                raise self._team.lose(worker, "rollout", now - moved_at, "it drew no token")


class ManySampler:
    """Samples on the workers of `team`. `admission` refuses a request before it is sent."""

    def __init__(
        self, team: ProcessTeam, admission: Admission, deadlines: Deadlines, *, size: int = 1, first: int = 0
    ) -> None:
        """size: of each group of workers that share one model. first: number of the first worker among all of the
        run."""
        self._team, self._admission, self._deadlines = team, admission, deadlines
        self._size, self._first, self._clock = size, first, Clock()
        self._leaders = team if size == 1 else PartOfTeam(team, range(0, team.size, size))

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
    ) -> list[list[Completion]]:
        drawn: dict[str, dict[int, Completion]] = {request.id: {} for request in requests}
        places = {request.id: place for place, request in enumerate(requests)}
        with self.session(on_progress, on_end, linger_seconds=LINGER_SECONDS) as session:
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
    def session(
        self, on_progress: OnProgress | None = None, on_end: OnSession = not_asked, *, linger_seconds: float = 0.0
    ) -> Iterator[ManySession]:
        with self._clock("rollout") as took:
            rooms = self._team.ask("rollout", "open_session")[:: self._size]
            session = self._session_on(rooms, linger_seconds, on_progress)
            try:
                yield session
            except (WorkerLost, NonFiniteError):
                raise  # a lost worker's peers end with it
            except BaseException:
                self._close(session)
                raise
            records = self._close(session)
        on_end(self._record(records, took))

    def _session_on(self, rooms: Sequence[Room], linger_seconds: float, on_progress: OnProgress | None) -> ManySession:
        parts = (self._leaders, rooms, self._admission, self._deadlines)
        return ManySession(*parts, linger_seconds=linger_seconds, on_progress=on_progress)

    def _close(self, session: ManySession) -> list[SessionRecord]:
        """The record of each worker; what is unfinished is cancelled."""
        return self._team.ask("rollout", "close_session")

    def _record(self, records: Sequence[SessionRecord], took: Mapping[str, float]) -> SessionRecord:
        """The records of all workers as one."""
        parts = [one.metrics for one in records[:: self._size] if one.metrics is not None]
        peaks = [record.took["memory/peak_gb"] for record in records if "memory/peak_gb" in record.took]
        return SessionRecord(
            took={**took, "memory/peak_gb": max(peaks)} if peaks else took,
            metrics=parts[0].merged(parts[1:]) if parts else None,
            scales_are_calibrated=records[0].scales_are_calibrated,
            worker_seconds=tuple(record.took["time/rollout"] for record in records),
            first_worker=self._first,
        )
