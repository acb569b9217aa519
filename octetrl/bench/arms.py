"""Arms: what a bench compares. An arm is a list of overrides of the recipe."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from octetrl.system.errors import UserError

Arm = tuple[str, ...]


def arms_of(words: Sequence[str]) -> list[Arm]:
    """Expand `FIELD=A,B` to an arm for each value, and several such words to all combinations, the last one fastest.
    A comma inside brackets belongs to the value. No words: one arm without overrides. Raises UserError."""
    choices = []
    for word in words:
        field, equals, values = word.partition("=")
        given = split_values(values)
        if not equals or not field or not all(given):
            raise UserError(f"--arms: '{word}' is not FIELD=VALUE,VALUE; give for example precision=bf16,fp8_full")
        choices.append([f"{field}={value}" for value in given])
    return list(product(*choices))


def split_values(text: str) -> list[str]:
    """Split at the commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]
