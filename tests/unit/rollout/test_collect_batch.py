"""Refills: how much is drawn, when it ends, and seeds that never meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from octetrl.environments.scoring import Score
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnCompletions,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    Task,
)
from octetrl.rollout.collect import collect_batch
from octetrl.rollout.collected import CollectedBatch, CollectionSettings


class Chat:
    def of(self, task: Task) -> Chat:
        return self

    def prompt_tokens(self, prompt: str, limit: int | None = None) -> tuple[int, ...]:
        return (1,)


class Workers:
    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None, _: object = None
    ) -> list[list[Completion]]:
        self.requests += requests
        completion = Completion((5, 6), (-1.0, -1.0), "text", FinishReason.STOP, 0, "digest")
        assert on_completions is not None
        for index, request in enumerate(requests):
            on_completions([(index, sibling, completion) for sibling in range(request.num_siblings)])
        return [[completion] * request.num_siblings for request in requests]


class Scores:
    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        return [Score(RolloutStatus.SCORED, 1.0, None) for _ in completions]


class Tasks:
    metrics: Mapping[str, float] = MappingProxyType({})

    def __init__(self) -> None:
        self.drawn: list[int] = []

    def next_batch(self, n: int) -> list[Task]:
        self.drawn.append(n)
        first = sum(self.drawn[:-1])
        return [Task(str(first + i), "?") for i in range(n)]


def collect(every: int, *, prompts: int = 8, max_refills: int = 10) -> tuple[CollectedBatch, Tasks, Workers]:
    """Keeps the groups of every so many tasks; 0: none."""

    def keeps(group: RolloutGroup) -> bool:
        return every > 0 and int(group.task.id) % every == 0

    tasks, workers = Tasks(), Workers()
    sampling = SamplingParams(max_new_tokens=4)
    collection = CollectionSettings(Chat(), sampling, 2, 9, prompts=prompts, max_refills=max_refills)  # type: ignore[arg-type]
    return collect_batch(tasks, keeps, Scores(), workers, collection), tasks, workers


def test_one_draw_is_enough_where_all_teach() -> None:
    collected, tasks, _ = collect(1)
    assert tasks.drawn == [8] and collected.metrics == {
        "rollout/groups": 8.0, "rollout/kept_groups": 8.0, "rollout/refills": 0.0, "rollout/reward_restarts": 0.0
    }  # fmt: skip


def test_it_draws_as_many_as_should_do() -> None:
    collected, tasks, workers = collect(2)
    assert tasks.drawn == [8, 8] and len(collected.kept) == 8 and len(collected.groups) == 16
    few, tasks, _ = collect(2, prompts=3)  # 2 of 3 kept, then 1 is missing
    assert tasks.drawn == [3, 2] and len(few.kept) == 3
    assert len({request.seed for request in workers.requests}) == 16
    assert [request.id.split(":")[0] for request in workers.requests] == [str(place) for place in range(16)]


def test_no_more_than_the_cap() -> None:
    collected, tasks, _ = collect(0, max_refills=3)
    assert tasks.drawn == [8] * 4 and not collected.kept and collected.refills == 3
    assert collect(0, max_refills=0)[1].drawn == [8]
