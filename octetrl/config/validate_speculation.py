"""Check that drafts have places in the batch, and that their settings have an effect."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.config.speculation import SpeculationConfig


def speculation_problems(recipe: Recipe) -> Iterator[Problem]:
    speculation = recipe.engine.speculation
    if speculation.name == "none":
        return
    if recipe.engine.max_batch == 1:
        text = (
            "engine.max_batch: 1 leaves no place for drafts, which take free places of the batch; raise it to at least"
            f" {1 + speculation.max_draft_tokens}, or set engine.speculation.name 'none'"
        )
        yield Problem(("engine.max_batch", "engine.speculation.name"), text)


def changed_speculation(recipe: Recipe) -> list[str]:
    """The settings of drafts that are not the defaults. `name`, which asks for drafts, is left out."""
    given, usual = recipe.engine.speculation, SpeculationConfig()
    names = [name for name in type(given).model_fields if name != "name"]
    return [f"engine.speculation.{name}" for name in names if getattr(given, name) != getattr(usual, name)]


def drafts_without_effect(recipe: Recipe) -> str | None:
    """The settings of drafts that a recipe without drafts does not read, in one line. None: there are none. They are no
    problem: a run that turns drafts off keeps its other settings and resumes."""
    changed = changed_speculation(recipe)
    if recipe.engine.speculation.name != "none" or not changed:
        return None
    verb = "has" if len(changed) == 1 else "have"
    return (
        f"{', '.join(changed)} {verb} no effect while engine.speculation.name is none; set that to ngram, or remove"
        f" {'it' if len(changed) == 1 else 'them'}"
    )
