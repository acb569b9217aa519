"""Sampling on many workers: one session over all of them (session.py, assignment.py), and `generate` on top of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from octetrl.engine.admission import Admission
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import Completion, GenerationRequest, OnCompletions, OnProgress
from octetrl.rollout.backend import OnSession, SessionRecord, not_asked
from octetrl.workers.clock import Clock
from octetrl.workers.many.assignment import Room
from octetrl.workers.many.session import ManySession
from octetrl.workers.many.team import Deadlines, PartOfTeam, ProcessTeam, WorkerLost

LINGER_SECONDS = 0.05  # of `generate`, whose completions nobody waits for
SCORING_SECONDS = 0.1  # at most between two calls of `on_completions`
BACKLOG_SECONDS = 0.005  # the same while it has something to do: each call gives a reward process one answer


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
