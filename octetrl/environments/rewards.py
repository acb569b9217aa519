"""Ready-made rewards that a recipe can name, for any environment whose tasks have an answer.

    environment: {dataset: chain_sum, reward: "octetrl.environments.rewards:last_number"}

`ExactScorer` is the reward of prompts and answers from a file (data/tasks.py). It compares character by character; for
any other comparison, write a reward function (`environments/python_object.py`).

`extract_answer` finds the answer in a completion, by the recipe's `environment.answer_marker`:

    None         the whole completion
    "####"       the text after the last "####"
    "<answer>"   the text after the last "<answer>", up to "</answer>" (or the end, when it is not closed)

The last marker counts, because a model may correct itself. White space around the answer is removed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from octetrl.records import Task

_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_SAME_SIGN = str.maketrans({"−": "-", ",": ""})  # a minus sign becomes a hyphen, and 1,234 becomes 1234


def last_number(task: Task, completion_text: str) -> float:
    """1.0 when the last number of the completion is `task.answer`, else 0.0. For models that follow no fixed format.

    Example: last_number(Task("1", "2 + 3 =", "5"), "2 plus 3 is 5.") is 1.0. Raises ValueError for a task without a
    number as its answer.
    """
    if task.answer is None or not _NUMBER.fullmatch(task.answer.translate(_SAME_SIGN).strip()):
        raise ValueError(f"task '{task.id}': the answer {task.answer!r} is not a number")
    numbers = _NUMBER.findall(completion_text.translate(_SAME_SIGN))
    if not numbers:
        return 0.0
    return float(Decimal(numbers[-1]) == Decimal(task.answer.translate(_SAME_SIGN).strip()))


def extract_answer(completion_text: str, marker: str | None) -> str | None:
    """The answer in `completion_text`; None when the marker does not occur. May be empty."""
    if marker is None:
        return completion_text.strip()
    _, found, answer = completion_text.rpartition(marker)
    if not found:
        return None
    if re.fullmatch(r"<\w+>", marker):
        answer = answer.partition(f"</{marker[1:]}")[0]
    return answer.strip()


def missing_answers(answers: Sequence[str | None]) -> list[str | None]:
    """What is wrong with each reference answer for `ExactScorer`; None if it can be compared with."""
    lacking = "there is no 'answer' to compare with; give one, leave the row out, or name a reward (environment.reward)"
    return [lacking if answer is None else None for answer in answers]


@dataclass(frozen=True)
class ExactScorer:
    """1.0 if the answer after `answer_marker` (None: the whole completion) equals `task.answer`, else 0.0."""

    answer_marker: str | None = None

    def __call__(self, task: Task, completion_text: str) -> float:
        if task.answer is None:
            raise ValueError(f"task '{task.id}' has no answer to compare with; give one, or a reward function")
        return float(self.answered(task, completion_text) == task.answer.strip())

    def answered(self, task: Task, completion_text: str) -> str | None:
        return extract_answer(completion_text, self.answer_marker)
