"""Show the progress of a run on the console.

    live    (a terminal)  a progress line per phase (spinner, bar, tokens/s), then a small table per step
    plain   (pipes, CI)   one line per step of at most 120 columns, and one a minute within a phase
    quiet                 only warnings

`auto` is live on a terminal and plain elsewhere. Warnings go to stderr in every mode, so they are visible even if
stdout is a pipe. The console only shows metrics. It computes and stores none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple, TextIO

from rich.console import Console as RichConsole
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from octetrl.config.text import escaped

Mode = Literal["auto", "plain", "quiet"]


class Headline(NamedTuple):
    """One number in the step's table or line."""

    metric: str
    label: str
    form: str  # format specification


COLUMNS: tuple[tuple[Headline, ...], ...] = (
    (
        Headline("reward/mean", "reward", ".3f"),
        Headline("eval/accuracy", "accuracy", ".3f"),
        Headline("loss", "loss", ".4f"),
        Headline("grad_norm", "grad norm", ".3f"),
        Headline("entropy", "entropy", ".3f"),
    ),
    (
        Headline("mismatch/token_mult_prob_error", "log-probs", ""),
        Headline("mismatch/gen_kl", "gen kl", ".1e"),
        Headline("correction/clip_fraction", "corrected", ".2%"),
        Headline("fp8/kv_saturation", "kv saturated", ".3%"),
        Headline("memory/peak_gb", "memory GB", ".1f"),
    ),
    (
        Headline("rollout/tokens_per_second", "rollout tok/s", ",.0f"),
        Headline("train/tokens_per_second", "train tok/s", ",.0f"),
        Headline("rollout/mean_length", "length", ".0f"),
        Headline("rollout/failure_share", "failed", ".1%"),
        Headline("rollout/truncated_share", "truncated", ".1%"),
        Headline("reward/zero_variance_fraction", "equal rewards", ".1%"),
        Headline("rollout/too_long_share", "too long", ".1%"),
        Headline("time/reward", "reward s", ".2f"),
        Headline("time/step", "step s", ".2f"),
    ),
)


IN_LINE = (  # the order of a plain line, which ends before LINE_WIDTH: what matters most comes first
    *("reward/mean", "eval/accuracy", "preference/accuracy", "mismatch/token_mult_prob_error", "rollout/failure_share"),
    *("rollout/too_long_share", "reward/zero_variance_fraction", "rollout/truncated_share", "time/step", "time/reward"),
    *("loss", "rollout/mean_length", "fp8/kv_saturation", "rollout/tokens_per_second", "entropy", "grad_norm"),
    *("memory/peak_gb", "train/tokens_per_second", "correction/clip_fraction"),
)
ONLY_ABOVE_0 = ("rollout/failure_share", "rollout/too_long_share", "fp8/kv_saturation", "correction/clip_fraction")
LINE_WIDTH = 120
HEARTBEAT_SECONDS = 60.0
WHOLE_STEP = ("time/step", "time/evaluate", "time/checkpoint")
RECENT = 10  # steps from which the time left is extrapolated


class PhaseProgress:
    """A callback that shows a phase's progress: a bar in live mode, a line a minute in plain mode, otherwise nothing.

    `say` prints a line; None: no lines."""

    def __init__(
        self, progress: Progress | None, task: TaskID | None, name: str = "", say: Callable[[str], None] | None = None
    ) -> None:
        self._progress, self._task, self._name, self._say = progress, task, name, say
        self._begin = self._said = time.perf_counter()

    def __call__(self, done: int, total: int | None = None, tokens: int | None = None) -> None:
        """Show progress: `done` of `total` units of work (sequences, micro-batches, tasks).

        tokens: number of tokens since the phase began, for the rate."""
        now = time.perf_counter()
        rate = "" if tokens is None else f"{tokens / max(now - self._begin, 1e-9):,.0f} tok/s"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, total=total, rate=rate)
        elif self._say is not None and now - self._said >= HEARTBEAT_SECONDS:
            self._said = now
            told = (f"{done} of {total}", rate, f"{now - self._begin:.0f} s")
            self._say(f"  {self._name}: {', '.join(filter(None, told))}")


class Console:
    """The console of a run of `total_steps`. `out` and `err` are for tests; None: stdout and stderr."""

    def __init__(self, mode: Mode, total_steps: int, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = RichConsole(file=out, highlight=False, soft_wrap=True)
        self._err = RichConsole(file=err, stderr=err is None, highlight=False, soft_wrap=True)
        self._live = mode == "auto" and self._out.is_terminal
        self._quiet = mode == "quiet"
        self._total_steps = total_steps
        self._in_phase = False  # a bar is on the screen
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds of steps

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseProgress]:
        """Show a progress line while the block runs: `with console.phase("rollout") as progress: ...`.

        The line disappears when the block ends or raises. Inside another phase it shows nothing."""
        if not self._live:
            is_plain = not self._quiet and not self._in_phase
            yield PhaseProgress(None, None, name, self.note if is_plain else None)
            return
        progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=30),
            TextColumn("{task.completed:.0f}/{task.total}"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            console=self._out,
            transient=True,
        )
        self._live, self._in_phase = False, True
        try:
            with progress:
                yield PhaseProgress(progress, progress.add_task(name, total=None, rate=""))
        finally:
            self._live, self._in_phase = True, False

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the measured headlines of a step: a table in live mode, otherwise one line."""
        if self._quiet:
            return
        title = f"step {step}/{self._total_steps}"
        self._recent.append(sum(metrics.get(name, 0.0) for name in WHOLE_STEP))
        left = _duration(sum(self._recent) / len(self._recent) * (self._total_steps - step))
        if not self._live:
            self._out.print(_line(title, metrics, f"{left} left" if left else ""), markup=False)
            return
        title += f", {left} left" if left else ""
        columns = [[line for line in column if line.metric in metrics] for column in COLUMNS]
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for row in range(max(len(column) for column in columns)):
            cells: list[str] = []
            for column in columns:
                cells += (column[row].label, _shown(column[row], metrics)) if row < len(column) else ("", "")
            table.add_row(*cells)
        self._out.print(table)

    def note(self, text: str) -> None:
        """Show one line of information, such as the run's folder or the step it resumes from."""
        if not self._quiet:
            self._out.print(escaped(text), markup=False)

    def warn(self, text: str) -> None:
        """Show one line that a person should act on."""
        self._err.print(escaped(f"warning: {text}"), style="yellow", markup=False)

    def table(self, title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table, such as the result of a run or of the demo. It is shown in every mode."""
        table = Table(title=title, title_justify="left")
        for index, name in enumerate(header):
            table.add_column(name, justify="left" if index == 0 else "right")
        for row in rows:
            table.add_row(*map(escaped, row))
        self._out.print(table)


def _line(title: str, metrics: Mapping[str, float], left: str) -> str:
    """The step's line: as many numbers as fit, in the order of IN_LINE."""
    by_metric = {line.metric: line for column in COLUMNS for line in column}
    shown, room = [title], LINE_WIDTH - len(title) - (len(left) + 2 if left else 0)
    for metric in IN_LINE:
        if metric not in metrics or metric not in by_metric or (metric in ONLY_ABOVE_0 and metrics[metric] == 0):
            continue
        text = f"{by_metric[metric].label} {_shown(by_metric[metric], metrics)}"
        if len(text) + 2 <= room:
            shown.append(text)
            room -= len(text) + 2
    return "  ".join([*shown, *([left] if left else [])])


def _shown(line: Headline, metrics: Mapping[str, float]) -> str:
    value = metrics[line.metric]
    if line.metric != "mismatch/token_mult_prob_error":
        return format(value, line.form)
    unequal = metrics.get("mismatch/unequal_tokens", 0.0 if value == 1 else None)
    if unequal is None:
        return f"{value - 1:.3%} apart"
    return f"differ in {unequal:,.0f} tokens" if unequal else "equal"


def _duration(seconds: float) -> str:
    """A time in one unit; empty for none."""
    if seconds <= 0:
        return ""
    size, unit = next(((n, unit) for n, unit in ((3600, "h"), (60, "min")) if seconds >= 2 * n), (1, "s"))
    return f"{seconds / size:.1f} {unit}" if unit == "h" else f"{seconds / size:.0f} {unit}"
