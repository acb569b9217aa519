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

from octetrl.config.errors import UserError
from octetrl.records import Reply, Task

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
ROLES = ("user", "tool")  # of what an environment says

current: ContextVar[Conversation] = ContextVar("conversation")


@dataclass(slots=True, eq=False)
class Conversation:
    """One rollout, so far. `messages` begin with the task's prompt; the model's own have role assistant."""

    task: Task
    random: Random
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: int = 0  # messages of the model
    text: str = ""  # the last of them, as it was drawn
    tool_calls: int = 0  # that the model made
    refused_calls: int = 0  # of these, those that it got wrong
    failed_calls: int = 0  # and those that a tool itself failed
    state: SimpleNamespace = field(default_factory=SimpleNamespace)  # the environment's own, empty at first
    answered: str | None = None  # for the environment to set: what the rollout answers, equal for equal answers (maj@k)

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": self.task.prompt})

    @staticmethod
    def current() -> Conversation:
        """Of the call that this is asked in: for tools, which are given their arguments alone."""
        try:
            return current.get()
        except LookupError:
            raise UserError("Conversation.current(): no conversation is under way here; ask in a tool") from None


def replies_of(said: object) -> tuple[Reply, ...]:
    """What `reply` gave, as messages; none of them is the end. Raises TypeError for what is no reply."""
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
