"""`octetrl metrics`: what the metrics of a run mean (telemetry/glossary.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octetrl.cli.output import LEAST_WIDTH
from octetrl.system.errors import UserError, nearest
from octetrl.telemetry.glossary import METRICS, Metric, explained
from octetrl.telemetry.step_line import on_the_console


def metrics(
    word: Annotated[
        str | None,
        typer.Argument(
            metavar="[WORD]", help="A metric's name, a part of it, a word of its text, or what a run's line calls it."
        ),
    ] = None,
) -> None:
    """Explain the metrics of a run: their units, and what good and bad values are."""
    console, takes = Console(highlight=False), _filter(word)
    shown = False
    for family, entries in METRICS.items():
        chosen = [metric for metric in entries if takes(metric)]
        if not chosen:
            continue
        table = Table(title=family, title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
        longest = max(len(metric.name) for metric in chosen)
        table.add_column(overflow="fold", no_wrap=longest + LEAST_WIDTH <= console.width)  # a name is never cut
        table.add_column()
        for metric in chosen:
            unit = f" [{metric.unit}]" if metric.unit else ""
            table.add_row(metric.name, f"{metric.meaning}{unit} {metric.look}".rstrip(), style=None)
        console.print(table, markup=False)
        shown = True
    if not shown:
        names = [metric.name for entries in METRICS.values() for metric in entries]
        raise UserError(
            f"metrics: no metric has '{word}' in its name or text; `octetrl metrics` lists all"
            f"{nearest(word or '', names)}"
        )


def _filter(word: str | None) -> Callable[[Metric], bool]:
    """Which metrics a word stands for: one by its name, those with it in their names, one by its label on the console,
    or those with it in their texts, such as a setting."""
    if not word:
        return lambda metric: True
    named = explained(word)
    if named is not None:
        return lambda metric: metric is named
    if any(word in metric.name for entries in METRICS.values() for metric in entries):
        return lambda metric: word in metric.name
    labelled = on_the_console(word)
    if labelled is not None:
        return lambda metric: metric.name == labelled
    return lambda metric: _letters(word) in _text(metric)


def _text(metric: Metric) -> str:
    return _letters(f"{metric.meaning} {metric.look}")


def _letters(text: str) -> str:
    """Without case and what stands between words: `kvcache` is found in "KV cache"."""
    return "".join(letter for letter in text.lower() if letter.isalnum())
