"""Check that speculation can keep the bits of answers, and that drafts have places in the batch."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.schema import Recipe
from octetrl.config.section import Problem


def speculation_problems(recipe: Recipe) -> Iterator[Problem]:
    speculation = recipe.engine.speculation
    if speculation.name == "none":
        return
    if recipe.numerics == "fast":
        text = (
            "engine.speculation.name: 'ngram' with numerics 'fast' would change answers, because a row's bits then"
            " depend on the number of rows; use numerics 'parity', or engine.speculation.name 'none'"
        )
        yield Problem(("engine.speculation.name", "numerics"), text)
    if recipe.engine.max_batch == 1:
        text = (
            "engine.max_batch: 1 leaves no place for drafts, which take free places of the batch; raise it to at least"
            f" {1 + speculation.max_draft_tokens}, or set engine.speculation.name 'none'"
        )
        yield Problem(("engine.max_batch", "engine.speculation.name"), text)
