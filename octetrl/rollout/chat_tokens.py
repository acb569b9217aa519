"""Conversations as token ids, append-only.

The first prompt is rendered by the tokenizer's chat template (or, when it has none, is the plain text) and
tokenized once. From there on tokens are only ever appended: what the policy generated stays as it was
generated, and a reply adds the tokens that the template puts around it. Rendering the whole conversation anew
in each turn would be shorter, but text does not always tokenize back to the tokens it came from, and
templates drop earlier reasoning; then the trainer would see a sequence that the policy never did.

The tokens around a reply are found by rendering a conversation whose answer is a placeholder and keeping what
follows the placeholder: the end of the answer's turn, the reply's turn, the opening of the next answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from octetrl.config.errors import UserError
from octetrl.records import Rollout
from octetrl.rollout.message_tokens import Message, TokenizedMessages, tokenize_messages

_PLACEHOLDER = "PLACEHOLDER-OF-THE-ANSWER"


class Tokenizer(Protocol):
    """What is asked of a tokenizer; transformers' have it."""

    chat_template: Any
    eos_token_id: Any

    all_special_tokens: Any

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ChatTokens:
    """Token ids of prompts, replies and answers. Raises UserError for a tokenizer without EOS."""

    def __init__(self, tokenizer: Tokenizer, system_prompt: str | None = None) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "tokenizer: it has no EOS token, so no answer could end; set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt

    def prompt_tokens(self, prompt: str) -> tuple[int, ...]:
        """The first turn: system prompt, `prompt` as the user's words, and the opening of the answer.

        Without a chat template: the system prompt, a blank line and `prompt`, with the tokenizer's own BOS.
        """
        if self._tokenizer.chat_template is not None:
            text = self._render([*self._system(), {"role": "user", "content": prompt}], opens_answer=True)
            return tuple(self._tokenizer.encode(text, add_special_tokens=False))
        text = prompt if self._system_prompt is None else f"{self._system_prompt}\n\n{prompt}"
        return tuple(self._tokenizer.encode(text, add_special_tokens=True))

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        """A given answer as the policy would have generated it, EOS included."""
        return (*self._tokenizer.encode(answer, add_special_tokens=False), self._tokenizer.eos_token_id)

    def reply_tokens(self, reply: str, completion_token_ids: Sequence[int]) -> tuple[int, ...]:
        """What to append after a completion for the environment's `reply` and the opening of the next answer.

        Without a chat template: the reply between line breaks. An EOS that the completion ends with, and that the
        template would add, is not said twice.
        """
        if self._tokenizer.chat_template is None:
            return tuple(self._tokenizer.encode(f"\n{reply}\n", add_special_tokens=False))
        conversation = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": _PLACEHOLDER},
            {"role": "user", "content": reply},
        ]
        _, found, after = self._render(conversation, opens_answer=True).partition(_PLACEHOLDER)
        if not found:
            raise UserError("tokenizer: its chat template leaves out earlier answers, so turns can't be appended")
        tokens = tuple(self._tokenizer.encode(after, add_special_tokens=False))
        said = bool(completion_token_ids) and completion_token_ids[-1] == self._tokenizer.eos_token_id
        return tokens[1:] if said and tokens[0] == self._tokenizer.eos_token_id else tokens

    def message_tokens(
        self, messages: Sequence[Message], *, learn_from: int = 0, tools: Sequence[Any] | None = None
    ) -> TokenizedMessages:
        """A given conversation as the chat template writes it (rollout/message_tokens.py). The system prompt comes
        before one that begins without a system message of its own."""
        own = self._system() if messages[0]["role"] not in ("system", "developer") else []
        return tokenize_messages(self._tokenizer, [*own, *messages], learn_from=learn_from + len(own), tools=tools)

    def _system(self) -> list[dict[str, str]]:
        return [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]

    def _render(self, conversation: list[dict[str, str]], *, opens_answer: bool) -> str:
        text: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=opens_answer
        )
        return text


def conversation_tokens(rollout: Rollout) -> tuple[int, ...]:
    """All tokens of a rollout, in the order in which the policy saw or made them."""
    return tuple(token for turn in rollout.turns for token in (*turn.prompt_token_ids, *turn.completion.token_ids))
