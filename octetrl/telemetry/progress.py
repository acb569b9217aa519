"""What runs now: the phases of a step with what is left of each, for a terminal's last lines and a pipe's heartbeat.

    rollout     ━━━━━━━━━━━━━━━━━━━───────────  41/64 answers  812 tok/s  2.1 s left
    step 3/20   ━━━━──────────────────────────  25 s left

The time left of a phase is that of the same phase in the step before; in the first step it follows from what is done.
Of a rollout at least the share of its tokens is done that were sampled of all that it may have.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from rich.text import Text

from octetrl.telemetry.step_line import duration

UNITS = {"rollout": "answers", "evaluate": "answers", "generate": "answers", "train": "micro-batches"}
LEAST_BAR, MOST_BAR = 8, 30  # columns
ALMOST = 0.99  # the most that a bar shows whose phase has not ended


@dataclass(slots=True)
class Phase:
    """A phase that runs. `before`: seconds that it took the last time; None: it is the first time."""

    name: str
    before: float | None = None
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    total: int | None = None
    tokens: int | None = None
    most_tokens: int | None = None

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def share(self) -> float | None:
        """The part of it that is done; None: unknown."""
        if self.total:
            by_tokens = (self.tokens or 0) / self.most_tokens if self.most_tokens else 0.0
            return min(max(self.done / self.total, by_tokens), 1.0)
        return None if not self.before else min(self.seconds / self.before, ALMOST)

    @property
    def seconds_left(self) -> float | None:
        if self.before is not None and self.before > self.seconds:
            return self.before - self.seconds
        share = self.share
        if self.total and share and share < 1:
            return self.seconds * (1 - share) / share
        return None

    @property
    def facts(self) -> list[str]:
        """What is done and how fast, in words."""
        unit = UNITS.get(self.name, "")
        found = [f"{self.done}/{self.total} {unit}".rstrip()] if self.total else []
        if self.tokens is not None and self.seconds > 0:
            found.append(f"{self.tokens / self.seconds:,.0f} tok/s")
        return found

    @property
    def time_left(self) -> str:
        left = self.seconds_left
        return f"{duration(left)} left" if left is not None and left >= 0.5 else f"{duration(self.seconds) or '0 s'}"


class StepTimes:
    """Mean seconds of this process's steps, from which the time left of a run is extrapolated.

    All steps count, because steps of one run may differ a hundredfold (without an update, with an evaluation) and the
    mean of a few would jump. The first one compiles kernels; it counts only until there is another."""

    def __init__(self) -> None:
        self._first = self._others = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        if self._count:
            self._others += seconds
        else:
            self._first = seconds
        self._count += 1

    @property
    def mean(self) -> float:
        """0 before the first step."""
        return self._others / (self._count - 1) if self._count > 1 else self._first


def heartbeat(phase: Phase, step: str) -> str:
    """One line for a pipe."""
    left = phase.seconds_left
    facts = [*phase.facts, f"{phase.seconds:.0f} s", f"{duration(left)} left" if left else ""]
    return f"  {step}{', ' if step else ''}{phase.name}: {', '.join(filter(None, facts))}"


def bar_line(label: str, share: float | None, facts: list[str], width: int, room: int, *, plain: bool) -> Text:
    """A line with a bar, at most `width` columns wide. `room`: columns of the label. `plain`: only ASCII."""
    text = Text(f"  {label:<{room}}  ", no_wrap=True, overflow="crop")
    columns = min(MOST_BAR, (width - len(text)) // 3)
    if columns >= LEAST_BAR:
        full, rest = ("#", ".") if plain else ("━", "─")
        filled = 0 if share is None else int(columns * share)
        text.append(full * filled, style="cyan")
        text.append(f"{rest * (columns - filled)}  ", style="bright_black")
    kept = list(facts)
    while len(kept) > 1 and len(text) + len("  ".join(kept)) > width:
        del kept[-2]  # the last one is the time left
    text.append("  ".join(kept))
    text.truncate(width)
    return text
