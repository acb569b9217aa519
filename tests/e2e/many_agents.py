"""Runs 1,000 agents, 64 at once, and shows that nothing of them is left: memory, threads, open files, keys.

    python -m tests.e2e.many_agents [--rollouts 1000] [--agents 64]        or: make test-faults

The engine is a double with fixed answers, so the time is that of HTTP, templates and the capture. Every eighth
agent raises, every eighth leaves while its answer is made, and every eighth is a command.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from octetrl.agents.server import AgentServer
from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.programs import Model
from octetrl.environments.turns import Conversation, reward
from octetrl.records import SamplingParams, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import Collecting, CollectionSettings, collect_groups
from tests.unit.rollout.talking import TalkingWorkers
from tests.unit.rollout.templates import stop_tokens, tokenizer_of

FIRST = 128  # rollouts before the first count: by then everything was built once
FAMILY, CONTEXT, CALLS, GROUP = "qwen3", 4000, 4, 8
MOST_MIB = 16.0  # that memory may grow by after the first count
PROGRAM = "import os; assert os.environ['OPENAI_API_KEY']; print('so 15')"


class Asking:
    def __init__(self, agents: int) -> None:
        self.tasks = [Task(id=f"asking/{number}", prompt=f"{number} + 1 =") for number in range(agents // GROUP)]
        self._begun = 0

    async def agent(self, task: Task, model: Model) -> str:
        self._begun += 1
        kind, messages = self._begun % 8, [{"role": "user", "content": str(task.prompt)}]
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers, timeout=600, verify=False) as client:
            for _ in range(CALLS):
                asked = asyncio.create_task(client.post("/chat/completions", json={"messages": messages}))
                if kind == 1 and len(messages) > 2:
                    await asyncio.sleep(0)
                    asked.cancel()
                    break
                text = (await asked).raise_for_status().json()["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?" * 20}]
        if kind == 2:
            raise ConnectionError("the shop is closed")
        if kind == 3:
            assert (await model.run([sys.executable, "-S", "-c", PROGRAM])).code == 0
        return "15"

    @reward
    def calls(self, conversation: Conversation) -> float:
        return conversation.turns


def held(server: AgentServer) -> dict[str, float]:
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what the C library keeps of freed memory is no leak
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    return {"memory_mib": resident / 2**20, "threads": threads, "open_files": files, "keys": server.policy.num_open}


def main() -> None:
    parser = argparse.ArgumentParser(description="run many agents, and count what is left of them")
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=64)
    given = parser.parse_args()
    tokenizer, stops = tokenizer_of(FAMILY), stop_tokens(FAMILY)
    environment = Asking(given.agents)
    dialogue = Dialogue(environment, ConversationLimits(max_turns=CALLS))
    server = AgentServer(
        tokenizer, vocab_size=len(tokenizer), context_length=CONTEXT, variables={}, tool_format="auto", ends=stops,
        wake=dialogue.calls.wake,
    )  # fmt: skip
    dialogue.capture, dialogue.closes = server.policy, server.close
    said = [*tokenizer.encode("so 15, " * 20), tokenizer.eos_token_id]
    collection = CollectionSettings(ChatTokens(tokenizer, ends=stops), SamplingParams(200), GROUP, 400, seed=3)
    statuses, counted, done, began = Counter[str](), list[dict[str, Any]](), 0, time.perf_counter()
    try:
        while done < given.rollouts:
            workers = TalkingWorkers(tokenizer, lambda *_: said)
            groups = collect_groups(environment.tasks, dialogue, workers, collection, Collecting())
            statuses.update(rollout.status.value for group in groups for rollout in group.rollouts)
            done += given.agents
            del workers, groups
            if (done >= FIRST and not counted) or done >= given.rollouts:
                time.sleep(1.0)  # connections of the last agents close
                counted.append({"rollouts": done, "seconds": time.perf_counter() - began, **held(server)})
                print(counted[-1], flush=True)
    finally:
        dialogue.close()
    print(dict(statuses))
    first, last = counted[0], counted[-1]
    assert last["keys"] == 0 and statuses.keys() == {"scored", "agent_error"}
    assert last["memory_mib"] - first["memory_mib"] < MOST_MIB, "memory grows"
    assert last["threads"] <= first["threads"] and last["open_files"] <= first["open_files"], (
        "threads or files are left"
    )


if __name__ == "__main__":
    main()
