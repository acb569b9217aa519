"""`octetrl recipes`: lists the recipes of the package, and copies them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.output import terminal_columns, wrapped
from octetrl.config.shipped import copy_recipe, shipped_recipes
from octetrl.system.errors import UserError


def recipes(
    copy: Annotated[
        str | None, typer.Option("--copy", metavar="NAME", help="Copy this recipe and the recipes that it extends.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", metavar="DIR", help="The folder of the copy. Default: the working directory.")
    ] = None,
) -> None:
    """List the shipped recipes, or copy one. `octetrl train NAME` runs a shipped recipe as it is."""
    if copy is not None:
        for path in copy_recipe(copy, Path(to or ".")):
            typer.echo(f"wrote {path}")
        return
    if to is not None:
        raise UserError("--to: it needs --copy NAME, the recipe to copy")
    found = shipped_recipes()
    width = max(len(name) for name in found)
    columns = terminal_columns()
    for name, summary in found.items():
        first, *others = wrapped(summary, None if columns is None else columns - width - 2)
        typer.echo(f"{name:<{width}}  {first}")
        for other in others:
            typer.echo(f"{'':<{width}}  {other}")
    hint = "octetrl check NAME explains a recipe and says what it needs first, octetrl train NAME runs it"
    typer.echo(hint, err=True)
