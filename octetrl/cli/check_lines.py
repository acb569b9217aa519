"""How `octetrl check` prints a section: a title, and a name and a text on each line."""

from __future__ import annotations

from collections.abc import Iterator

import typer


def print_lines(title: str, lines: Iterator[tuple[str, str]]) -> None:
    """Print a section, or nothing if it has no lines."""
    rows = list(lines)  # all of them first: a section is shown whole or not at all
    width = max(20, *(len(name) + 2 for name, _ in rows)) if rows else 20
    if rows:
        typer.echo(title)
    for name, value in rows:
        typer.echo(f"  {name:<{width}}{value}")
