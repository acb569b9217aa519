"""Environments that answer, well and badly."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from typing import Any

from octetrl.environments.tools.definition import ToolError, tool
from octetrl.environments.turns import Conversation, metric, reward
from octetrl.records import Task

TASKS = [Task(id=f"t{number}", prompt=f"{number}?", answer=str(number)) for number in range(3)]


class Echo:
    """Says back what it heard until it has heard `turns` messages. Behaves badly when told to by `does`."""

    tasks = TASKS

    def __init__(self, turns: int = 3, seconds: float = 0.0, does: str = "") -> None:
        self.turns, self.seconds, self.does = turns, seconds, does

    def start(self, conversation: Conversation) -> None:
        conversation.state.heard = []

    def reply(self, conversation: Conversation) -> Any:
        conversation.state.heard.append(conversation.text)
        if self.seconds:
            time.sleep(random.random() * self.seconds)  # not of the conversation's chance: it must change nothing
        if conversation.turns == 2 and self.does:
            return misbehave(self.does)
        return None if conversation.turns == self.turns else f"You said {conversation.text}"

    @reward
    def heard_all(self, conversation: Conversation) -> float:
        return len(conversation.state.heard) == self.turns

    @reward(weight=0.5)
    async def length(self, conversation: Conversation) -> float:
        await asyncio.sleep(0)
        return len(conversation.text)

    @metric
    def chance(self, conversation: Conversation) -> float:
        return conversation.random.random()


def misbehave(how: str) -> Any:
    if how == "raise":
        raise KeyError("nothing here")
    if how == "exit":
        sys.exit(3)
    if how == "hang":
        time.sleep(30)
    if how == "number":
        return 7
    if how == "system":
        return {"role": "system", "content": "no"}
    return how


class Calculator:
    """One that adds, in many ways."""

    tasks = TASKS

    @tool
    def add(self, a: int, b: int) -> int:
        """The sum of two whole numbers."""
        Conversation.current().state.sums = getattr(Conversation.current().state, "sums", 0) + 1
        return a + b

    @tool
    def refuse(self) -> str:
        """Never works."""
        raise ToolError("not today")

    @tool
    def crash(self) -> str:
        """Breaks."""
        raise ZeroDivisionError("division by zero")

    @tool
    async def wait(self) -> str:
        """Waits for ever."""
        await asyncio.sleep(30)
        return ""

    @property
    def tools(self) -> list[Any]:
        return [self.add, self.refuse, self.crash, self.wait]

    @reward
    def right(self, conversation: Conversation) -> float:
        return conversation.text == "42"
