"""A rollout as its environment sees it: the task, the messages so far, and a place for the environment's own state.

Each rollout has one `Conversation`. Two calls on it never run at the same time, except the tools of one message. An
environment stores a rollout's state here (`conversation.state.board`), never on itself, because siblings and other
tasks are in flight at the same time.

Random numbers must come from `conversation.random`, which is seeded by the rollout. A resumed run then repeats what the
killed one would have done, whatever the order in which environments answer.

Rewards and metrics are decorated functions of a conversation that has ended:

    @reward                      weight 1
    @reward(weight=0.2)          weight 0.2
    @metric                      not part of the reward, but recorded in the same way

A rollout's reward is the weighted sum of its rewards. The unweighted value of each is stored with the rollout, and its
mean is a metric of the step (`reward/component/<name>`, `environment/<name>`). The functions may be async. If a reward
or metric raises, hangs or returns no finite number, the rollout has no reward, and its status says why.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from numbers import Real
from random import Random
from types import SimpleNamespace
from typing import Any, TypeVar, overload

from octetrl.boxes.box import Box
from octetrl.boxes.boxes import RolloutBoxes
from octetrl.environments.scoring import NAME
from octetrl.records import Reply, Task
from octetrl.system.errors import UserError

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}

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
    logged: dict[str, float] = field(default_factory=dict)  # metrics, by `octetrl.log`
    result: Any = None  # that an agent returned
    answered: str | None = None  # set by the environment for maj@k: the rollout's answer, equal texts for equal answers
    boxes: RolloutBoxes = field(default_factory=RolloutBoxes)  # that it has opened

    def __post_init__(self) -> None:
        self.messages += map(dict, self.task.messages)

    @property
    def box(self) -> Box:
        """The box that was opened last. It stays open until the rewards have ended. Raises UserError if there is
        none."""
        if not self.boxes.opened:
            raise UserError("conversation.box: no box was opened; open one with model.box() or conversation.open_box()")
        return self.boxes.opened[-1]

    async def open_box(self, **settings: Any) -> Box:
        """Start a box by the recipe's `environment.box`, with these of its settings changed, for the time of the
        rollout. Raises BoxError, UserError."""
        return await self.boxes.open(**settings)

    @staticmethod
    def current() -> Conversation:
        """The conversation of the current call. Tools need it, because they receive only their arguments."""
        try:
            return current.get()
        except LookupError:
            raise UserError("Conversation.current(): no conversation runs here; call it inside a tool") from None


def replies_of(result: object) -> tuple[Reply, ...]:
    """Convert the result of `reply` to messages; no messages end the conversation. Raises TypeError for any other
    result."""
    if isinstance(result, str):
        return (Reply("user", result),)
    messages = () if result is None else [result] if isinstance(result, Mapping) else result
    if not isinstance(messages, list | tuple):
        raise TypeError(f"reply gave {type(result).__name__}; it gives a text, messages, or None for the end")
    replies = []
    for message in messages:
        match message:
            case {"role": "user" | "tool" as role, "content": str(content)}:
                replies.append(Reply(role, content))
            case _:
                shown = repr(str(message)[:60])
                raise TypeError(
                    f'reply gave the message {shown}; it takes {{"role": "user" or "tool", "content": text}}'
                )
    return tuple(replies)


F = TypeVar("F", bound=Callable[..., Any])
_MARK = "_octetrl_component"


@dataclass(frozen=True, slots=True)
class Component:
    """A reward of an environment, or a metric if `weight` is None."""

    name: str
    weight: float | None
    function: Callable[..., Any]  # of the conversation


@overload
def reward(function: F, /) -> F: ...
@overload
def reward(*, weight: float) -> Callable[[F], F]: ...
def reward(function: F | None = None, /, *, weight: float = 1.0) -> F | Callable[[F], F]:
    """Marks a method as a reward."""
    if not isinstance(weight, Real) or not math.isfinite(weight):
        raise UserError(f"@reward(weight={weight!r}): a weight is a finite number, such as 0.5")
    mark = _marker(float(weight))
    return mark if function is None else mark(function)


def metric(function: F, /) -> F:
    """Marks a method as a metric."""
    return _marker(None)(function)


def _marker(weight: float | None) -> Callable[[F], F]:
    def mark(function: F) -> F:
        setattr(function, _MARK, (weight,))
        return function

    return mark


def components_of(environment: object) -> tuple[Component, ...]:
    """All rewards and metrics in the order of their definition, those of base classes first. Raises UserError for a
    name that is not allowed for a metric."""
    own = getattr(environment, "__dict__", {})
    spaces = [*(vars(kind) for kind in reversed(type(environment).__mro__)), own]
    components = []
    for name in dict.fromkeys(name for space in spaces for name in space):
        mark = getattr(getattr(type(environment), name, None), _MARK, None) or getattr(own.get(name), _MARK, None)
        if mark is None:
            continue
        if not NAME.fullmatch(name):
            raise UserError(
                f"environment: '{name}' is not a valid name for a reward or metric; use lower case letters and _"
            )
        components.append(Component(name, mark[0], getattr(environment, name)))
    return tuple(components)
