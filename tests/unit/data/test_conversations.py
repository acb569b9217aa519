"""Rows become conversations and preference pairs: which tokens each form trains on, and how a bad row is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from octetrl.data.conversations import Conversation, Dialogue, Preference, read_conversation, read_preference
from octetrl.records import Sample
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.errors import UserError
from tests.unit.data.letters import LetterTokens, Masked
from tests.unit.rollout.templates import tokenizer_of

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
        ({"messages": [USER, SAID], "tools": "add"}, "'tools': not JSON"),
        ({"prompt": "p", "answer": "a", "tools": [{"name": "add"}]}, "'tools' is only read beside 'messages'"),
    ],
)
def test_a_bad_row_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_conversation(record, "c.jsonl:7")
    assert message in str(caught.value) and str(caught.value).startswith("c.jsonl:7: ")
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- preferences


FIRST = {"role": "assistant", "content": "f"}
GOOD = {"role": "assistant", "content": "g"}
BAD = {"role": "assistant", "content": "b"}
MORE = {"role": "user", "content": "m"}


def samples_of(record: dict[str, Any]) -> tuple[Sample, ...]:
    return read_preference(record, "here").tokenized(LetterTokens()).samples


def learnt(sample: Sample) -> str:
    return "".join(
        chr(token) for token, mask in zip(sample.token_ids, sample.loss_mask, strict=True) if mask and token > 1
    )


def test_texts_are_tokens_as_a_rollouts_are() -> None:
    assert read_preference({"prompt": "p", "chosen": "g", "rejected": "b"}, "here") == Preference(
        Conversation("p", "g"), Conversation("p", "b")
    )


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "u", "chosen": "g", "rejected": "b"},
        {"messages": [USER], "chosen": "g", "rejected": "b"},
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        {"prompt": "u", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_every_form_gives_the_same_pair(record: dict[str, Any]) -> None:
    chosen, rejected = samples_of(record)
    assert (chosen.pair, chosen.chosen, rejected.pair, rejected.chosen) == (0, True, 0, False)
    assert chosen.token_ids == (ord("u"), 0, ord("g"), 1)
    assert (learnt(chosen), learnt(rejected)) == ("g", "b")


def test_earlier_answers_are_not_learnt_and_longer_ones_are_wholly() -> None:
    chosen, rejected = samples_of({"messages": [USER, FIRST, USER], "chosen": [GOOD, MORE, GOOD], "rejected": [BAD]})
    assert (learnt(chosen), learnt(rejected)) == ("gg", "b")


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER], "chosen": "g", "rejected": "b"},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    ],
)
def test_both_answers_have_the_tools_of_the_row(record: dict[str, Any]) -> None:
    pair = read_preference({**record, "tools": [{"name": "add"}]}, "here")
    assert isinstance(pair.chosen, Dialogue) and isinstance(pair.rejected, Dialogue)
    assert pair.chosen.tools == pair.rejected.tools == ({"name": "add"},)


def test_tokens_across_borders_of_both_answers_are_counted() -> None:
    class Bordered(LetterTokens):
        """As many tokens across borders as the last message has letters."""

        def message_tokens(
            self, messages: Sequence[Mapping[str, Any]], *, learn_from: int = 0, tools: Sequence[Any] | None = None
        ) -> tuple[Masked]:
            (masked,) = super().message_tokens(messages, learn_from=learn_from, tools=tools)
            return (replace(masked, across_borders=len(messages[-1]["content"])),)

    pair = read_preference({"messages": [USER], "chosen": "g", "rejected": "bad"}, "here")
    assert pair.tokenized(Bordered()).across_borders == 1 + 3


def test_pairs_that_the_template_makes_equal_are_refused_and_thoughts_make_a_difference() -> None:
    r1 = ChatTokens(tokenizer_of("r1"))
    prompt = {"messages": [{"role": "user", "content": "2 + 2?"}]}
    better, worse = "<think>\nSum.\n</think>\n\n4", "<think>\nHm.\n</think>\n\n4"
    chosen, rejected = read_preference({**prompt, "chosen": better, "rejected": worse}, "here").tokenized(r1).samples
    assert [tokenizer_of("r1").decode(one.token_ids).split("<think>\n")[1] for one in (chosen, rejected)] == [
        "Sum.\n</think>\n\n4<|end|>", "Hm.\n</think>\n\n4<|end|>",
    ]  # fmt: skip
    twice = {"prompt": "2 + 2?", "chosen": better, "rejected": better.removeprefix("<think>\n")}
    with pytest.raises(UserError, match="same tokens"):
        read_preference(twice, "here").tokenized(r1)
    answers = [{"role": "assistant", "content": better}, {"role": "user", "content": "?"}]
    several = {**prompt, "chosen": [*answers, answers[0]], "rejected": worse}
    with pytest.raises(UserError, match="one answer each"):
        read_preference(several, "here").tokenized(r1)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "p", "chosen": "g"}, "no 'rejected'"),
        ({"prompt": "p", "chosen": "g", "rejected": "g"}, "are the same"),
        ({"chosen": "g", "rejected": "b"}, "'chosen' is a text without a prompt"),
        ({"prompt": "p", "chosen": "g", "rejected": ""}, "'rejected' is an empty string"),
        (
            {"prompt": "else", "chosen": [USER, GOOD], "rejected": [USER, BAD]},
            "'prompt' is not in the common beginning",
        ),
        ({"messages": [USER], "chosen": [MORE], "rejected": [BAD]}, "'chosen' has no assistant message"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, MORE]}, "'chosen' has no assistant message"),
        ({"messages": 3, "chosen": "g", "rejected": "b"}, "'messages' is a number"),
        ({"prompt": "p", "chosen": "g", "rejected": "b", "tools": [{}]}, "'tools' is only read beside 'messages'"),
    ],
)
def test_a_bad_pair_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_preference(record, "p.jsonl:7")
    assert message in str(caught.value) and str(caught.value).startswith("p.jsonl:7: ")
