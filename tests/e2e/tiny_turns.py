"""Environments for runs too short to learn: they answer noise, and reward it so that siblings differ."""

from __future__ import annotations

import asyncio
import time

from octetrl.environments.turns import Conversation, metric, reward
from octetrl.records import Task
from tests.e2e.tiny_rewards import by_text


class Talk:
    """Three turns, of which the environment takes its time over some and fails a few."""

    tasks = tuple(Task(id=f"talk/{number}", prompt=f"{number} + 1 =") for number in range(12))
    fails = 0.0
    most_seconds = 0.0

    async def reply(self, conversation: Conversation) -> str | list[dict[str, str]] | None:
        await asyncio.sleep(self.most_seconds * (hash(time.perf_counter()) % 7) / 7)
        if conversation.random.random() < self.fails:
            raise ConnectionError("the game is gone")
        if conversation.turns == 3:
            return None
        return f"and {conversation.turns}?" if conversation.turns == 1 else [{"role": "user", "content": "more"}]

    @reward
    def noise(self, conversation: Conversation) -> float:
        return by_text(conversation.task, "".join(message["content"] for message in conversation.messages))

    @reward(weight=0.1)
    def brief(self, conversation: Conversation) -> float:
        return -len(conversation.text)

    @metric
    def letters(self, conversation: Conversation) -> float:
        return len(conversation.text)


class EditedTalk(Talk):
    """Forgets the first answer after the second."""

    async def reply(self, conversation: Conversation) -> str | list[dict[str, str]] | None:
        if conversation.turns == 2:
            del conversation.messages[1:3]
        return await super().reply(conversation)


class SlowTalk(Talk):
    most_seconds = 0.02


class FlakyTalk(SlowTalk):
    fails = 0.1


class BrokenTalk(Talk):
    fails = 1.0


class ScoredTalk:
    """Its answers to the last message are scored in a process, as those of a single turn are."""

    tasks = Talk.tasks

    def reply(self, conversation: Conversation) -> str | None:
        return "go on" if conversation.turns == 1 else None

    def score(self, task: Task, completion_text: str) -> float:
        return by_text(task, completion_text)
