"""Metrics of a session with vLLM: progress while it runs, and totals at its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octetrl.backends.one_session import SessionMetrics
from octetrl.records import GenerationProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmMetrics(SessionMetrics):
    """Metrics of one session. The largest batch is `engine.max_batch`."""

    prompt_tokens: int
    cache_occupancy: float  # largest share of the pages in use
    kv_capacity_tokens: int

    def joined(self, every: Sequence[VllmMetrics], seconds: float) -> VllmMetrics:
        return replace(
            SessionMetrics.joined(self, every, seconds),
            prompt_tokens=sum(one.prompt_tokens for one in every),
            cache_occupancy=max(one.cache_occupancy for one in every),
        )

    def named(self, *, scales_are_calibrated: bool) -> dict[str, float]:
        """By the names of a step's metrics."""
        return {
            "rollout/tokens_per_second": self.tokens_per_second,
            "rollout/batch_occupancy": self.batch_occupancy,
            "rollout/cache_occupancy": self.cache_occupancy,
        }


@dataclass(slots=True)
class Tally:
    """Running counts of one session."""

    max_batch: int
    started: float = field(default_factory=time.perf_counter)
    done: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    rows: int = 0  # summed over steps
    cache_occupancy: float = 0.0
    idle_seconds: float = 0.0
    idle_since: float | None = None

    def __post_init__(self) -> None:
        self.idle_since = self.started

    def count_request(self, prompt_tokens: int) -> None:
        self.prompt_tokens += prompt_tokens
        if self.idle_since is not None:
            self.idle_seconds += time.perf_counter() - self.idle_since
            self.idle_since = None

    def count_step(self, running: int, cache_occupancy: float) -> None:
        self.steps += 1
        self.rows += running
        self.cache_occupancy = max(self.cache_occupancy, cache_occupancy)

    def count_idle(self) -> None:
        if self.idle_since is None:
            self.idle_since = time.perf_counter()

    def progress(self, running: int, waiting: int) -> GenerationProgress:
        seconds = time.perf_counter() - self.started
        return GenerationProgress(self.done, running, waiting, self.generated_tokens, seconds)

    def metrics(self, kv_capacity_tokens: int) -> VllmMetrics:
        now = time.perf_counter()
        idle = self.idle_seconds + (0.0 if self.idle_since is None else now - self.idle_since)
        seconds = now - self.started
        return VllmMetrics(
            completions=self.done,
            generated_tokens=self.generated_tokens,
            prompt_tokens=self.prompt_tokens,
            seconds=seconds,
            batch_occupancy=self.rows / (self.steps * self.max_batch) if self.steps else 0.0,
            cache_occupancy=self.cache_occupancy,
            kv_capacity_tokens=kv_capacity_tokens,
            idle_share=idle / seconds if seconds > 0 else 0.0,
        )
