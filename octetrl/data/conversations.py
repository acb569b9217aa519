"""Read conversations for SFT and convert them to samples.

A row has one of two forms, and a file may mix them:

    {"prompt": ..., "answer": ...}               tokenized like a rollout: the prompt with the start of the answer's
                                                 turn, then the answer and EOS
    {"messages": [{"role", "content"}, ...]}     several turns, exactly as the chat template writes them. `tools` is
                                                 optional and goes to the template

The loss covers only the assistant's text, including the end of its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from octetrl.data.rows import required_text
from octetrl.environments.tools import with_read_calls
from octetrl.records import Sample
from octetrl.system.errors import UserError, nearest
from octetrl.system.json_file import kind_of

ROLES = ("system", "developer", "user", "assistant", "tool")
Message = Mapping[str, Any]


class MaskedTokens(Protocol):
    """A tokenized conversation (rollout/message_tokens.py)."""

    @property
    def token_ids(self) -> tuple[int, ...]: ...

    @property
    def loss_mask(self) -> tuple[bool, ...]: ...

    @property
    def across_borders(self) -> int: ...


class TurnTokens(Protocol):
    """The interface that tokenizes turns: `ChatTokens` (rollout/chat_tokens.py)."""

    def prompt_tokens(self, prompt: str, /) -> tuple[int, ...]: ...

    def answer_tokens(self, answer: str, /) -> tuple[int, ...]: ...

    def message_tokens(
        self, messages: Sequence[Message], *, learn_from: int = 0, tools: Sequence[Any] | None = None
    ) -> Sequence[MaskedTokens]: ...


class Tokenized(NamedTuple):
    """A tokenized example: one conversation, or one for each of its answers (rollout/message_tokens.py), or the two of
    a preference pair with the chosen one first."""

    samples: tuple[Sample, ...]
    across_borders: int = 0  # number of tokens only partly in an answer, which are not trained on

    @property
    def longest(self) -> int:
        return max(len(sample.token_ids) for sample in self.samples)


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the answer to train on."""

    prompt: str
    answer: str

    def tokenized(self, chat: TurnTokens) -> Tokenized:
        prompt, answer = chat.prompt_tokens(self.prompt), chat.answer_tokens(self.answer)
        return Tokenized((supervised(prompt + answer, (False,) * len(prompt) + (True,) * len(answer)),))


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Several turns. The assistant's text from message `learn_from` on is trained on."""

    messages: tuple[Message, ...]
    learn_from: int = 0
    tools: tuple[Any, ...] | None = None

    def tokenized(self, chat: TurnTokens) -> Tokenized:
        parts = chat.message_tokens(self.messages, learn_from=self.learn_from, tools=self.tools)
        samples = tuple(supervised(tokens.token_ids, tokens.loss_mask) for tokens in parts)
        return Tokenized(samples, sum(tokens.across_borders for tokens in parts))


def supervised(token_ids: tuple[int, ...], loss_mask: tuple[bool, ...]) -> Sample:
    """Create a sample for supervised training, without the engine's log-probs."""
    return Sample(token_ids, loss_mask, generator_logprobs=None, advantage=1.0, policy_version=None)


def conversation_of(record: Mapping[str, Any], where: str) -> Conversation | Dialogue:
    """Read the conversation of a row. Raises UserError that begins with `where`."""
    if "messages" not in record:
        refuse_tools(record, where)
        return Conversation(required_text(record, "prompt", where), required_text(record, "answer", where))
    messages = messages_of(record, "messages", where)
    if all(message["role"] != "assistant" for message in messages):
        raise UserError(f"{where}: 'messages' has no assistant message to train on; add its answers")
    return Dialogue(messages, tools=tools_of(record, where))


def messages_of(record: Mapping[str, Any], key: str, where: str) -> tuple[Message, ...]:
    """Read `record[key]`, a list of messages with known roles and text. Raises UserError for anything else."""
    messages = record[key]
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else kind_of(messages)
        raise UserError(f'{where}: \'{key}\' is {found}; it must be a list of {{"role", "content"}}')
    for problem in _message_problems(messages, f"{where}: '{key}'"):
        raise UserError(problem)
    return tuple(with_read_calls(message, f"{where}: '{key}', message {at}") for at, message in enumerate(messages, 1))


def tools_of(record: Mapping[str, Any], where: str) -> tuple[Any, ...] | None:
    tools = record.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: 'tools' is {kind_of(tools)}; it must be a list of what the chat template takes")
    return tuple(tools) if tools else None


def refuse_tools(record: Mapping[str, Any], where: str) -> None:
    """Raise UserError if a row whose prompt is a text has tools, which only the template of messages could write."""
    if tools_of(record, where):
        raise UserError(
            f"{where}: 'tools' is only read beside 'messages', which the chat template writes; give the prompt as"
            " \"messages\", or remove 'tools'"
        )


def _message_problems(messages: Sequence[Any], where: str) -> Iterator[str]:
    for number, message in enumerate(messages, start=1):
        at = f"{where}, message {number}"
        if not isinstance(message, dict):
            yield f"{at} is {kind_of(message)}; it must be an object with role and content"
        elif message.get("role") not in ROLES:
            role = message.get("role")
            hint = nearest(role, ROLES) if isinstance(role, str) else ""
            yield f"{at}: role {role!r} is not allowed; it must be one of {', '.join(ROLES)}{hint}"
        elif isinstance(message.get("content"), list):
            yield f"{at}: 'content' is a list of parts; conversations are of text alone, so give the text as a string"
        elif not isinstance(message.get("content"), str):
            if not (message["role"] == "assistant" and message.get("tool_calls") and not message.get("content")):
                yield f"{at}: 'content' is {kind_of(message.get('content'))}; it must be a string"
        elif message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            yield f"{at}: the assistant's 'content' is empty; give its answer, or remove the message"
