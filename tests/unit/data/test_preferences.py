"""Preference rows in all their forms: the pair's two samples differ in what was said last, and only that is learnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from octetrl.data.conversations import Conversation, Dialogue, Preference, read_preference
from octetrl.records import Sample
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.system.errors import UserError
from tests.unit.data.letters import LetterTokens, Masked
from tests.unit.rollout.templates import tokenizer_of

USER = {"role": "user", "content": "u"}
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
def test_a_bad_row_is_named(record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read_preference(record, "p.jsonl:7")
    assert message in str(caught.value) and str(caught.value).startswith("p.jsonl:7: ")
