"""Show the progress of a run on the console.

    live    (a terminal)  a line per step, above the phases that run now, which stay at the bottom (below)
    plain   (pipes, CI)   a line per step of at most 120 columns, and one a minute within a phase
    a notebook            one display with a bar and a curve (notebook.py)
    quiet                 only warnings

`auto` is live on a terminal, the display in a notebook, and plain elsewhere. Warnings go to stderr, so they are visible
even if stdout is a pipe, or into a notebook's display; the run takes them for its folder (`take_warnings`). The console
only shows metrics. It computes and stores none. Phases may run in several threads.

**Progress.** What runs now: the phases of a step with what is left of each, for a terminal's last lines and a pipe's
heartbeat.

    rollout     ━━━━━━━━━━━━━━━━━━━───────────  41/64 answers  812 tok/s  2.1 s left
    step 3/20   ━━━━──────────────────────────  25 s left

The time left of a phase is that of the same phase in the step before; in the first step it follows from what is done.
Of a rollout at least the share of its tokens is done that were sampled of all that it may have.

**A lost terminal.** A run goes on when its terminal is closed or the reader of its output ends. Within `keeps_writing`
SIGHUP is ignored, as by nohup, also in processes that the run starts. The first write that finds no reader opens
`console.log` in the run's folder and makes it stdout or stderr, so everything that follows goes there, too.
"""

from __future__ import annotations

import errno
import math
import os
import signal
import statistics
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.text import Text

from octetrl.config.limits import MISMATCH_LIMIT
from octetrl.config.ranking import lower_is_better
from octetrl.system.errors import error_line
from octetrl.system.text import escaped, printable
from octetrl.telemetry.glossary import own_metrics
from octetrl.telemetry.metrics import BETWEEN_STEPS
from octetrl.telemetry.notebook import Bar, notebook_view
from octetrl.telemetry.step_line import (
    WIDTH,
    LinePart,
    StepLine,
    Tone,
    duration,
    environment_parts,
    evaluated_metric,
    evaluation_parts,
    line,
    rows_of,
)

Mode = Literal["auto", "plain", "quiet"]

HEARTBEAT_SECONDS, VIEW_SECONDS = 60.0, 1.0
FRAMES = 4.0  # a second
STYLES: dict[Tone, str] = {"plain": "", "good": "green", "warn": "yellow", "bad": "bold red"}
AFTER = {"rollout": "rewards"}  # what a step does between two phases
MOST_WORKERS = 8  # with a line each
OF_EVALUATIONS = {  # lines below an evaluation's: the form of the metrics' names
    "  accuracy by environment": "eval/environments/{}/accuracy",
    "  loss by set": "eval/{}/loss",
    "  accuracy by set": "eval/{}/accuracy",
    "  terms of the reward": "eval/component/{}",
}

_on_screen: list[Console] = []  # with phases at the bottom of the terminal


class Console:
    """The console of a run of `total_steps`. `out` and `err` are for tests; None: stdout and stderr.

    mismatch_limit: the recipe's `mismatch.warn_above`."""

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        out: TextIO | None = None,
        err: TextIO | None = None,
        *,
        mismatch_limit: float = MISMATCH_LIMIT,
    ) -> None:
        screens = cast(TextIO, Screen("stdout")), cast(TextIO, Screen("stderr"))
        self._out = RichConsole(file=out or screens[0], highlight=False, soft_wrap=True)
        self._err = RichConsole(file=err or screens[1], highlight=False, soft_wrap=True)
        self._view = notebook_view() if mode == "auto" and out is None else None
        can_be_live = mode == "auto" and self._view is None
        self._is_live = can_be_live and self._out.is_terminal and not self._out.is_dumb_terminal
        self._is_ascii = not self._out.encoding.lower().startswith("utf")
        self._quiet = mode == "quiet"
        self._collected: list[str] = []  # lines for it
        self._total_steps = total_steps
        self._warnings: list[str] = []  # that nobody took yet
        self.workers: Callable[[], Sequence[str]] | None = None  # a line for each of several workers
        self._phases: dict[int, Phase] = {}  # that run now, by thread
        self._took: dict[str, float] = {}  # seconds of each phase, the last time
        self._between: Phase | None = None  # what runs between two phases
        self._line = StepLine(total_steps, mismatch_limit)
        self._seconds: list[float] = []  # for each step
        self._evaluations: dict[int, float] = {}  # by step: the metric that is judged by
        self._evaluated = "held-out accuracy"  # what it is
        self._step: int | None = None  # that runs now
        self._step_began = 0.0
        self._live: Live | None = None
        self._lock = threading.RLock()
        self._ended = threading.Event()  # ends the thread of heartbeats
        self._heart: threading.Thread | None = None

    # ------------------------------------------------------------ what runs now

    @contextmanager
    def steps(self, start: int, past: Iterable[Mapping[str, float | None]] = ()) -> Iterator[None]:
        """Within, the steps after `start` run. `past`: metrics of the steps before."""
        for row in past:
            if self._view is not None:
                self._view.add(int(row.get("step") or 0), row)
            metric, step = evaluated_metric(row), row.get("step")
            value = None if metric is None else row[metric]
            if value is not None and step is not None and math.isfinite(value):
                self._evaluations[int(step)] = value
        self._next_step(start)
        try:
            with self._shown():
                yield
        finally:
            self._step = None

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Show the phase while the block runs: `with console.phase("rollout") as show: show(done, total)`.

        A phase within another one of this thread shows its progress as the outer one's."""
        thread = threading.get_ident()
        outer = self._phases.get(thread)
        if outer is not None or self._quiet:
            yield outer or Phase(name)
            return
        phase = Phase(name, self._took.get(name))
        with self._shown():
            with self._lock:
                self._phases[thread] = phase
            try:
                yield phase
                self._took[name] = phase.seconds
            finally:
                with self._lock:
                    del self._phases[thread]
                    self._between = Phase(AFTER[name]) if name in AFTER else None

    @contextmanager
    def _shown(self) -> Iterator[None]:
        """Within, what runs now is shown: at the bottom of a terminal, in a pipe once a minute."""
        with self._lock:
            is_first = not self._quiet and self._live is None and self._heart is None
            if is_first and self._is_live:
                self._live = Live(
                    get_renderable=self._bottom, console=self._out, transient=True, refresh_per_second=FRAMES
                )
            elif is_first:
                self._ended.clear()
                beat, seconds = (self._beat, HEARTBEAT_SECONDS) if self._view is None else (self._update, VIEW_SECONDS)
                self._heart = threading.Thread(target=beat, args=(seconds,), daemon=True)
        try:
            if is_first and self._live is not None:
                _on_screen.append(self)
                self._live.start(refresh=True)
            elif is_first and self._heart is not None:
                self._heart.start()
            yield
        finally:
            if is_first:
                self.close()

    def close(self) -> None:
        """Show no longer what runs now; the screen ends with the last whole line. A second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if self in _on_screen:
            _on_screen.remove(self)
        self._ended.set()
        self._heart = None
        if self._view is not None and self._view.is_open:
            self._view.show(self._bars(), is_due=True)

    def _update(self, seconds: float) -> None:
        """A notebook's display, while a phase runs."""
        view = self._view
        while view is not None and view.failure is None and not self._ended.wait(seconds):
            view.show(self._bars())

    def _leave_failed_view(self) -> None:
        """Plain lines from here on, if the notebook's display has failed."""
        if self._view is not None and self._view.failure is not None:
            failure, self._view = self._view.failure, None
            self.warn(f"the notebook's display can't be updated ({error_line(failure)}); the run shows plain lines")

    def _beat(self, seconds: float) -> None:
        """One line a minute, within a phase that takes longer."""
        said = time.perf_counter()
        while not self._ended.wait(max(seconds / 4, 0.005)):
            with self._lock:
                phases = list(self._phases.values())
                old = [phase for phase in phases if time.perf_counter() - max(said, phase.began) >= seconds]
            for phase in old:
                step = "" if self._step is None else f"step {self._step}/{self._total_steps}"
                self.note(heartbeat(phase, step))
            if old:
                said = time.perf_counter()
                for text in self._workers_lines():
                    self.note(f"    {text}")

    def _bars(self) -> list[Bar]:
        """What runs now: the phases, then the whole run."""
        with self._lock:
            phases = list(self._phases.values())
            if not phases and self._step is not None:
                phases = [self._between or Phase("")]
        bars = [Bar(phase.name, phase.share, [*phase.facts, phase.time_left]) for phase in phases if phase.name]
        return bars if self._step is None else [*bars, self._whole(self._step)]

    def _bottom(self) -> Group:
        """The last lines of a terminal."""
        width, bars = self._out.width - 1, self._bars()
        room = max([10, *(len(bar.label) for bar in bars[: -1 if self._step is not None else None])])
        rows = [bar_line(bar.label, bar.share, list(bar.facts), width, room, plain=self._is_ascii) for bar in bars]
        rows += [Text(f"    {text}"[:width], style="bright_black", no_wrap=True) for text in self._workers_lines()]
        return Group(*rows)

    def _whole(self, step: int) -> Bar:
        """The bar of the whole run."""
        done, mean = step - 1, self._mean_seconds
        spent = time.perf_counter() - self._step_began
        share = (done + (min(spent / mean, 1.0) if mean else 0.0)) / max(self._total_steps, 1)
        left = mean * (self._total_steps - done) - spent
        latest = self._evaluations[max(self._evaluations)] if self._evaluations else None
        facts = [] if latest is None else [f"{self._evaluated} {latest:.3f}"]
        facts.append(f"{duration(left)} left" if left > 0 else duration(spent) or "0 s")
        return Bar(f"step {step}/{self._total_steps}", share, facts)

    @property
    def _mean_seconds(self) -> float:
        """Mean seconds of this process's steps, from which the time left of a run is extrapolated. 0 before the first.

        All steps count, because steps of one run may differ a hundredfold (without an update, with an evaluation) and
        the mean of a few would jump. The first one compiles kernels; it counts only until there is another."""
        return statistics.fmean(self._seconds[1:] or self._seconds or [0.0])

    def _workers_lines(self) -> Sequence[str]:
        if self.workers is None:
            return ()
        lines = self.workers()
        more = len(lines) - MOST_WORKERS
        return [*lines[:MOST_WORKERS], f"and {more} more: octetrl status shows all"] if more > 0 else lines

    # ------------------------------------------------------------ what stays on the screen

    def step(self, step: int, metrics: Mapping[str, float], *, is_due: bool = True) -> None:
        """Show the measured numbers of a step in one line, and those of an evaluation after it in another.

        is_due: false if only the evaluation is to be shown."""
        self._seconds.append(sum(metrics.get(name, 0.0) for name in ("time/step", *BETWEEN_STEPS)))
        left = duration(self._mean_seconds * (self._total_steps - step))
        width = min(WIDTH, self._out.width) if self._is_live else WIDTH
        if is_due:
            self._print_parts(self._line.parts(step, metrics, left, width))
            each = environment_parts(metrics, "  reward by environment", "environments/{}/reward")
            self._print_parts(each, width)
            self._print_parts(_own_parts(metrics), width)
            self._into_view("step")
        if (metric := evaluated_metric(metrics)) is not None:
            self._print_parts(evaluation_parts(step, self._total_steps, metrics, self._evaluations, width))
            for label, form in OF_EVALUATIONS.items():
                self._print_parts(environment_parts(metrics, label, form), width)
            if math.isfinite(metrics[metric]):
                self._evaluations[step] = metrics[metric]
                self._evaluated = "held-out loss" if lower_is_better(metric) else "held-out accuracy"
            self._into_view("eval")
        self._next_step(step)
        if self._view is not None:
            self._view.add(step, metrics)
            self._view.show(self._bars())
            self._leave_failed_view()

    def _into_view(self, kind: str) -> None:
        if self._view is not None:
            self._view.lines(kind, self._collected)
            self._collected = []

    def _next_step(self, step: int) -> None:
        self._step = step + 1 if step < self._total_steps else None
        self._step_began, self._between = time.perf_counter(), None

    def _print_parts(self, parts: list[LinePart], width: int = WIDTH) -> None:
        """Print the parts, in several rows if one of `width` columns does not hold them."""
        if self._view is not None:
            self._collected += [line(row) for row in rows_of(parts, width)]
            return
        for row in () if self._quiet else rows_of(parts, width):
            if not self._is_live:
                self._out.print(line(row), markup=False)
                continue
            text = Text()
            for number, part in enumerate(row):
                text.append("  " if number else "")
                text.append(f"{part.label} " if part.label else "", style="bright_black")
                text.append(part.value, style=STYLES[part.tone])
            self._out.print(text)

    def note(self, text: str) -> None:
        """Show one line of information, such as the step that a run resumes from."""
        if self._view is not None and self._view.is_open:
            self._view.note(text)
        elif not self._quiet:
            self._out.print(escaped(text), markup=False)

    def rows(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        """Show a title and rows of a label and a text. A label that is empty continues the row before."""
        if self._quiet:
            return
        if self._view is not None:
            self._view.table(title, rows)
            self._view.show(self._bars(), is_due=True)
            self._leave_failed_view()
        if self._view is not None:
            return
        room = max((len(label) for label, _ in rows), default=0)
        self._out.print(Text(escaped(title), style="bold" if self._is_live else ""))
        for label, value in rows:
            wide = max(self._out.width - room - 5, 20) if self._is_live else 10_000
            for text in textwrap.wrap(escaped(value), wide, break_long_words=False, break_on_hyphens=False) or [""]:
                before = Text(f"  {label:<{room}}  ", style="bright_black" if self._is_live else "")
                self._out.print(before.append(text, style="default" if self._is_live else ""))
                label = ""

    def warn(self, text: str) -> None:
        """Show one line that a person should act on."""
        self._warnings.append(text)
        if self._view is not None and self._view.is_open:
            self._view.note(f"warning: {text}")
            return
        text = escaped(f"warning: {text}")
        is_above = self._live is not None and self._err.is_terminal  # or it would be drawn over
        (self._out if is_above else self._err).print(text, style="yellow", markup=False)

    def take_warnings(self) -> list[str]:
        """The warnings since the last call."""
        taken, self._warnings = self._warnings, []
        return taken


def leave_screen() -> None:
    """End what a stopped command still shows at the bottom of the terminal, wherever it was stopped."""
    for console in list(_on_screen):
        with suppress(Exception):
            console.close()


def _own_parts(metrics: Mapping[str, float]) -> list[LinePart]:
    """The parts of a line with the terms of the reward and the metrics of the user's code. Empty without any."""
    own = own_metrics(metrics)
    shown = [LinePart(printable(title), f"{metrics[name]:,.3f}") for name, title in own.items()]
    return [LinePart("", "  own metrics"), *shown] if shown else []


UNITS = {"rollout": "answers", "evaluate": "answers", "generate": "answers", "train": "micro-batches"}
LEAST_BAR, MOST_BAR = 8, 30  # columns
ALMOST = 0.99  # the most that a bar shows whose phase has not ended


@dataclass(slots=True)
class Phase:
    """A phase that runs. A call shows its progress.

    before: seconds that it took the last time; None: it is the first time. done, total: units of work (answers,
    micro-batches). tokens: number of tokens since the phase began; most_tokens: as many as it may have."""

    name: str
    before: float | None = None
    began: float = field(default_factory=time.perf_counter)
    done: int = 0
    total: int | None = None
    tokens: int | None = None
    most_tokens: int | None = None

    def __call__(
        self, done: int, total: int | None = None, tokens: int | None = None, most_tokens: int | None = None
    ) -> None:
        self.done, self.total, self.tokens, self.most_tokens = done, total, tokens, most_tokens

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


# ---------------------------------------------------------------- a lost terminal

CONSOLE_FILE = "console.log"
LOST = (errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO, errno.ESTALE)
_logs: list[Path] = []  # one for each live run, the innermost last


@contextmanager
def keeps_writing(folder: Path) -> Iterator[None]:
    """Within, what finds no reader is appended to a file in `folder`."""
    is_main = threading.current_thread() is threading.main_thread()
    ignores = is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    if ignores:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _logs.append((folder / CONSOLE_FILE).absolute())
    try:
        yield
    finally:
        _logs.pop()
        if ignores:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Screen:
    """stdout or stderr, as a file for rich."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    @property
    def _file(self) -> Any:
        file = getattr(sys, self._name)
        return getattr(file, "rich_proxied_file", file)  # while a live line is shown

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except OSError as error:
            self._go_on(error)  # the stream keeps the text
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._go_on(error)
            self._file.flush()

    def _go_on(self, error: OSError) -> None:
        if error.errno not in LOST or not _logs:
            raise error
        log = os.open(_logs[-1], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(log, 1 if self._name == "stdout" else 2)
        os.close(log)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
