"""The report of one or several runs in short, for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from octetrl.system.text import counted, printable
from octetrl.telemetry.charts import shown_number, sparkline
from octetrl.telemetry.glossary import own_metrics
from octetrl.telemetry.report_data import (
    OF_PAIRS,
    RunRecord,
    differences,
    findings,
    interval_text,
    longest_first,
    overlap,
    raised_warnings,
    results,
    uncompared,
)
from octetrl.telemetry.report_page import HEADLINES
from octetrl.telemetry.step_line import duration

WIDTH = 98  # columns at most
LABEL = 20  # columns of what begins a line
VALUES = 23  # columns of the first and the last value of a curve
LEAST_CURVE = 8
_FACTS = ("model", "algorithm", "precision", "linears by layer")


def terminal_report(runs: Sequence[RunRecord], width: int = WIDTH) -> Iterator[str]:
    """Lines of the report, no wider than `width` columns. What a run wrote cannot control the terminal."""
    for run in runs:
        ended = f", {run.ending.how}" if run.ending is not None else ""
        head = f"{run.name}: {counted(len(run.rows), 'step')} in {duration(run.hours[-1] * 3600) or '0 s'}{ended}"
        yield from _wrapped(head, width, "  ")
        facts = {**dict(results(run)), **{label: text for label, text in run.settings if label in _FACTS}}
        for label, text in facts.items():
            yield from _fact(label, text, width)
        own = own_metrics(dict.fromkeys(name for row in run.rows for name in row))
        for name, title in {**{name: name for name in (*HEADLINES, "kl")}, **own}.items():
            label = printable(title)[:LABEL]
            if values := run.values(name):
                curve = sparkline(values, min(32, max(LEAST_CURVE, width - LABEL - 5 - VALUES)))
                ends = f"{shown_number(values[0])} → {shown_number(values[-1])}"
                yield f"  {label:<{LABEL}} {curve:<{32 if width >= WIDTH else 0}}  {ends}"
        if parts := longest_first(run.rows):
            whole = sum(parts.values())
            shares = [f"{name} {spent / whole:.0%}" for name, spent in parts.items() if spent >= 0.01 * whole]
            yield from _fact("time", ", ".join(shares), width)
        if says := overlap(run.rows):
            yield from _fact("", says, width)
        for line in (
            *(f"look: {text}" for text in findings(run)),
            *(f"warned: {text}" for text in raised_warnings(run)),
        ):
            yield from _wrapped(f"  {line}", width, " " * 8)
    for line in uncompared(runs):
        yield from _wrapped(line, width, "  ")
    compared = list(differences(runs))
    for what, other, difference in compared:
        interval = interval_text(difference, "95% interval ")
        line = f"{what}, {other.name} − {runs[0].name}: {difference.mean:+.4g}, {interval}"
        yield from _wrapped(line, width, "  ")
    if compared:
        yield from _wrapped(OF_PAIRS, width, "  ")


def _fact(label: str, text: str, width: int) -> Iterator[str]:
    return _wrapped(f"  {label:<{LABEL}} {text}", width, " " * (LABEL + 3))


def _wrapped(line: str, width: int, indent: str) -> Iterator[str]:
    """The line with escapes for control characters, in rows of `width` columns. Its own columns stay."""
    begin = line[: len(line) - len(line.lstrip())]
    return iter(textwrap.wrap(printable(" ".join(line.splitlines())), width, subsequent_indent=indent) or [begin])
