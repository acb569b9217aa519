"""The reward of `lab.recovery`. In a file of its own, because each reward process imports it."""

from __future__ import annotations

import secrets


def varied(task: object, text: str) -> float:
    """A random number, so that siblings differ and every group has a gradient. Answers of random weights may all be
    empty texts: their tokens are mostly none of the tokenizer's."""
    return float(secrets.randbelow(11))
