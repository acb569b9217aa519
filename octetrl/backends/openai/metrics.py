"""Metrics of a session with a server: progress while it runs, and totals at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octetrl.backends.session_metrics import SessionMetrics
from octetrl.records import GenerationProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics(SessionMetrics):
    """Metrics of one session. The largest batch is `engine.openai.concurrency`."""

    failed: int  # siblings without an answer

    def joined(self, every: Sequence[ServerMetrics], seconds: float) -> ServerMetrics:
        return replace(SessionMetrics.joined(self, every, seconds), failed=sum(one.failed for one in every))

    def named(self, *, scales_are_calibrated: bool) -> dict[str, float]:
        """By the names of a step's metrics."""
        return {
            "rollout/tokens_per_second": self.tokens_per_second,
            "rollout/batch_occupancy": self.batch_occupancy,
        }


@dataclass(slots=True)
class Tally:
    """Running counts of one session."""

    concurrency: int
    started: float = field(default_factory=time.perf_counter)
    done: int = 0
    failed: int = 0
    generated_tokens: int = 0
    idle_seconds: float = 0.0
    in_flight_seconds: float = 0.0
    _in_flight: int = 0
    _since: float = field(default_factory=time.perf_counter)

    def unfinished(self, count: int) -> None:
        """`count` siblings are unfinished from now on."""
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self.in_flight_seconds += seconds * min(self._in_flight, self.concurrency)
        self.idle_seconds += 0.0 if self._in_flight else seconds
        self._in_flight = count

    def progress(self, unfinished: int) -> GenerationProgress:
        running = min(unfinished, self.concurrency)
        seconds = time.perf_counter() - self.started
        return GenerationProgress(self.done, running, unfinished - running, self.generated_tokens, seconds)

    def metrics(self) -> ServerMetrics:
        self.unfinished(self._in_flight)
        seconds = self._since - self.started
        whole = seconds or 1.0
        return ServerMetrics(
            completions=self.done,
            generated_tokens=self.generated_tokens,
            failed=self.failed,
            seconds=seconds,
            batch_occupancy=self.in_flight_seconds / (whole * self.concurrency),
            idle_share=min(1.0, self.idle_seconds / whole),
        )
