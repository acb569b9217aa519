"""A rollout as its environment sees it: the task, the messages so far, and a place for the environment's own state.

Each rollout has one `Conversation`. Two calls on it never run at the same time, except the tools of one message. An
environment stores a rollout's state here (`conversation.state.board`), never on itself, because siblings and other
tasks are in flight at the same time.

Random numbers must come from `conversation.random`, which is seeded by the rollout. A resumed run then repeats what the
killed one would have done, whatever the order in which environments answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import Any

from octetrl.records import Reply, Task
from octetrl.system.errors import UserError

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
ROLES = ("user", "tool")  # allowed in messages of an environment

current: ContextVar[Conversation] = ContextVar("conversation")


@dataclass(slots=True, eq=False)
class Conversation:
    """The state of one rollout. `messages` begins with the task's prompt; the model's messages have the role
    assistant."""

    task: Task
    random: Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0  # number of the model's messages
    text: str = ""  # the model's last message, as it was sampled
    tool_calls: int = 0  # number of calls that the model made
    refused_calls: int = 0  # number of calls that were wrong
    failed_calls: int = 0  # number of calls in which the tool failed
    state: SimpleNamespace = field(default_factory=SimpleNamespace)  # for the environment's own use; empty at the start
    answered: str | None = None  # set by the environment for maj@k: the rollout's answer, equal texts for equal answers

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": self.task.prompt})

    @staticmethod
    def current() -> Conversation:
        """The conversation of the current call. Tools need it, because they receive only their arguments."""
        try:
            return current.get()
        except LookupError:
            raise UserError("Conversation.current(): no conversation runs here; call it inside a tool") from None


def replies_of(said: object) -> tuple[Reply, ...]:
    """Convert the result of `reply` to messages; no messages end the conversation. Raises TypeError for any other
    result."""
    if said is None:
        return ()
    if isinstance(said, str):
        return (Reply("user", said),)
    messages = [said] if isinstance(said, Mapping) else said
    if not isinstance(messages, list | tuple):
        raise TypeError(f"reply gave {type(said).__name__}; it gives a text, messages, or None for the end")
    return tuple(_reply(message) for message in messages)


def _reply(message: object) -> Reply:
    role, content = (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    if role not in ROLES or not isinstance(content, str):
        raise TypeError(
            f'reply gave the message {str(message)[:60]!r}; it takes {{"role": "user" or "tool", "content": text}}'
        )
    return Reply(str(role), content)
