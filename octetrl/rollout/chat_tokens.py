"""Conversations as token ids, append-only.

The first prompt is rendered by the tokenizer's chat template (without one it is the plain text) and tokenized once.
Later, tokens are only appended. The policy's tokens stay as they were generated, and a reply adds the tokens that the
template puts around it. It would be simpler to render the whole conversation again in each turn. But text does not
always tokenize back to the same tokens, and templates drop earlier reasoning. The trainer would then see a sequence
that the policy never saw.

To find the tokens around replies, a conversation is rendered with a placeholder as the answer. The part after the
placeholder is kept: the end of the answer's turn, the replies' turns, the opening of the next answer. If an answer
ended with a stop token, of the template or of the model, the template's end token is not added again. If it ended with
a stop string, the end token is added, and masked like the replies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

from octetrl.environments.tools.messages import TEMPLATE_ERRORS, template_fails, with_read_calls
from octetrl.records import Reply, Task
from octetrl.rollout.encode import Encoder
from octetrl.rollout.message_tokens import (
    PLACEHOLDER,
    Message,
    Template,
    TokenizedMessages,
    opened_thoughts,
    tokenize_messages,
    without_opening,
)
from octetrl.system.errors import UserError
from octetrl.system.text import escaped


class ChatTokenizer(Protocol):
    """The interface that is needed of a tokenizer; transformers' tokenizers have it."""

    chat_template: Any
    eos_token_id: Any

    all_special_tokens: Any

    def __call__(self, text: str, *, add_special_tokens: bool, return_offsets_mapping: bool) -> Any: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def convert_ids_to_tokens(self, ids: list[int]) -> list[Any]: ...

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


class ReplyError(ValueError):
    """The chat template can't write these replies."""


class ChatTokens:
    """Token ids of prompts, replies and answers. Raises UserError for a tokenizer without EOS.

    tools: their schemas, which the template writes into the prompt. ends: further stop tokens of the model.
    context_length: a text that certainly has more tokens is not tokenized; every method then raises TextTooLong.
    by_environment: the chat tokens of each environment of several, with its own tools and system prompt.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        system_prompt: str | None = None,
        *,
        tools: Sequence[Any] = (),
        ends: Collection[int] = (),
        context_length: int | None = None,
        by_environment: Mapping[str, ChatTokens] = MappingProxyType({}),
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise UserError(
                "tokenizer: it has no EOS token, so no answer could end; set eos_token in its tokenizer_config.json"
            )
        self._tokenizer = tokenizer
        self._encoder = Encoder(tokenizer, context_length)
        self._system_prompt = system_prompt
        self._tools = {"tools": list(tools)} if tools else {}
        self._ends = frozenset((tokenizer.eos_token_id, *ends))
        self._by_environment = by_environment

    def of(self, task: Task) -> ChatTokens:
        """The chat tokens of the task's environment."""
        return self._by_environment.get(task.environment, self)

    def prompt_tokens(self, prompt: str, limit: int | None = None) -> tuple[int, ...]:
        """The first turn: system prompt, `prompt` as the user's message, and the opening of the answer.

        Without a chat template: the system prompt, a blank line and `prompt`, with the tokenizer's own BOS. `limit`:
        it may raise TextTooLong above this number of tokens; None: the context length.
        """
        text, special = self._prompt_text(prompt)
        return tuple(self._encoder.ids(text, special=special, limit=limit))

    def conversation_prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A whole conversation and the opening of the next answer. Raises UserError without a chat template."""
        if self._tokenizer.chat_template is None:
            raise UserError("tokenizer: it has no chat template, so it can't write messages; give a prompt instead")
        own = self._system() if messages[0]["role"] not in ("system", "developer") else []
        said = [with_read_calls(one, f"message {place}") for place, one in enumerate(messages, 1)]
        text = Template(self._tokenizer, self._tools.get("tools")).render([*own, *said], True)
        return tuple(self._encoder.ids(text, special=False))

    def plain_tokens(self, text: str) -> tuple[int, ...]:
        """The text itself, with the tokenizer's own BOS and without the chat template."""
        return tuple(self._encoder.ids(text, special=True))

    def tokens_of(self, prompt: str | Sequence[Mapping[str, str]], *, plain: bool) -> tuple[int, ...]:
        """A user's message (`plain`: the text alone, without a template), or a conversation's messages."""
        if not isinstance(prompt, str):
            return self.conversation_prompt([dict(message) for message in prompt])
        return self.plain_tokens(prompt) if plain else self.prompt_tokens(prompt)

    def first_prompt_tokens(self, prompt: str, limit: int) -> tuple[int, ...]:
        """The first `limit` of `prompt_tokens`, of a prompt of any length."""
        text, special = self._prompt_text(prompt)
        return tuple(self._encoder.ids(self._encoder.beginning(text, limit), special=special, limit=limit + 1)[:limit])

    def answer_tokens(self, answer: str) -> tuple[int, ...]:
        """A given answer as the policy would have generated it, EOS included. An answer that begins with the thoughts'
        tag loses it if the template's generation prompt ends with it."""
        said = without_opening(answer, self._opened_thoughts)
        return (*self._encoder.ids(said, special=False), self._tokenizer.eos_token_id)

    def reply_tokens(self, replies: Sequence[Reply], completion_token_ids: Sequence[int]) -> tuple[int, ...]:
        """What to append after a completion for the environment's replies and the opening of the next answer.

        Without a chat template: each reply between line breaks. Raises ReplyError for replies that the template
        refuses, UserError for a template that leaves out earlier answers.
        """
        if self._tokenizer.chat_template is None:
            text = "".join(f"\n{reply.text}\n" for reply in replies)
            return tuple(self._encoder.ids(text, special=False))
        conversation = [
            {"role": "user", "content": "-"},
            {"role": "assistant", "content": PLACEHOLDER},
            *({"role": reply.role, "content": reply.text} for reply in replies),
        ]
        try:
            _, found, after = self._render(conversation).partition(PLACEHOLDER)
        except TEMPLATE_ERRORS as error:
            roles = ", ".join(reply.role for reply in replies)
            raise ReplyError(f"the chat template refuses replies of the roles {roles} ({error})") from error
        if not found:
            raise UserError("tokenizer: its chat template leaves out earlier answers, so turns can't be appended")
        after = escaped(after)
        ids, offsets = self._encoder.with_offsets(after)
        has_ended = bool(completion_token_ids) and completion_token_ids[-1] in self._ends
        begin = self._end_of_turn(after) if has_ended else 0
        return tuple(token for token, (_, end) in zip(ids, offsets, strict=True) if begin == 0 or end > begin)

    def _end_of_turn(self, after: str) -> int:
        """Number of characters that end an answer: blanks, if any, and a special token. 0: there is no special
        token."""
        blanks = len(after) - len(after.lstrip())
        specials = [*self._tokenizer.all_special_tokens, *self._tokenizer.convert_ids_to_tokens(sorted(self._ends))]
        ends = [len(special) for special in specials if special and after.startswith(special, blanks)]
        return blanks + max(ends) if ends else 0

    def message_tokens(
        self, messages: Sequence[Message], *, learn_from: int = 0, tools: Sequence[Any] | None = None
    ) -> tuple[TokenizedMessages, ...]:
        """A given conversation as the chat template writes it, in one or several (rollout/message_tokens.py). The
        system prompt comes before one that begins without a system message of its own."""
        own = self._system() if messages[0]["role"] not in ("system", "developer") else []
        return tokenize_messages(
            self._tokenizer, self._encoder, [*own, *messages], learn_from=learn_from + len(own), tools=tools
        )

    @cached_property
    def _opened_thoughts(self) -> str:
        if self._tokenizer.chat_template is None:
            return ""
        try:
            return opened_thoughts(Template(self._tokenizer, None).render, [{"role": "user", "content": "-"}])
        except UserError:  # it takes no given answers, which only rows of messages need
            return ""

    def _prompt_text(self, prompt: str) -> tuple[str, bool]:
        """The text of the first turn, and whether the tokenizer's own BOS belongs before it."""
        if self._tokenizer.chat_template is None:
            return (prompt if self._system_prompt is None else f"{self._system_prompt}\n\n{prompt}"), True
        messages = [*self._system(), {"role": "user", "content": prompt}]
        try:
            return self._render(messages, **self._tools), False
        except TEMPLATE_ERRORS as error:
            raise template_fails(error) from error

    def _system(self) -> list[dict[str, str]]:
        return [] if self._system_prompt is None else [{"role": "system", "content": self._system_prompt}]

    def _render(self, conversation: list[dict[str, str]], **options: Any) -> str:
        """The rendered conversation with the opening of the next answer."""
        text: str = self._tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True, **options
        )
        return text
