"""Rewards for runs too short to learn a sum: each tells siblings apart from the first step on.

They live at the top level of a module because a reward worker imports them by name.
"""

from __future__ import annotations

import hashlib
import os
import random
import time
from typing import Any

from octetrl.records import Task

NOTES = "OCTETRL_TEST_NOTES"


def by_text(task: Task, completion_text: str) -> float:
    """A number in [0, 1) that looks like chance and is a function of the text alone."""
    return _fraction(completion_text)


def slowly_by_text(task: Task, completion_text: str) -> float:
    """The same, so slowly that its process is mostly busy while a step is scored."""
    time.sleep(0.05)
    return _fraction(completion_text)


def sometimes_wrong(task: Task, completion_text: str) -> float:
    """Raises for a third of the texts and is NaN for another third."""
    fraction = _fraction(completion_text)
    if fraction < 1 / 3:
        raise KeyError(f"no reward for {fraction}")
    return float("nan") if fraction < 2 / 3 else fraction


def sometimes_hangs(task: Task, completion_text: str) -> float:
    """Never comes back for a quarter of the texts."""
    fraction = _fraction(completion_text)
    if fraction < 1 / 4:
        time.sleep(600)
    return fraction


def always_hangs(task: Task, completion_text: str) -> float:
    """Notes its calls in a file, where a test names one."""
    if NOTES in os.environ:
        with open(os.environ[NOTES], "a") as notes:
            notes.write("called\n")
    time.sleep(600)
    return 1.0


def always_wrong(task: Task, completion_text: str) -> float:
    raise RuntimeError("out of order")


def always_equal(task: Task, completion_text: str) -> float:
    return 0.5


def _fraction(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) / 2**32


def mostly_equal(task: Task, completion_text: str) -> float:
    """Equal for all answers to most tasks."""
    return _fraction(completion_text) if _fraction(task.prompt) < 0.35 else 0.5


def fails_at_length(task: Task, completion_text: str) -> float:
    """Raises for texts that only a longer limit gives."""
    if len(completion_text) > 12:
        raise OverflowError(f"{len(completion_text)} letters")
    return _fraction(completion_text)


class DrawingTask(Task):
    """Draws from the global generators whenever its prompt is looked at, as what a user writes may."""

    def __getattribute__(self, name: str) -> Any:
        if name == "prompt":
            import numpy  # only here: every reward worker imports this module

            random.random()
            numpy.random.random()
        return super().__getattribute__(name)


class DrawingEnvironment:
    tasks = tuple(DrawingTask(str(number), f"{number} + 1 =") for number in range(20))

    def score(self, task: Task, completion_text: str) -> float:
        return _fraction(completion_text)


drawing_environment = DrawingEnvironment()
