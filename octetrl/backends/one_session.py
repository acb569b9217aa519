"""What the adapters to other engines have in common: a backend with one open session at a time, and that session.

`rollout/backend.py` says what a backend and a session promise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, ClassVar, Generic, Self, TypeVar

from octetrl.engine.request import RequestGroup, RunningSequence
from octetrl.records import GenerationRequest
from octetrl.system.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMetrics:
    """Metrics of one or several sessions. Preemptions and clamped K and V values are 0 where an engine has none."""

    completions: int
    generated_tokens: int
    seconds: float
    batch_occupancy: float  # mean share of the largest batch that ran
    idle_share: float
    preemptions: int = 0
    kv_saturation: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0

    def merged(self, others: Sequence[Self]) -> Self:
        """These and those of sessions that ran at the same time."""
        every = [self, *others]
        return self.joined(every, max(session.seconds for session in every))

    def followed_by(self, later: Self) -> Self:
        """These and those of a session that ran afterwards."""
        return self.joined([self, later], self.seconds + later.seconds)

    def joined(self, every: Sequence[Self], seconds: float) -> Self:
        """Shares are means, weighted by the seconds of their sessions."""
        whole = sum(session.seconds for session in every) or 1.0
        return replace(
            self,
            completions=sum(session.completions for session in every),
            generated_tokens=sum(session.generated_tokens for session in every),
            seconds=seconds,
            batch_occupancy=sum(session.batch_occupancy * session.seconds for session in every) / whole,
            idle_share=sum(session.idle_share * session.seconds for session in every) / whole,
        )


Key = TypeVar("Key", bound=Hashable)  # by which the other engine knows a sibling
Metrics = TypeVar("Metrics", bound=SessionMetrics)


class AdapterSession(ABC, Generic[Key, Metrics]):
    """An open session with another engine. Leaving it closes it. `on_close` gets its metrics."""

    def __init__(self, on_close: Callable[[Metrics], None]) -> None:
        self._on_close = on_close
        self._running: dict[Key, RunningSequence] = {}  # unfinished siblings
        self._num_submitted = 0
        self._is_open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        """Adds a request. Raises UserError for one that cannot be served, or whose id belongs to an unfinished one."""
        if self._of_request(request.id):
            raise UserError(f"request '{request.id}': a request with this id is not finished yet; use a different id")
        self.accept(self.checked(request), streams=streams)

    @abstractmethod
    def checked(self, request: GenerationRequest) -> RequestGroup:
        """The request's siblings, not yet submitted. Raises UserError."""

    @abstractmethod
    def accept(self, group: RequestGroup, *, streams: bool = False) -> None:
        """`submit` for a request that was checked."""

    def cancel(self, request_id: str) -> None:
        """Forgets the request's siblings; no event of theirs follows. Unknown ids are ignored."""
        self._drop(self._of_request(request_id))

    def _of_request(self, request_id: str) -> list[Key]:
        return [key for key, sibling in self._running.items() if sibling.group.request.id == request_id]

    @abstractmethod
    def _drop(self, keys: list[Key]) -> None:
        """Takes unfinished siblings out of `_running`."""

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    @abstractmethod
    def metrics(self) -> Metrics:
        """The session's metrics so far."""

    def close(self) -> None:
        """Forgets unfinished requests. Does nothing on a closed session."""
        if self._is_open:
            self._drop(list(self._running))
            self._is_open = False
            self._on_close(self.metrics())


Session = TypeVar("Session", bound=AdapterSession[Any, Any])


class OneSession(Generic[Metrics]):
    """A backend that has at most one open session, and keeps the metrics of the last one."""

    NAME: ClassVar[str]  # of the engine, in messages

    def __init__(self) -> None:
        self.metrics: Metrics | None = None
        self._is_busy = False

    @contextmanager
    def _opened(self, session: Session) -> Iterator[Session]:
        """The session, until the block ends."""
        self._is_busy = True
        with session:
            yield session

    def _closed(self, metrics: Metrics) -> None:
        self.metrics, self._is_busy = metrics, False

    def _refuse_while_open(self, what: str) -> None:
        if self._is_busy:
            raise RuntimeError(f"{what} is not possible while {self.NAME} has an open session; close it first")
