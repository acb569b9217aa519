"""Rows to conversations: what is learnt from each form, and what a bad row is told."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.data.conversations import Conversation, Dialogue, read_conversation, read_preference
from octetrl.system.errors import UserError
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
    example = read_conversation({"messages": [USER, SAID, USER, SAID]}, "here")
    assert isinstance(example, Dialogue)
    (sample,) = example.tokenized(LetterTokens()).samples
    assert sample.loss_mask == (False, False, True, True) * 2


def test_both_forms_may_stand_in_one_file() -> None:
    assert read_conversation({"prompt": "p", "answer": "a", "level": 3}, "here") == Conversation("p", "a")
    calls = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    tool = {"role": "tool", "content": "3"}
    example = read_conversation({"messages": [USER, calls, tool, SAID], "tools": [{"name": "add"}]}, "here")
    assert example == Dialogue((USER, calls, tool, SAID), tools=({"name": "add"},))


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ('{"a": [1, null], "b": "\\u00e9"}', {"a": [1, None], "b": "é"}),
        ("", {}),
        ({"a": None}, {"a": None}),
    ],
)
@pytest.mark.parametrize("inside", [True, False])
def test_arguments_as_json_text_are_read(given: Any, read: dict[str, Any], inside: bool) -> None:
    def said(arguments: Any) -> dict[str, Any]:
        call = {"name": "f", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": call} if inside else call]}

    record = {"messages": [USER, said(given)]}
    assert read_conversation(record, "here") == Dialogue((USER, said(read)))
    pair = read_preference({"messages": [USER], "chosen": [said(given)], "rejected": "b"}, "here")
    assert isinstance(pair.chosen, Dialogue) and pair.chosen.messages[1] == said(read)


def test_calls_without_any_are_left_out() -> None:
    record = {"messages": [USER, {**SAID, "tool_calls": None}, USER, {**SAID, "tool_calls": []}]}
    assert read_conversation(record, "here") == Dialogue((USER, SAID, USER, SAID))


def called(arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": [USER, called("{")]}, "message 2: a call's arguments '{' are not a JSON object"),
        ({"messages": [USER, called("[1]")]}, "arguments '[1]' are not a JSON object"),
        ({"messages": [USER, called('{"a": NaN}')]}, "are not a JSON object"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": "f"}]}, "'tool_calls' must be a list"),
        ({"messages": [USER, {"role": "assistant", "tool_calls": [{"function": 3}]}]}, "'tool_calls' must be a list"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, SAID]}, "message 1, part 1 is 'image'"),
        ({"prompt": [USER], "answer": []}, "'answer' is an empty list"),
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
        read_conversation(record, "c.jsonl:7")
    assert message in str(caught.value) and str(caught.value).startswith("c.jsonl:7: ")
    assert "\n" not in str(caught.value)
