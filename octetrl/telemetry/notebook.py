"""A run's progress in a notebook: one display that is updated, with a bar, a small curve and the last numbers.

IPython is never imported. Where it runs this code in a kernel, its `display` is there already; a terminal's IPython
shows text as any terminal does.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import Any, NamedTuple

from octetrl.telemetry.charts import Line, escape, line_chart
from octetrl.telemetry.step_line import evaluated_metric

CURVES = ("reward/mean", "loss")  # the first one that the steps have
TITLES = {"reward/mean": "reward", "eval/accuracy": "held-out accuracy", "eval/loss": "held-out loss"}
LEAST_SECONDS = 0.25  # between two updates
SHOWN_NOTES = 6  # the last ones
STYLE = (
    ".octetrl{font:13px/1.5 system-ui,sans-serif;max-width:900px}.octetrl .charts{display:flex;gap:16px}"
    ".octetrl figure{margin:4px 0;width:420px}.octetrl figcaption,.octetrl .dim,.octetrl text{color:#777;fill:#777;"
    "font-size:11px}.octetrl .grid{stroke:#8883}.octetrl .line{fill:none;stroke:#2f7fd3;stroke-width:1.6}"
    ".octetrl .dot{fill:#2f7fd3}.octetrl .hover{fill:transparent}.octetrl .bar{display:inline-block;width:240px;"
    "height:8px;background:#8883;border-radius:4px;margin:0 8px}.octetrl .bar i{display:block;height:8px;"
    "background:#2f7fd3;border-radius:4px}.octetrl .bars span{display:inline-block;min-width:80px}"
    ".octetrl pre{margin:4px 0;white-space:pre-wrap}.octetrl td{padding:0 12px 0 0;text-align:left}"
)


Points = dict[str, tuple[list[float], list[float]]]  # by metric: steps and values


class Bar(NamedTuple):
    """What runs now. share: the part of it that is done; None: unknown."""

    label: str
    share: float | None
    facts: Sequence[str]


class NotebookView:
    """The display of one run. It is shown at the first `show`, and updated by later ones."""

    def __init__(self, display: Any) -> None:
        self._display = display
        self._handle: Any = None
        self._shown_at = -math.inf
        self._tables: list[tuple[str, Sequence[tuple[str, str]]]] = []
        self._lines: dict[str, list[str]] = {}  # of the last step, and of the last evaluation
        self._notes: list[str] = []
        self._points: Points = {}
        self._lock = Lock()  # a thread shows how far a phase is
        self.failure: Exception | None = None  # of the display, which shows nothing any more

    @property
    def is_open(self) -> bool:
        return self._handle is not None and self.failure is None

    def table(self, title: str, rows: Sequence[tuple[str, str]]) -> None:
        self._tables.append((title, rows))

    def note(self, text: str) -> None:
        self._notes.append(text)

    def lines(self, kind: str, texts: Sequence[str]) -> None:
        """The numbers of a step, in place of those of the last one. kind: step or eval."""
        self._lines[kind] = list(texts)

    def add(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """The points of a step."""
        with self._lock:
            add_points(self._points, step, metrics)

    def show(self, bars: Sequence[Bar], *, is_due: bool = False) -> None:
        """Update the display; unless it is due, not more often than `LEAST_SECONDS` says."""
        with self._lock:
            if self.failure or (not is_due and time.perf_counter() - self._shown_at < LEAST_SECONDS):
                return
            self._shown_at = time.perf_counter()
            lines = [text for texts in self._lines.values() for text in texts]
            plain = "\n".join(lines or [title for title, _ in self._tables])
            data = {"text/html": self._html(bars, lines), "text/plain": plain}
            try:
                if self._handle is None:
                    self._handle = self._display(data, raw=True, display_id=True)
                else:
                    self._handle.update(data, raw=True)
            except Exception as error:  # of the notebook, whose page may be closed; the console goes on without it
                self.failure = error

    def _html(self, bars: Sequence[Bar], lines: Sequence[str]) -> str:
        banner, end = self._tables[:1], self._tables[1:]
        shown = "".join(_bar(bar) for bar in bars)
        return framed(
            *(f"<details><summary>{escape(title)}</summary>{table_html(rows)}</details>" for title, rows in banner),
            f'<div class="bars">{shown}</div>{charts_html(self._points)}<pre>{escape(chr(10).join(lines))}</pre>',
            *(f'<div class="dim">{escape(text)}</div>' for text in self._notes[-SHOWN_NOTES:]),
            *(f"<div>{escape(title)}</div>{table_html(rows)}" for title, rows in end),
        )


def notebook_view() -> NotebookView | None:
    """The view of a notebook that runs this code. None: no notebook does."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return None if getattr(shell, "kernel", None) is None else NotebookView(sys.modules["IPython.display"].display)


def add_points(points: Points, step: int, metrics: Mapping[str, Any]) -> None:
    """Add a step's reward, or else its loss, and what its evaluation is judged by."""
    curve = next((name for name in CURVES if metrics.get(name) is not None), None)
    for name in filter(None, (curve, evaluated_metric(metrics))):
        if math.isfinite(metrics[name]):
            xs, ys = points.setdefault(name, ([], []))
            xs.append(step)
            ys.append(metrics[name])


def framed(*parts: str) -> str:
    """HTML with the styles of this page."""
    return f'<div class="octetrl"><style>{STYLE}</style>{"".join(parts)}</div>'


def charts_html(points: Mapping[str, tuple[Sequence[float], Sequence[float]]]) -> str:
    """A small curve of each metric: its steps and values."""
    charts = (
        f"<figure><figcaption>{escape(TITLES.get(name, name))}</figcaption>{line_chart([Line(name, 0, *xy)], 'step')}"
        "</figure>"
        for name, xy in points.items()
    )
    return f'<div class="charts">{"".join(charts)}</div>'


def table_html(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f'<tr><td class="dim">{escape(label)}</td><td>{escape(text)}</td></tr>' for label, text in rows)
    return f"<table>{cells}</table>"


def _bar(bar: Bar) -> str:
    done = f'<span class="bar"><i style="width:{100 * (bar.share or 0):.0f}%"></i></span>'
    return f"<div><span>{escape(bar.label)}</span>{done}{escape('  '.join(bar.facts))}</div>"
