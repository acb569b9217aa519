"""Where the answer is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.environments.rewards import extract_answer


@pytest.mark.parametrize(
    ("text", "marker", "answer"),
    [
        (" 42 \n", None, "42"),
        ("3 + 4 = 7\n#### 7\n", "####", "7"),
        ("#### 6, no:\n#### 7", "####", "7"),
        ("7", "####", None),
        ("####", "####", ""),
        ("<answer>1</answer> or <answer> 2 </answer>.", "<answer>", "2"),
        ("so <answer>2", "<answer>", "2"),
        ("A: 7", "A:", "7"),
    ],
)
def test_the_rule(text: str, marker: str | None, answer: str | None) -> None:
    assert extract_answer(text, marker) == answer


@given(
    st.text(alphabet=st.characters(exclude_characters="#<:")),
    st.sampled_from([(None, "{}"), ("####", "6\n#### {}"), ("<answer>", "<answer>{}</answer>"), ("A:", "A: {}")]),
)
def test_what_is_written_is_found(answer: str, written: tuple[str | None, str]) -> None:
    marker, text = written
    assert extract_answer(text.format(answer), marker) == answer.strip()
