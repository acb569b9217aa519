"""Measures programs as rollouts: what they cost beside plain answers, and what is left of them after many.

    python -m lab.agents [--agents 64] [--waves 1] [--rollouts 1000] [--calls 4] [--wait 0.2,2] [--batch 48]
                         [--preset tiny] [--precision bf16] [--tokens 256]

Each agent is a program of this process that asks `calls` questions over HTTP in one conversation, and waits between
them for a random time from the interval `wait`, in seconds. At most `agents` of them run at once, in steps of `waves`
times as many, until there were `rollouts`. The model is random and generates noise, on a CPU or a GPU: up to a stop
string, or exactly `tokens` tokens.

`plain` is a step of as many answers without conversations, all of which the engine knows from its start. `whole` is a
step of fewer answers, each as long as all answers of an agent together, so that their contexts are as long. `share` and
`share_of_whole` are the agents' tokens per second over theirs. `plain` and the agents come after a step that is not
counted, which compiles kernels. The steps with agents are measured after about 100 rollouts and at the end: memory of
the process, threads, open files, and keys that are still open.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from lab.environments import GROUP, MAX_TOKENS, VOCAB_SIZE, Slow, figures, make_run
from lab.record import RESULTS, show, write_result
from octetrl.agents.server import AgentServer
from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.programs import Model
from octetrl.environments.turns import Conversation, reward
from octetrl.records import Task
from octetrl.rollout.collect import Collecting, collect_groups
from octetrl.run.evaluate import calibrate
from octetrl.run.state import Run

SHOWN = (
    "workload",
    "rollout/count",
    "rollout/tokens_per_second",
    "share",
    "share_of_whole",
    "rollout/batch_occupancy",
    "memory_mib",
    "threads",
    "open_files",
    "keys",
)
ENGINE = ("rollout/batch_occupancy", "rollout/prefilled_tokens", "time/capture")  # figures of the engine
FIRST = 100  # rollouts before the first count of what is held: by then everything was built once


class Asking:
    """Asks, waits, and asks again in the same conversation."""

    def __init__(self, rollouts: int, calls: int, wait: tuple[float, float]) -> None:
        self.tasks = [Task(id=f"asking/{number}", prompt=f"{number} + 1 =") for number in range(rollouts // GROUP)]
        self._calls, self._wait = calls, wait

    async def agent(self, task: Task, model: Model) -> str:
        messages: list[dict[str, Any]] = [{"role": "user", "content": task.prompt}]
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers, timeout=600, verify=False) as client:
            for number in range(self._calls):
                if number:
                    await asyncio.sleep(random.uniform(*self._wait))
                answer = await client.post("/chat/completions", json={"messages": messages})
                text = str(answer.raise_for_status().json()["choices"][0]["message"]["content"])
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
        return text

    @reward
    def chance(self, conversation: Conversation) -> float:
        return conversation.random.random()


def collected(
    run: Run, environment: Any, dialogue: Dialogue, step: int, exact: bool, longer: int = 1
) -> dict[str, float]:
    """exact: every answer has as many tokens as it may have. longer: how many times the recipe's number that is."""
    collection, state = replace(run.collection.at_step(step), group_size=GROUP), Collecting()
    if exact:
        most = longer * collection.sampling.max_new_tokens
        sampling = replace(collection.sampling, max_new_tokens=most, ignore_eos=True, stop=())
        collection = replace(collection, sampling=sampling)
    began = time.perf_counter()
    groups = collect_groups(environment.tasks, dialogue, run.workers, collection, state)
    seconds = time.perf_counter() - began
    assert state.occupancy is not None
    found = figures(groups, state.occupancy, seconds)
    if state.session is not None:
        found |= {name: value for name, value in state.session.named().items() if name in ENGINE}
    lost = [rollout.detail for group in groups for rollout in group.rollouts if rollout.reward is None]
    assert not lost, f"{len(lost)} agents failed: {lost[0]}"
    segments = [len(rollout.segments) for group in groups for rollout in group.rollouts]
    return {**found, "rollout/segments": sum(segments) / len(segments)}


def held(server: AgentServer) -> dict[str, float]:
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    files = len(os.listdir("/proc/self/fd"))
    keys = server.policy.num_open
    return {"memory_mib": resident / 2**20, "threads": threading.active_count(), "open_files": files, "keys": keys}


def with_agents(
    run: Run, environment: Asking, agents: int, rollouts: int, calls: int, exact: bool
) -> list[dict[str, float]]:
    """The figures of all steps together, after `FIRST` rollouts and at the end."""
    dialogue = Dialogue(environment, ConversationLimits(max_turns=calls, max_in_flight=agents))
    server = AgentServer(
        run.tokenizer,
        vocab_size=VOCAB_SIZE,
        context_length=run.config.model.context_length,
        variables={},
        tool_format="auto",
        ends=(),
        wake=dialogue.calls.wake,
    )
    dialogue.capture, dialogue.closes = server.policy, server.close
    steps: list[dict[str, float]] = []
    counted: list[dict[str, float]] = []
    try:
        while sum(step["rollout/count"] for step in steps) < rollouts:
            steps.append(collected(run, environment, dialogue, len(steps) + 1, exact))
            done = sum(step["rollout/count"] for step in steps)
            if (done >= FIRST and not counted) or done >= rollouts:
                seconds = sum(step["seconds"] for step in steps)
                tokens = sum(step["rollout/tokens_per_second"] * step["seconds"] for step in steps)
                averaged = ("rollout/engine_busy_share", "rollout/in_flight", "rollout/segments", *ENGINE)
                means = {
                    name: sum(step[name] * step["seconds"] for step in steps) / seconds
                    for name in averaged
                    if name in steps[0]
                }
                row = {"rollout/count": done, **means, "rollout/tokens_per_second": tokens / seconds}
                counted.append({**row, "seconds": seconds, **held(server)})
    finally:
        dialogue.close()
    return counted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--waves", type=int, default=1)
    parser.add_argument("--rollouts", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=4)
    parser.add_argument("--wait", default="0.2,2")
    parser.add_argument("--batch", type=int, default=48, help="sequences that the engine has room for")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--tokens", type=int, help="of every answer; without it, at most 96, up to a stop string")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    random.seed(0)
    low, high = map(float, asked.wait.split(","))
    common = {"precision": asked.precision, "model": asked.preset}
    exact, tokens = asked.tokens is not None, asked.tokens or MAX_TOKENS
    workload = f"{asked.agents} agents at once, {asked.calls} calls, {low:g}-{high:g} s between, room for {asked.batch}"
    workload += f", {tokens} tokens" if exact else ""
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), asked.preset, asked.batch, asked.calls, tokens, asked.precision)
        plain = Slow(asked.agents * asked.calls, 1, 0.0, 0.0)
        calibrate(run, plain.tasks, run.config.model.context_length)
        steps = [(plain, 1), (plain, 1)]  # the first builds pages and kernels
        if exact and asked.calls > 1:  # else the answers end where they like
            steps += [(Slow(asked.batch, 1, 0.0, 0.0), asked.calls)]
        answers: dict[int, dict[str, float]] = {}  # by how many times as long
        for step, (environment, longer) in enumerate(steps):
            dialogue = Dialogue(environment, ConversationLimits())
            answers[longer] = collected(run, environment, dialogue, step, exact, longer)
            dialogue.close()
        with_agents(run, Asking(asked.agents, asked.calls, (low, high)), asked.agents, 1, asked.calls, exact)
        agents = Asking(asked.agents * asked.waves, asked.calls, (low, high))
        counted = with_agents(run, agents, asked.agents, asked.rollouts, asked.calls, exact)
        run.close()
    names = {asked.calls: "whole", 1: "plain"}
    rows: list[dict[str, object]] = [
        {**common, "workload": f"{names[longer]}, room for {asked.batch}", **row} for longer, row in answers.items()
    ]
    per_second = {longer: row["rollout/tokens_per_second"] for longer, row in answers.items()}
    for row in counted:
        shares = {"share": row["rollout/tokens_per_second"] / per_second[1]}
        if exact:
            shares["share_of_whole"] = row["rollout/tokens_per_second"] / per_second[asked.calls]
        rows.append({**common, "workload": workload, **row, **shares})
    show(rows, "agents beside plain rollouts", SHOWN)
    write_result("agents", asked.preset, rows, asked.out)


if __name__ == "__main__":
    main()
