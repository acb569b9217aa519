"""Rows to conversations: what is learnt from each form, and what a bad row is told."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.config.errors import UserError
from octetrl.data.conversations import Conversation, Dialogue, conversation_of
from tests.unit.data.letters import LetterTokens

USER = {"role": "user", "content": "u"}
SAID = {"role": "assistant", "content": "a"}


def test_the_loss_is_on_the_answer_and_the_eos() -> None:
    (sample,) = Conversation("ab", "c").tokenized(LetterTokens()).samples
    assert sample.token_ids == (97, 98, 0, 99, 1)
    assert sample.loss_mask == (False, False, False, True, True)
    assert (sample.generator_logprobs, sample.policy_version, sample.advantage) == (None, None, 1.0)
    assert sample.pair is None


def test_several_turns_learn_from_each_answer() -> None:
    example = conversation_of({"messages": [USER, SAID, USER, SAID]}, "here")
    assert isinstance(example, Dialogue)
    (sample,) = example.tokenized(LetterTokens()).samples
    assert sample.loss_mask == (False, False, True, True) * 2


def test_both_forms_may_stand_in_one_file() -> None:
    assert conversation_of({"prompt": "p", "answer": "a", "level": 3}, "here") == Conversation("p", "a")
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    tool = {"role": "tool", "content": "3"}
    example = conversation_of({"messages": [USER, called, tool, SAID], "tools": [{"name": "add"}]}, "here")
    assert example == Dialogue((USER, called, tool, SAID), tools=({"name": "add"},))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "p"}, "no 'answer'"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": "hello"}, "'messages' is a string"),
        ({"messages": [USER]}, "no assistant message"),
        ({"messages": [USER, "hi"]}, "message 2 is a string"),
        ({"messages": [{"role": "asistant", "content": "x"}]}, "'asistant' is not allowed"),
        ({"messages": [{"content": "x"}]}, "role None is not allowed"),
        ({"messages": [USER, {"role": "assistant"}]}, "message 2: 'content' is null"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "the assistant's 'content' is empty"),
        ({"messages": [USER, SAID], "tools": "add"}, "'tools' is a string"),
        ({"prompt": "p", "answer": "a", "tools": [{"name": "add"}]}, "'tools' is only read beside 'messages'"),
    ],
)
def test_a_bad_row_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        conversation_of(record, "c.jsonl:7")
    assert message in str(caught.value) and str(caught.value).startswith("c.jsonl:7: ")
    assert "\n" not in str(caught.value)
