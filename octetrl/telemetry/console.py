"""Show the progress of a run on the console.

    live    (a terminal)  a progress line per phase (spinner, bar, tokens/s), then a small table per step
    plain   (pipes, CI)   one line per step
    quiet                 only warnings

`auto` is live on a terminal and plain elsewhere. Warnings go to stderr in every mode, so they are visible even if
stdout is a pipe. The console only shows metrics. It computes and stores none.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
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
        Headline("mismatch/token_mult_prob_error", "mismatch", ".5f"),
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


class PhaseProgress:
    """A callback that shows a phase's progress. Outside live mode it does nothing."""

    def __init__(self, progress: Progress | None, task: TaskID | None) -> None:
        self._progress, self._task = progress, task
        self._begin = time.perf_counter()

    def __call__(self, done: int, total: int | None = None, tokens: int | None = None) -> None:
        """Show progress: `done` of `total` units of work (sequences, micro-batches, tasks).

        tokens: number of tokens since the phase began, for the rate."""
        if self._progress is None or self._task is None:
            return
        rate = ""
        if tokens is not None:
            rate = f"{tokens / max(time.perf_counter() - self._begin, 1e-9):,.0f} tok/s"
        self._progress.update(self._task, completed=done, total=total, rate=rate)


class Console:
    """The console of a run of `total_steps`. `out` and `err` are for tests; None: stdout and stderr."""

    def __init__(self, mode: Mode, total_steps: int, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._out = RichConsole(file=out, highlight=False, soft_wrap=True)
        self._err = RichConsole(file=err, stderr=err is None, highlight=False, soft_wrap=True)
        self._live = mode == "auto" and self._out.is_terminal
        self._quiet = mode == "quiet"
        self._total_steps = total_steps

    @contextmanager
    def phase(self, name: str) -> Iterator[PhaseProgress]:
        """Show a progress line while the block runs: `with console.phase("rollout") as progress: ...`.

        The line disappears when the block ends or raises. Inside another phase it shows nothing."""
        if not self._live:
            yield PhaseProgress(None, None)
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
        self._live = False
        try:
            with progress:
                yield PhaseProgress(progress, progress.add_task(name, total=None, rate=""))
        finally:
            self._live = True

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the measured headlines of a step: a table in live mode, otherwise one line."""
        if self._quiet:
            return
        title = f"step {step}/{self._total_steps}"
        if not self._live:
            lines = [line for column in COLUMNS for line in column if line.metric in metrics]
            shown = [f"{line.label} {_shown(line, metrics)}" for line in lines]
            self._out.print("  ".join([title, *shown]), markup=False)
            return
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


def _shown(line: Headline, metrics: Mapping[str, float]) -> str:
    return format(metrics[line.metric], line.form)
