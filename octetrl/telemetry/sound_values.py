"""What a report can use of the files in a run's folder. Damaged values are left out, and counted or named.

The run itself writes numbers that are not finite as null. So a NaN, an infinity or an integer of 400 digits was not
written by a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

LARGEST = 1e100  # of a metric: its square is still a float
LONGEST = 1e10  # seconds
MOST_STEPS = 10**12
_COUNT = re.compile(r"mismatch/(age_\d+/tokens|tokens|unequal_tokens)")
_SECTIONS = (
    *("model", "fp8", "algorithm", "trainer", "trainer.optimizer", "environment", "environments", "rollout"),
    *("cluster", "mismatch", "evaluation", "data", "data.sources"),
)
_NUMBERS = ("fp8.saturation_warn", "mismatch.warn_above", "steps")
_TEXTS = ("fp8.kv_cache", "fp8.kv_cache_tensors")


def is_step(value: object) -> bool:
    """Whether it can be the number of a step."""
    return type(value) is int and 0 <= value < MOST_STEPS


def is_number(value: object) -> bool:
    """Whether it is a number that can be squared, summed and drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def sound_row(row: Mapping[str, Any]) -> tuple[dict[str, float | None], int]:
    """The metrics of a step, and how many of its values were left out. null stays: it was measured and not finite."""
    kept = {name: value for name, value in row.items() if value is None or _is_sound(name, value)}
    return kept, len(row) - len(kept)


def _is_sound(name: str, value: object) -> bool:
    if not is_number(value) or (_COUNT.fullmatch(name) and value < 0):  # type: ignore[operator]
        return False
    return not name.startswith("time/") or 0 <= value <= LONGEST  # type: ignore[operator]


def sound_recipe(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe without what has another type than the report expects, and the names of these fields."""
    kept, lost = dict(recipe), []
    for path in _SECTIONS:
        if not isinstance(_found(kept, path), Mapping | None):
            lost.append(path)
            kept = _without(kept, path)
    for name, section in (kept.get("environments") or {}).items():
        if not isinstance(section, Mapping):
            lost.append(f"environments.{name}")
        elif not is_number(section.get("weight", 1)):
            lost.append(f"environments.{name}.weight")
    for path in lost:
        kept = _without(kept, path)
    for path, is_sound in _fields():
        if (value := _found(kept, path)) is not None and not is_sound(value):
            lost.append(path)
            kept = _without(kept, path)
    return kept, lost


def _fields() -> Iterator[tuple[str, Any]]:
    yield from ((path, is_number) for path in _NUMBERS)
    yield from ((path, lambda value: isinstance(value, str)) for path in _TEXTS)


def _found(recipe: Any, path: str) -> Any:
    for name in path.split("."):
        recipe = recipe.get(name) if isinstance(recipe, Mapping) else None
    return recipe


def _without(recipe: Mapping[str, Any], path: str) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    section = recipe.get(name)
    if rest and isinstance(section, Mapping):
        return {**recipe, name: _without(section, rest)}
    return {key: value for key, value in recipe.items() if key != name}


def unordered_steps(steps: list[int]) -> str | None:
    """A remark if a step is there twice or comes before an earlier one."""
    wrong = [(one, after) for one, after in pairwise(steps) if after <= one]
    if not wrong:
        return None
    first, after = wrong[0]
    what = "repeats" if first == after else f"comes after step {first}"
    return f"steps are repeated or out of order (first: step {after} {what}); they are shown as they are written"
