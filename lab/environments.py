"""Measures how busy the engine is while environments are slow or fail: many conversations in flight at once.

    python -m lab.environments [--rollouts 200] [--turns 4] [--seconds 0,0.5,2] [--failing 0.1] [--preset tiny]

Each reply takes from 0 to twice `seconds`. A share of the replies, `failing`, then raise. The model is random and
generates noise up to a stop string. The figures are the share of the time in which the engine was idle because all
rollouts were with their environments, the mean number in flight, and the number of lost rollouts. A rollout is not lost
if it ends with a reward or with the status of its failure.

`lockstep` is the time of the same step without overlap: a loop generates a turn for all rollouts, then waits for the
slowest environment. It is computed: the time with immediate replies, plus the longest reply of each turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from lab.record import RESULTS, show, write_result
from octetrl.config.load import recipe_from_mapping
from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.turns import Conversation, reward
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.records import RolloutGroup, RolloutStatus, Task
from octetrl.rollout.collect import Collecting, collect_groups
from octetrl.rollout.drive import Occupancy
from octetrl.run.build import build_run, full_precision
from octetrl.run.state import Run
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config

GROUP, VOCAB_SIZE, MAX_TOKENS = 8, 320, 96


class Slow:
    """Answers `turns` - 1 times, after a while, and fails now and then."""

    def __init__(self, rollouts: int, turns: int, seconds: float, failing: float) -> None:
        self.tasks = [Task(id=f"slow/{number}", prompt=f"{number} + 1 =") for number in range(rollouts // GROUP)]
        self._turns, self._seconds, self._failing = turns, seconds, failing
        self.longest: dict[int, float] = defaultdict(float)  # of each turn's replies

    async def reply(self, conversation: Conversation) -> str | None:
        seconds = conversation.random.uniform(0, 2 * self._seconds)
        self.longest[conversation.turns] = max(self.longest[conversation.turns], seconds)
        await asyncio.sleep(seconds)
        if conversation.random.random() < self._failing:
            raise ConnectionError("the environment is gone")
        return "and then?" if conversation.turns < self._turns else None

    @reward
    def chance(self, conversation: Conversation) -> float:
        return conversation.random.random()


def make_run(
    folder: Path, preset: str, rollouts: int, turns: int, tokens: int = MAX_TOKENS, precision: str = "bf16"
) -> Run:
    """A random model with a tokenizer of its own, alive. tokens: the most of an answer."""
    tokenizer = save_tokenizer(["1 + 1 = and then?"], folder, VOCAB_SIZE)
    shape = {"vocab_size": VOCAB_SIZE, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    spec = spec_from_config(preset_config(preset) | shape)
    model = Decoder(spec, full_precision(spec), "train", device="cuda" if torch.cuda.is_available() else "cpu")
    with torch.no_grad():  # drawn where they are: billions of numbers from one core take minutes
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    save_weights(model, folder)
    del model
    (folder / "tasks.jsonl").write_text('{"prompt": "?", "answer": "!"}\n')  # a run has some; ours come from `Slow`
    recipe = recipe_from_mapping(
        {
            "model": {"path": str(folder), "context_length": 64 + turns * (tokens + 16)},
            "precision": precision,
            "rollout": {"max_prompt_tokens": 48, "max_new_tokens": tokens, "stop": ["e", "a", "1"]},
            "engine": {"page_size": 16, "max_batch": rollouts},
            "environment": {"kind": "jsonl", "dataset": str(folder / "tasks.jsonl"), "eval_size": 0},
            "logging": {"console": "quiet"},
        }
    )
    return build_run(recipe, trains=False)


def measure(run: Run, environment: Slow, step: int) -> tuple[list[RolloutGroup], Occupancy, float]:
    dialogue = Dialogue(environment, ConversationLimits(max_turns=64))
    collection, state = replace(run.collection.at_step(step), group_size=GROUP), Collecting()
    began = time.perf_counter()
    try:
        groups = collect_groups(environment.tasks, dialogue, run.workers, collection, state)
    finally:
        dialogue.close()
    assert state.occupancy is not None
    return groups, state.occupancy, time.perf_counter() - began


def figures(groups: Iterable[RolloutGroup], occupancy: Occupancy, seconds: float) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    tokens = sum(len(turn.completion.token_ids) for rollout in rollouts for turn in rollout.turns)
    failed = sum(rollout.status is RolloutStatus.ENVIRONMENT_ERROR for rollout in rollouts)
    rewarded = sum(rollout.reward is not None for rollout in rollouts)
    return {
        "rollout/count": len(rollouts),
        "rollout/rewarded": rewarded,
        "rollout/environment_error": failed,
        "rollout/lost": len(rollouts) - rewarded - failed,
        "rollout/engine_busy_share": 1 - occupancy.waiting_seconds / occupancy.seconds,
        "rollout/in_flight": occupancy.in_flight_seconds / occupancy.seconds,
        "rollout/with_environment": occupancy.with_environment_seconds / occupancy.seconds,
        "rollout/tokens_per_second": tokens / seconds,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=200)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--seconds", default="0,0.5,2")
    parser.add_argument("--failing", type=float, default=0.1)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    random.seed(0)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        run = make_run(Path(folder), asked.preset, asked.rollouts, asked.turns)
        measure(run, Slow(GROUP, asked.turns, 0.0, 0.0), 1)  # pages, kernels
        at_once = 0.0
        for seconds in map(float, asked.seconds.split(",")):
            environment = Slow(asked.rollouts, asked.turns, seconds, asked.failing)
            found = figures(*measure(run, environment, 2))
            at_once = at_once or found["seconds"]
            lockstep = at_once + sum(environment.longest.values())
            workload = f"{asked.rollouts}x{asked.turns} turns, {seconds:g} s a reply, {asked.failing:.0%} failing"
            rows.append(
                {
                    "precision": "bf16",
                    "workload": workload,
                    "model": asked.preset,
                    **found,
                    "lockstep_seconds": lockstep,
                }
            )
        run.close()
    show(rows, "an engine and slow environments")
    write_result("environments", asked.preset, rows, asked.out)


if __name__ == "__main__":
    main()
