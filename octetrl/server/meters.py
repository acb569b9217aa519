"""The metrics of /metrics: counters and gauges of the Prometheus client, in the app's own registry.

The HTTP side updates the counters. Gauges are read from the engine at each request. The engine's thread reads metrics
that are on the device (saturation) every few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from octetrl.telemetry.glossary import explained

if TYPE_CHECKING:
    from octetrl.server.intake import Intake

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class Meters:
    """All metrics of the server. Their names begin with `octetrl_`."""

    def __init__(self, intake: Intake) -> None:
        self.registry = CollectorRegistry()
        engine = intake.engine
        self.responses = Counter(
            "octetrl_responses", "Responses by path and status.", ["path", "status"], registry=self.registry
        )
        self._prompt_tokens = Counter("octetrl_prompt_tokens", "Tokens of prompts.", registry=self.registry)
        self._generated_tokens = Counter("octetrl_generated_tokens", "Tokens of answers.", registry=self.registry)
        self._seconds = Histogram(
            "octetrl_answer_seconds",
            "Seconds from a request's admission to its end.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self.first_token_seconds = Histogram(
            "octetrl_first_token_seconds",
            "Seconds from a stream's start to its first token.",
            buckets=SECONDS,
            registry=self.registry,
        )
        gauges = {
            "running_completions": ("Completions being generated.", lambda: engine.progress.running),
            "waiting_completions": ("Completions waiting to be generated.", lambda: engine.progress.waiting),
            "unfinished_completions": ("Completions admitted and not finished.", lambda: intake.num_completions),
            "cancelled_requests": ("Requests cancelled, for example by a disconnect.", lambda: intake.cancelled),
            "engine_failures": ("Errors in the engine. Each failed all current requests.", lambda: engine.failures),
            "cache_pages": ("Pages of the KV cache.", lambda: engine.num_pages),
            "cache_pages_in_use": ("Pages of the KV cache in use.", lambda: engine.pages_in_use),
            "preemptions": ("Completions that were preempted.", lambda: _of(intake, "preemptions")),
            "batch_occupancy": ("Mean share of max_batch that is in use.", lambda: _of(intake, "batch_occupancy")),
            "idle_share": ("Share of the time without work.", lambda: _of(intake, "idle_share")),
            "kv_saturation": ("Share of K and V values clamped.", lambda: _of(intake, "kv_saturation")),
        }
        for name, (says, read) in gauges.items():
            Gauge(f"octetrl_{name}", says, registry=self.registry).set_function(read)

    def count_answer(self, prompt_tokens: int, generated_tokens: int, seconds: float) -> None:
        self._prompt_tokens.inc(prompt_tokens)
        self._generated_tokens.inc(generated_tokens)
        self._seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def run_meters(runs: Iterable[tuple[str, Mapping[str, float | None]]]) -> bytes:
    """The text of /metrics for runs: a gauge for each metric of the name and last step of each run. A metric that is
    not finite is left out, and so is one whose name would be that of another, as `a/b` and `a_b`."""
    registry = CollectorRegistry()
    gauges: dict[str, tuple[str, Gauge]] = {}
    for run, row in runs:
        for name, value in row.items():
            plain = re.sub(r"\W", "_", f"octetrl_run_{name}", flags=re.ASCII)
            if plain not in gauges:
                known = explained(name)
                says = known.meaning if known is not None else name
                gauges[plain] = name, Gauge(plain, says, ["run"], registry=registry)
            of, gauge = gauges[plain]
            if of == name and value is not None:
                gauge.labels(run).set(value)
    return generate_latest(registry)


def _of(intake: Intake, name: str) -> float:
    """Return a metric of the session, as it was last read. 0 before the first read."""
    metrics = intake.engine.metrics
    return 0.0 if metrics is None else float(getattr(metrics, name))
