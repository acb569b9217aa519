"""Prompts as the template writes them, and turns that are only ever appended."""

from __future__ import annotations

from typing import Any

import pytest

from octetrl.records import Reply
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.run.tiny_model import train_tokenizer
from octetrl.system.errors import UserError


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["State the answer: 1 + 2 = 3, so the sum is 3."])


@pytest.fixture(scope="module")
def plain_tokenizer() -> Any:
    tokenizer = train_tokenizer(["State the answer: 1 + 2 = 3, so the sum is 3."])
    tokenizer.chat_template = None
    return tokenizer


def test_a_prompt_is_what_the_chat_template_says(tokenizer: Any) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2 ="}]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert ChatTokens(tokenizer, "Be brief.").prompt_tokens("1 + 2 =") == tuple(expected)


def test_an_answer_ends_with_eos_and_completes_the_conversation(tokenizer: Any) -> None:
    chat = ChatTokens(tokenizer)
    conversation = [{"role": "user", "content": "1 + 2 ="}, {"role": "assistant", "content": "so 3"}]
    expected = tokenizer.apply_chat_template(conversation, return_dict=False)
    assert chat.prompt_tokens("1 + 2 =") + chat.answer_tokens("so 3") == tuple(expected)


@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_is_appended_and_eos_is_said_once(tokenizer: Any, ended: bool) -> None:
    chat = ChatTokens(tokenizer)
    answer = chat.answer_tokens("so 3")[: None if ended else -1]
    conversation = [
        {"role": "user", "content": "1 + 2 ="},
        {"role": "assistant", "content": "so 3"},
        {"role": "user", "content": "are you sure?"},
    ]
    expected = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    assert chat.prompt_tokens("1 + 2 =") + answer + chat.reply_tokens(
        [Reply("user", "are you sure?")], answer
    ) == tuple(expected)


def test_what_was_generated_is_kept_where_text_would_tokenize_otherwise(tokenizer: Any) -> None:
    odd = tuple(token for letter in "answer" for token in tokenizer.encode(letter, add_special_tokens=False))
    assert odd != tuple(tokenizer.encode("answer", add_special_tokens=False))
    chat = ChatTokens(tokenizer)
    turns = chat.prompt_tokens("?") + odd + chat.reply_tokens([Reply("user", "and?")], odd)
    assert turns[: len(chat.prompt_tokens("?")) + len(odd)] == chat.prompt_tokens("?") + odd


def test_without_a_template_the_prompt_is_the_text(plain_tokenizer: Any) -> None:
    chat = ChatTokens(plain_tokenizer, "Be brief.")
    assert plain_tokenizer.decode(chat.prompt_tokens("1 + 2 =")) == "Be brief.\n\n1 + 2 ="
    assert plain_tokenizer.decode(ChatTokens(plain_tokenizer).prompt_tokens("1 + 2 =")) == "1 + 2 ="
    assert plain_tokenizer.decode(chat.reply_tokens([Reply("user", "sure?")], ())) == "\nsure?\n"


def test_a_tokenizer_without_eos_is_refused() -> None:
    class WithoutEos:
        chat_template = None
        eos_token_id = None

        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return []

        def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
            return ""

    with pytest.raises(UserError, match="no EOS"):
        ChatTokens(WithoutEos())
