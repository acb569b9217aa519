"""A chat of letters: a token a letter, so that what becomes of a text can be read off its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Masked:
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    across_borders: int = 0


class LetterTokens:
    """0 opens an answer, 1 is EOS."""

    def with_template(self, tools: Sequence[Any], variables: Mapping[str, Any]) -> LetterTokens:
        assert not tools and not variables, "letters have no template"
        return self

    def prompt_tokens(self, prompt: str, limit: int | None = None) -> tuple[int, ...]:
        return (*(ord(letter) for letter in prompt), 0)

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        return (*(ord(letter) for letter in answer), 1)

    def message_tokens(
        self, messages: Sequence[Mapping[str, Any]], *, learn_from: int = 0, tools: Sequence[Any] | None = None
    ) -> tuple[Masked]:
        tokens: list[int] = []
        mask: list[bool] = []
        for number, message in enumerate(messages):
            spoken = message["role"] == "assistant"
            of_message = self.answer_tokens(message["content"]) if spoken else self.prompt_tokens(message["content"])
            tokens += of_message
            mask += [spoken and number >= learn_from] * len(of_message)
        return (Masked(tuple(tokens), tuple(mask)),)
