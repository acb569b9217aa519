"""A taskset of verifiers with a harness: its tasks are what may happen to an episode."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import verifiers.v1 as vf

PROGRAM = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
for turn in range(int(sys.argv[2])):
    body = {"model": "any", "temperature": 0.1, "messages": messages}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["KEY"]}
    request = urllib.request.Request(os.environ["BASE"] + "/chat/completions", json.dumps(body).encode(), headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    messages.append({"role": "user", "content": "sure?"})
"""


class Sum(vf.TaskData):
    answer: str = ""
    turns: int = 2


class SumTask(vf.Task[Sum]):
    async def setup(self, trace: Any, runtime: Any) -> None:
        if self.data.name == "setup raises":
            raise ConnectionError("no such image")
        if self.data.name == "setup hangs":
            await asyncio.sleep(60)

    @vf.reward(weight=2.0)
    async def right(self, trace: Any) -> float:
        if self.data.name == "scoring raises":
            raise KeyError("no such file")
        if self.data.name == "scoring hangs":
            await asyncio.sleep(60)
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def replies(self, trace: Any) -> float:
        return float(trace.num_turns)


NAMES = (
    "right",
    "wrong",
    "too long",
    "harness fails",
    "setup raises",
    "setup hangs",
    "scoring raises",
    "scoring hangs",
)


class SumsTaskset(vf.Taskset[SumTask, vf.TasksetConfig]):
    def load(self) -> Any:
        for name in NAMES:
            turns = {"too long": 9, "harness fails": -1}.get(name, 2)
            answer = "so 16" if name == "wrong" else "so 15"
            yield SumTask(Sum(prompt=f"{name}: 7 + 8 =", name=name, answer=answer, turns=turns), self.config.task)


class SumsHarness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        program = PROGRAM if data.turns > 0 else "raise SystemExit('no space left')"
        command = [sys.executable, "-c", program, data.prompt, str(data.turns)]
        return await runtime.run_program(command, {"BASE": endpoint, "KEY": secret})


__all__ = ["SumsHarness", "SumsTaskset"]
