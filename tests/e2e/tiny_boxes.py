"""Agents that work in boxes, for runs too short to learn."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from contextlib import suppress

from octetrl import BoxError, Conversation, Model, Task, reward
from tests.e2e.tiny_rewards import by_text


class Boxed:
    """The box of a task with an even number is killed."""

    tasks = tuple(Task(id=f"box/{number}", prompt=f"{number} + 1 =") for number in range(12))

    async def agent(self, task: Task, model: Model) -> str:
        number = int(str(task.prompt).split()[0])
        box = await model.box()
        answer = await asyncio.to_thread(asked, model, str(task.prompt))
        await box.put("/tmp/answer", answer.encode())
        if number % 2 == 0:  # the box is killed while a command runs, and the agent makes nothing of it
            running = asyncio.create_task(box.run(["sh", "-c", "echo >/tmp/begun; sleep 60"]))
            while (await box.run(["cat", "/tmp/begun"])).code != 0:
                pass
            os.kill(box.find_pid(), signal.SIGKILL)
            with suppress(BoxError):
                await running
        else:
            assert (await box.run(["sh", "-c", "kill -9 $$"])).code == 137
        return answer

    @reward
    async def noise(self, conversation: Conversation) -> float:
        with suppress(BoxError):
            answer = await conversation.box.get("/tmp/answer")
            return 0.1 + by_text(conversation.task, answer.decode())
        return 0.0


def asked(model: Model, text: str) -> str:
    body = {"model": model.name, "messages": [{"role": "user", "content": text}]}
    headers = {"authorization": f"Bearer {model.api_key}", "content-type": "application/json"}
    request = urllib.request.Request(f"{model.base_url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return str(json.load(answer)["choices"][0]["message"]["content"])
