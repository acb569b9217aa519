"""Agents for runs too short to learn: they call the policy as programs do, with OpenAI's client."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from octetrl import AgentFailed, Conversation, Model, Task, reward
from tests.e2e.tiny_rewards import by_text


class Caller:
    """Two answers in a loop, two more side by side from the first, one of them streamed."""

    tasks = tuple(Task(id=f"agent/{number}", prompt=f"{number} + 1 =") for number in range(12))

    async def agent(self, task: Task, model: Model) -> str:
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
            return await self.calls(client, [{"role": "user", "content": str(task.prompt)}])

    async def calls(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        first = await said(client, messages)
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "more"}]
        second = await said(client, messages, temperature=0.1)
        branch = [*messages[:2], {"role": "user", "content": "or?"}]
        others = await asyncio.gather(said(client, branch), streamed(client, branch))
        return " ".join([first, second, *sorted(others)])  # which of the two came first is chance

    @reward
    def noise(self, conversation: Conversation) -> float:
        return by_text(conversation.task, str(conversation.result))


class Failing(Caller):
    """What can go wrong, by the task's number: see test_agents.py."""

    async def calls(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        number = int(str(messages[0]["content"]).split()[0])
        if number % 4 == 0:
            raise ConnectionError("the shop is closed")
        first = await said(client, messages)
        if number % 4 == 1:
            raise AgentFailed("no answer in it")
        while number % 4 == 2:  # until its calls are used up
            await said(client, messages)
        return first


class Broken(Caller):
    async def calls(self, client: AsyncOpenAI, messages: list[Any]) -> str:
        await said(client, messages)
        raise KeyError("no such tool")


async def said(client: AsyncOpenAI, messages: list[Any], **options: Any) -> str:
    answer = await client.chat.completions.create(model="gpt-5", messages=messages, **options)
    return answer.choices[0].message.content or ""


async def streamed(client: AsyncOpenAI, messages: list[Any]) -> str:
    stream = await client.chat.completions.create(model="gpt-5", messages=messages, stream=True)
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    return "".join(parts)
