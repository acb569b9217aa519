"""Ready-made rewards that a recipe can name, for any environment whose tasks have an answer.

environment: {dataset: chain_sum, reward: "octetrl.environments.rewards:last_number"}
"""

from __future__ import annotations

import re
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
