"""A run of a bench's workload: its steps are those of `octetrl train` (run/loop.py), with nothing to read or to score.

    tasks      random prompts, new ones for every step; all steps have the workload's lengths
    answers    end at the workload's lengths; the first steps may be short
    rewards    random numbers, so every group has advantages

The steps therefore generate ahead (run/ahead.py) or learn beside the tail (run/beside_tail.py) as the recipe says.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

from octetrl.algorithms.table import build_algorithm
from octetrl.bench.model import BenchModel, tokenizer_of
from octetrl.bench.workload import Workload
from octetrl.config.schema import Recipe
from octetrl.environments.base import Taskset
from octetrl.environments.score import Score
from octetrl.environments.scoring_round import Key
from octetrl.records import RolloutStatus, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collected import CollectionSettings
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.run.build import method_of
from octetrl.run.state import Run
from octetrl.telemetry.console import Console
from octetrl.workers.protocol import Workers

LIMITS = "answer_limits"  # of a task's metadata: tokens of each sibling's answer


class WorkloadTasks(Taskset):
    """A batch is the groups of the workload, each with its lengths. Answers of the first batches have at most the
    tokens of `short`."""

    def __init__(self, workload: Workload, group_size: int, short: Sequence[int]) -> None:
        siblings = workload.siblings
        self._groups = [siblings[first : first + group_size] for first in range(0, len(siblings), group_size)]
        self._longest = max(answer for _, answer in siblings)
        self._short, self._batch = short, 0

    def next_batch(self, n: int) -> list[Task]:
        assert n == len(self._groups), "a step has the whole workload"
        batch, self._batch = self._batch, self._batch + 1
        most = self._short[batch] if batch < len(self._short) else self._longest
        return [
            Task(
                id=f"bench {batch}/{place}",
                prompt=f"{batch} {place} {group[0][0]}",
                metadata={LIMITS: tuple(min(most, answer) for _, answer in group)},
            )
            for place, group in enumerate(self._groups)
        ]

    @property
    def metrics(self) -> Mapping[str, float]:
        return {}

    def state(self) -> dict[str, Any]:
        return {"batch": self._batch}

    def restore(self, state: Mapping[str, Any], *, has_changed: bool = False) -> None:
        self._batch = state["batch"]


class RandomTokens(ChatTokens):
    """A prompt "batch place tokens" becomes so many random tokens, which follow from it and the seed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size, self._seed = vocab_size, seed

    def of(self, task: Task) -> Self:
        return self

    def prompt_tokens(self, prompt: str, limit: int | None = None) -> tuple[int, ...]:
        draw = random.Random(f"{self._seed} {prompt}")
        return tuple(draw.choices(range(self._vocab_size), k=int(prompt.split()[-1])))

    def first_prompt_tokens(self, prompt: str, limit: int) -> tuple[int, ...]:
        return self.prompt_tokens(prompt)[:limit]


class RandomRewards:
    """Scores each answer at once, by its task and sibling."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        return [self.reward((0, sibling), task) for sibling, (task, _) in enumerate(completions)]

    def begin(self) -> RandomRound:
        return RandomRound(self)

    def reward(self, key: Key, task: Task) -> Score:
        return Score(RolloutStatus.SCORED, random.Random(f"{self._seed} {task.id} {key[1]}").random())

    def close(self) -> None:
        pass


class RandomRound:
    """A `ScoringRound` that never waits."""

    is_done = True

    def __init__(self, rewards: RandomRewards) -> None:
        self._rewards, self._scores = rewards, dict[Key, Score]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, key: Key, task: Task, completion_text: str) -> None:
        self._scores[key] = self._rewards.reward(key, task)

    def advance(self) -> None:
        pass

    def so_far(self) -> dict[Key, Score]:
        return dict(self._scores)

    def finish(self) -> dict[Key, Score]:
        return self._scores


def workload_run(model: BenchModel, recipe: Recipe, workload: Workload, workers: Workers, short: Sequence[int]) -> Run:
    """The run of `recipe` on `workers`, which have its models. `short`: tokens of the answers of its first steps."""
    tasks = WorkloadTasks(workload, recipe.rollout.group_size, short)
    chat = RandomTokens(model.spec.vocab_size, recipe.seed)
    collection = CollectionSettings.from_config(chat, recipe.rollout, seed=recipe.seed)
    return Run(
        config=recipe,
        tokenizer=cast(Any, tokenizer_of(model)),  # of answers without text
        taskset=tasks,
        conversations=None,
        rewards=cast(Any, RandomRewards(recipe.seed)),
        algorithm=build_algorithm(recipe.algorithm),
        workers=workers,
        method=method_of(recipe, workers),
        console=Console("quiet", recipe.steps),
        collection=replace(
            collection,
            sampling=replace(collection.sampling, ignore_eos=True),
            context_length=recipe.model.context_length,
            answer_limits=lambda task: task.metadata[LIMITS],
        ),
        lengths=ExpectedLengths(),
    )
