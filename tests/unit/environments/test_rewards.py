"""Where the answer is in a completion, and the rewards that a recipe can name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.environments.rewards import ExactScorer, extract_answer, last_number
from octetrl.records import Task


@pytest.mark.parametrize(
    ("text", "marker", "answer"),
    [
        (" 42 \n", None, "42"),
        ("#### 6, no:\n#### 7", "####", "7"),
        ("7", "####", None),
        ("####", "####", ""),
        ("<answer>1</answer> or <answer> 2 </answer>.", "<answer>", "2"),
        ("so <answer>2", "<answer>", "2"),
    ],
)
def test_the_answer_stands_after_the_last_marker(text: str, marker: str | None, answer: str | None) -> None:
    assert extract_answer(text, marker) == answer


@given(
    st.text(alphabet=st.characters(exclude_characters="#<:")),
    st.sampled_from([(None, "{}"), ("####", "6\n#### {}"), ("<answer>", "<answer>{}</answer>"), ("A:", "A: {}")]),
)
def test_what_is_written_is_found(answer: str, written: tuple[str | None, str]) -> None:
    marker, text = written
    assert extract_answer(text.format(answer), marker) == answer.strip()


def test_exact_answers() -> None:
    task = Task(id="t", prompt="?", answer="Paris")
    assert [ExactScorer("####")(task, text) for text in ("#### Paris ", "#### paris", "Paris")] == [1.0, 0.0, 0.0]
    assert ExactScorer()(task, "Paris\n") == 1.0
    with pytest.raises(ValueError, match="no answer"):
        ExactScorer()(Task(id="t", prompt="?"), "x")


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("57", "The sum of 43 and 14 is 57.", 1.0),
        ("57", "57 is the sum of 43 and 14.", 0.0),
        ("-2", "5 − 7 is −2, I think", 1.0),
        ("5", "12-7=5, or 12-5", 1.0),
        ("1234", "1,234.0", 1.0),
        ("7", "seven", 0.0),
    ],
)
def test_last_number(answer: str, text: str, reward: float) -> None:
    assert last_number(Task("1", "?", answer), text) == reward


@pytest.mark.parametrize("answer", [None, "seven"])
def test_a_task_without_a_number_is_an_error(answer: str | None) -> None:
    with pytest.raises(ValueError, match="is not a number"):
        last_number(Task("1", "?", answer), "7")
