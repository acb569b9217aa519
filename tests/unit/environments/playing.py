"""One conversation with a player that is a function, without engine and tokens: what an environment makes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from octetrl.environments.calls import CallResult
from octetrl.environments.dialogue import ConversationLimits, Dialogue, Failed, RequestedCall
from octetrl.environments.tools.formats import FORMATS
from octetrl.environments.turns import Conversation, current
from octetrl.records import Completion, FinishReason, RolloutStatus, Task
from octetrl.system.errors import error_line

Player = Callable[[Conversation], str]


@dataclass
class Played:
    conversation: Conversation
    status: RolloutStatus = RolloutStatus.SCORED
    detail: str | None = None
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def said(self) -> list[tuple[str, str]]:
        return [(message["role"], message["content"]) for message in self.conversation.messages]


class Refuses:
    """A scorer for environments that have none of their own."""

    def score(self, completions: Any, /) -> list[Any]:
        raise AssertionError("not asked here")

    def close(self) -> None:
        """Nothing."""


def play(environment: Any, player: Player, *, task: int = 0, max_turns: int = 12, family: str | None = None) -> Played:
    """Task number `task` to its end."""
    scorer = Refuses() if hasattr(environment, "score") else None
    tool_format = None if family is None else FORMATS[family]
    dialogue = Dialogue(environment, ConversationLimits(max_turns), tool_format=tool_format, scorer=scorer)
    chosen: Task = environment.tasks[task]
    played = Played(dialogue.begin(chosen, "0"))
    with asyncio.Runner() as runner:
        try:
            _speak(runner, dialogue, played, player)
            judged = _led(runner, played, dialogue.judge(played.conversation))
            played.reward, played.components, played.metrics = judged.reward, judged.components, judged.metrics
        except Failed as failed:
            played.status, played.detail = failed.status, str(failed.detail)
        _led(runner, played, dialogue.hook("finish", played.conversation))
    dialogue.close()
    return played


def _speak(runner: asyncio.Runner, dialogue: Dialogue, played: Played, player: Player) -> None:
    conversation = played.conversation
    _led(runner, played, dialogue.hook("start", conversation))
    while True:
        completion = Completion((1,), (0.0,), player(conversation), FinishReason.STOP, 0, "none")
        message = dialogue.receive(conversation, completion)
        if not _led(runner, played, dialogue.answer(conversation, message)):
            return
        if conversation.turns == dialogue.limits.max_turns:
            played.status = RolloutStatus.UNFINISHED
            return


def _led(
    runner: asyncio.Runner, played: Played, generator: Generator[tuple[RequestedCall, ...], tuple[CallResult, ...], Any]
) -> Any:
    came: Any = None
    while True:
        try:
            wanted = generator.send(came)
        except StopIteration as stop:
            return stop.value
        came = tuple(_called(runner, played, do) for do in wanted)


def _called(runner: asyncio.Runner, played: Played, do: RequestedCall) -> CallResult:
    async def call() -> Any:
        current.set(played.conversation)
        value = do.function(*do.args)
        return await value if asyncio.iscoroutine(value) else value

    try:
        return CallResult(runner.run(call()))
    except Exception as error:
        return CallResult(raised=error, error=error_line(error))
