"""`octetrl metrics`: what the metrics of a run mean (telemetry/glossary.py)."""

from __future__ import annotations

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
    named = explained(word) if word else None
    in_names = word is not None and any(word in one.name for entries in METRICS.values() for one in entries)
    labelled = on_the_console(word) if word and not in_names else None
    console, shown = Console(highlight=False), False
    for family, entries in METRICS.items():
        if not word:
            found = list(entries)
        elif named is not None:
            found = [one for one in entries if one is named]
        elif labelled is not None:
            found = [one for one in entries if one.name == labelled]
        else:  # where no metric has it in its name: a word of the texts, such as a setting
            found = [one for one in entries if word in one.name or (not in_names and _letters(word) in _text(one))]
        if not found:
            continue
        table = Table(title=family, title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)
        longest = max(len(one.name) for one in found)
        table.add_column(overflow="fold", no_wrap=longest + LEAST_WIDTH <= console.width)  # a name is never cut
        table.add_column()
        for one in found:
            unit = f" [{one.unit}]" if one.unit else ""
            table.add_row(one.name, f"{one.meaning}{unit} {one.look}".rstrip(), style=None)
        console.print(table, markup=False)
        shown = True
    if not shown:
        names = [one.name for entries in METRICS.values() for one in entries]
        raise UserError(
            f"metrics: no metric has '{word}' in its name or text; `octetrl metrics` lists all"
            f"{nearest(word or '', names)}"
        )


def _text(metric: Metric) -> str:
    return _letters(f"{metric.meaning} {metric.look}")


def _letters(text: str) -> str:
    """Without case and what stands between words: `kvcache` is found in "KV cache"."""
    return "".join(letter for letter in text.lower() if letter.isalnum())
