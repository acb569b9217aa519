"""Conversations to samples: loss on the answer alone, in an order that resumes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octetrl.config.errors import UserError
from octetrl.data.conversations import (
    Conversation,
    ConversationOrder,
    read_conversations,
    to_sample,
)


class LetterTokens:
    """A token a letter; 0 opens the answer, 1 is EOS."""

    def prompt_tokens(self, prompt: str) -> tuple[int, ...]:
        return (*(ord(letter) for letter in prompt), 0)

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        return (*(ord(letter) for letter in answer), 1)


CONVERSATIONS = [Conversation(f"q{index}", f"a{index}") for index in range(10)]


def order_of(conversations: list[Conversation] = CONVERSATIONS, seed: int = 0) -> ConversationOrder:
    return ConversationOrder(conversations, LetterTokens(), seed=seed, context_length=6)


def test_the_loss_is_on_the_answer_and_the_eos() -> None:
    sample = to_sample(Conversation("ab", "c"), LetterTokens())
    assert sample.token_ids == (97, 98, 0, 99, 1)
    assert sample.loss_mask == (False, False, False, True, True)
    assert (sample.generator_logprobs, sample.policy_version, sample.advantage) == (None, None, 1.0)


def test_a_resumed_order_is_the_order_never_interrupted() -> None:
    whole = order_of().next_batch(40)
    killed, resumed = order_of(), order_of()
    killed.next_batch(13)
    resumed.restore(json.loads(json.dumps(killed.state())))
    assert resumed.next_batch(27) == whole[13:]
    assert sorted(sample.token_ids for sample in whole[:10]) == sorted(
        to_sample(conversation, LetterTokens()).token_ids for conversation in CONVERSATIONS
    )


def test_other_conversations_are_not_resumed() -> None:
    state = order_of().state()
    for other in (order_of(CONVERSATIONS[:9]), order_of(seed=1)):
        with pytest.raises(UserError, match="not those the checkpoint was made with"):
            other.restore(state)


def test_what_is_too_long_or_missing_is_refused() -> None:
    with pytest.raises(UserError, match=r"conversation 2 has 10 tokens, model\.context_length is 6"):
        order_of([Conversation("q", "a"), Conversation("question", "")])
    with pytest.raises(UserError, match="none to learn from"):
        order_of([])


def test_a_file_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": "p", "answer": "a"}\n{"prompt": "p"}\n')
    with pytest.raises(UserError, match=r"c\.jsonl:2: no 'answer'"):
        read_conversations(path)
    path.write_text('{"prompt": "p", "answer": "a"}\n')
    assert read_conversations(path) == [Conversation("p", "a")]
