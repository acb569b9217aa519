"""The interface between a run and the engine that samples its completions: this project's engine, or another one.

    with backend.session() as session:          an open session is asynchronous: requests in, events out
        session.submit(request)
        for event in session.events(wait_seconds=0.5): ...

    backend.put_weights(weights)                codes, scales and tensors by name, with their policy version
    backend.weights_digest()                    of the weights that the backend holds, read back from memory

`engine/engine.py` is the first implementation. A worker owns a backend; `Drive` sees a session alone. The caller never
runs a forward: a session in another process works on its own and costs no call a forward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol, Self, runtime_checkable

from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationProgress,
    GenerationRequest,
    OnCompletions,
    OnProgress,
    SessionEvent,
    Task,
    joined,
    worker_times,
)

if TYPE_CHECKING:
    from octetrl.records import WeightSet


def first_request(place: int, task: Task) -> str:
    """Id of the request for a task's first turn, with all its siblings."""
    return f"{place}:{task.id}"


def seed_of(*parts: int) -> int:
    """A request's seed, from 0 to 2^63 - 1: a hash of the run's or the call's seed and the request's place in it."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def seed_in_call(seed: int, place: int) -> int:
    """The seed of the prompt at `place` of a call with `seed`. The first has the call's own, so that an answer can be
    asked for alone, also from a server behind a backend; the others have hashes."""
    return seed_of(seed, place) if place else seed


class GenerationMetrics(Protocol):
    """What one session did. Engines with more to say have more fields."""

    @property
    def preemptions(self) -> int:
        """How often a completion lost its cache to others, and was computed again."""

    @property
    def batch_occupancy(self) -> float:
        """Mean share of `engine.max_batch` in use, 0 to 1."""

    @property
    def idle_share(self) -> float:
        """Share of the time without work, 0 to 1."""

    @property
    def kv_saturation(self) -> float:
        """Share of K and V values that were clamped, 0 to 1."""

    def merged(self, others: Sequence[Self], /) -> Self:
        """These and the metrics of sessions that ran at the same time on other workers, as one."""

    def followed_by(self, later: Self, /) -> Self:
        """These and the metrics of a session that ran afterwards, as one."""

    def named(self, *, scales_are_calibrated: bool) -> dict[str, float]:
        """By the names of the step's metrics. Values that were not measured are left out."""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What a `generate` or a session did, and what it took. The caller gets it with the completions.

    Example: SessionRecord({"time/rollout": 12.5, "memory/peak_gb": 61.2}, metrics=engine.metrics)
    """

    took: Mapping[str, float]  # seconds and memory (workers/clock.py)
    metrics: GenerationMetrics | None = None  # None: the engine does not count
    scales_are_calibrated: bool = False
    worker_seconds: tuple[float, ...] = ()  # of each of several workers
    first_worker: int = 0  # number of the first of them

    def followed_by(self, later: SessionRecord) -> SessionRecord:
        """This and a session that ran afterwards on the same workers, as one."""
        metrics = later.metrics if self.metrics is None else self.metrics
        if self.metrics is not None and later.metrics is not None:
            metrics = self.metrics.followed_by(later.metrics)
        pairs = zip_longest(self.worker_seconds, later.worker_seconds, fillvalue=0.0)
        return replace(
            later, took=joined(self.took, later.took), metrics=metrics, worker_seconds=tuple(map(sum, pairs))
        )

    def named(self) -> dict[str, float]:
        """By the names of the step's metrics."""
        counted = {} if self.metrics is None else self.metrics.named(scales_are_calibrated=self.scales_are_calibrated)
        return {**counted, **self.took, **worker_times("time/rollout", self.worker_seconds, self.first_worker)}


OnSession = Callable[[SessionRecord], None]
"""Takes the record of a session when it has ended."""


def not_asked(record: SessionRecord) -> None:
    """The `OnSession` of a caller that needs no metrics."""


class RolloutSession(Protocol):
    """Accepts requests while others are in flight, and returns their tokens as events."""

    @property
    def has_work(self) -> bool:
        """Whether a submitted request is unfinished."""

    def submit(self, request: GenerationRequest, /, *, streams: bool = False) -> None:
        """Adds a request. `streams`: its tokens are reported as they are sampled, not only as whole completions.

        Raises UserError for a request that cannot be served, or whose id belongs to an unfinished request.
        """

    def cancel(self, request_id: str, /) -> None:
        """Stops the request's siblings; no further event of theirs follows. Unknown ids are ignored."""

    def events(self, wait_seconds: float = 0.0, /) -> Sequence[SessionEvent]:
        """New events since the last call. Waits for the first event, at most `wait_seconds`, if others compute."""


@runtime_checkable
class KnowsLengths(Protocol):
    """A session that knows how long unfinished answers are. Learning beside the tail needs it."""

    def answer_lengths(self) -> Mapping[str, int]:
        """Tokens so far of each unfinished request's longest unfinished answer."""


@runtime_checkable
class TellsAnswers(Protocol):
    """A session whose unfinished answers can continue in another engine (`GenerationRequest.said`)."""

    def answers_so_far(self) -> Mapping[tuple[str, int], tuple[Sequence[int], Sequence[float]]]:
        """Tokens and log-probs so far of each unfinished answer, by request and sibling. Both are empty for one that
        has not begun."""


@runtime_checkable
class RemembersAnswers(Protocol):
    """A backend that makes drafts from answers of earlier steps (`engine.speculation`)."""

    def remember(self, answers: Sequence[EarlierAnswer], /) -> None:
        """Answers that it did not sample itself since it was built, oldest first."""


class MeasuredSession(RolloutSession, Protocol):
    """A session that says how full it is: for a server, and for the worker that steps it."""

    def progress(self) -> GenerationProgress:
        """Counts of completions and tokens so far. Any thread may ask; it costs no wait for the device."""

    @property
    def num_pages(self) -> int:
        """Capacity of the KV cache in pages of `engine.page_size` tokens."""

    @property
    def pages_in_use(self) -> int:
        """The pages in use, of `num_pages`. Any thread may ask."""

    def metrics(self) -> GenerationMetrics | None:
        """Metrics of the session so far; it may wait for the device. None: not counted, or the session has ended."""


class BackendSession(MeasuredSession, Protocol):
    """A session of one backend. A session over many workers has no `adopt`."""

    def adopt(self, put: Callable[[], int], /, *, keeps_cache: bool) -> Sequence[SessionEvent]:
        """Continues with other weights: `put` calls `put_weights` and returns the policy version.

        Unfinished completions keep their tokens. `keeps_cache` false: their cache is computed again. Returns events of
        the forwards that were in flight. Only `cluster.weights_in_flight` calls it; an engine that cannot do this
        raises UserError.
        """


class RolloutBackend(Protocol):
    """An engine that generates. One policy version serves a call of `generate` or a session."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
        /,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests."""

    def session(self, on_progress: OnProgress | None = None, /) -> AbstractContextManager[BackendSession]:
        """An open session. One at a time; new weights are refused while it is open."""

    def put_weights(self, weights: WeightSet, /) -> None:
        """Loads the weights of a new policy version, and drops the prefixes of the old one."""

    def weights_digest(self, *, covers_all: bool = False) -> str:
        """Digest of the weights and scales that the backend holds, read back from where its kernels read them.

        `covers_all`: the digest covers every tensor, not only FP8 weights and adapters. Raises RuntimeError naming the
        first tensor that is not the one last put in.
        """

    def forget_prefixes(self) -> None:
        """Drops all cached prefixes: the next request prefills its whole prompt."""

    def sleep(self) -> None:
        """Frees the memory of the KV cache until the next request or `wake`."""

    def wake(self) -> None:
        """Allocates the KV cache now. `generate` and `session` do so too."""

    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the last `generate` or session, by the names of the step's metrics; empty before the first."""

    @property
    def metrics(self) -> GenerationMetrics | None:
        """The same as a record, to be merged over workers. None before the first, or if it is not counted."""
