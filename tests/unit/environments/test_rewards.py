"""The rewards that a recipe can name."""

from __future__ import annotations

import pytest

from octetrl.environments.rewards import last_number
from octetrl.records import Task


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("57", "The sum of 43 and 14 is 57.", 1.0),
        ("57", "57 is the sum of 43 and 14.", 0.0),
        ("-2", "5 - 7 = -2", 1.0),
        ("-2", "5 − 7 is −2, I think", 1.0),
        ("5", "12-7=5, or 12-5", 1.0),
        ("1234", "1,234.0", 1.0),
        ("7", "seven", 0.0),
        ("7", "", 0.0),
    ],
)
def test_last_number(answer: str, text: str, reward: float) -> None:
    assert last_number(Task("1", "?", answer), text) == reward


@pytest.mark.parametrize("answer", [None, "seven"])
def test_a_task_without_a_number_is_an_error(answer: str | None) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        last_number(Task("1", "?", answer), "7")
