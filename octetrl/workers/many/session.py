"""An open session over all workers: `RolloutSession` for the driver, one session a worker behind it.

    submit -> assignment.py -> pieces for the workers that have room -> their sessions -> polls -> events

The driver keeps what has no room yet. One poll a worker is in flight, so that events arrive as they happen and a
forward costs no call. Pieces have ids of their own; events carry the id of the whole request.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from octetrl.engine.admission import Admission
from octetrl.engine.request import RequestGroup
from octetrl.records import GenerationProgress, GenerationRequest, OnProgress, SessionEvent
from octetrl.rollout.backend import GenerationMetrics
from octetrl.system.errors import UserError
from octetrl.workers.many.assignment import Assignment, RequestPiece, Room
from octetrl.workers.many.hosted_session import SessionNews
from octetrl.workers.many.team import Call, Deadlines, ProcessTeam

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
