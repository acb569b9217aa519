"""Arguments that several commands share: the recipe and its overrides."""

from __future__ import annotations

from typing import Annotated

import typer

RecipePath = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A YAML file, or the name of a shipped recipe (`octetrl recipes` lists them).",
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[section.key=value]...",
        help="Fields that differ from the recipe, such as trainer.optimizer.lr=2e-6 or precision=bf16.",
        show_default=False,
    ),
]
