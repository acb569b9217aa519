"""Tasks to groups: one call of the engine, one of the scorers, and a status for every rollout."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octetrl.algorithms.table import build_algorithm
from octetrl.config.schema import RolloutConfig
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.scoring import Score
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnCompletions,
    Reply,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Task,
    Turn,
)
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import (
    MEMORY,
    CollectedBatch,
    Collecting,
    CollectionSettings,
    ExpectedLengths,
    collect_batch,
    collect_groups,
)
from octetrl.rollout.samples import to_samples, versions_of
from octetrl.run.tiny_model import train_tokenizer
from tests.objectives import objective


class EchoWorkers:
    """Answers request r, sibling s with the text "r.s"; sibling 1 is cut off."""

    def __init__(self) -> None:
        self.calls: list[list[GenerationRequest]] = []

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None, _: object = None
    ) -> list[list[Completion]]:
        self.calls.append(list(requests))
        drawn = self._drawn(requests)
        ended = [(index, sibling, one) for index, of in enumerate(drawn) for sibling, one in enumerate(of)]
        assert on_completions is not None
        for one in reversed(ended):
            on_completions([one])
            on_completions([])
        return drawn

    def _drawn(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        return [
            [
                Completion(
                    token_ids=(7, sibling),
                    logprobs=(-0.5, -0.25),
                    text=f"{request.id}.{sibling}",
                    finish_reason=FinishReason.LENGTH if sibling == 1 else FinishReason.STOP,
                    policy_version=4,
                    precision_digest="digest",
                )
                for sibling in range(request.num_siblings)
            ]
            for request in requests
        ]


class SiblingScores:
    """The reward is the sibling's number; sibling 2 fails."""

    def __init__(self) -> None:
        self.calls: list[list[tuple[Task, str]]] = []

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        self.calls.append(list(completions))
        return [
            Score(RolloutStatus.REWARD_TIMEOUT, None, "no reward")
            if text.endswith(".2")
            else Score(RolloutStatus.SCORED, float(text.rpartition(".")[2]))
            for _, text in completions
        ]


@pytest.fixture(scope="module")
def chat() -> ChatTokens:
    tokenizer: Any = train_tokenizer(["1 + 2 ="])
    return ChatTokens(tokenizer)


def collection_of(chat: ChatTokens, **changes: Any) -> CollectionSettings:
    return CollectionSettings.from_config(chat, RolloutConfig(group_size=4, max_prompt_tokens=12, **changes), seed=1)


TASKS = [Task(id="a", prompt="1 + 2 ="), Task(id="b", prompt="x" * 40), Task(id="a", prompt="1 + 2 =")]


def test_groups_come_in_the_order_of_the_tasks_with_a_status_each(chat: ChatTokens) -> None:
    workers, scores, state = EchoWorkers(), SiblingScores(), Collecting()
    groups = collect_groups(TASKS, scores, workers, collection_of(chat), state)
    assert [group.task for group in groups] == TASKS
    assert len(workers.calls) == len(scores.calls) == 1
    scored, truncated, timeout = RolloutStatus.SCORED, RolloutStatus.TRUNCATED, RolloutStatus.REWARD_TIMEOUT
    for group in (groups[0], groups[2]):
        assert [rollout.status for rollout in group.rollouts] == [scored, truncated, timeout, scored]
        assert [rollout.reward for rollout in group.rollouts] == [0.0, 1.0, None, 3.0]
        assert group.rewards == (0.0, 1.0, 3.0)
    assert groups[0].rollouts[3].text == "0:a.3"
    assert groups[2].rollouts[3].text == "2:a.3"
    prompt = chat.prompt_tokens("1 + 2 =")
    assert groups[0].rollouts[0].turns[0].prompt_token_ids == prompt
    twice = (2.0, 2)  # the mean length of two groups of this class
    assert state.lengths == ExpectedLengths({"a": 2}, {f"|{len(prompt).bit_length()}": twice, "|": twice})


def test_a_prompt_that_is_too_long_is_counted_and_not_generated_from(chat: ChatTokens) -> None:
    workers = EchoWorkers()
    groups = collect_groups(TASKS, SiblingScores(), workers, collection_of(chat), Collecting())
    assert [request.id for request in workers.calls[0]] == ["0:a", "2:a"]
    counts = Counter(rollout.status for group in groups for rollout in group.rollouts)
    assert counts[RolloutStatus.PROMPT_TOO_LONG] == 4
    assert counts[RolloutStatus.REWARD_ERROR] == 0
    assert sum(counts.values()) == 12
    rollout = groups[1].rollouts[0]
    assert rollout.reward is None
    assert rollout.turns == ()
    assert "rollout.max_prompt_tokens is 12" in (rollout.detail or "")


def test_requests_say_what_the_recipe_says(chat: ChatTokens) -> None:
    workers = EchoWorkers()
    collection = collection_of(chat, temperature=0.7, top_p=0.9, stop=("\n",), max_new_tokens=5)
    collect_groups(TASKS[:1], SiblingScores(), workers, collection, Collecting())
    sampling = workers.calls[0][0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop, sampling.max_new_tokens) == (0.7, 0.9, ("\n",), 5)


def test_seeds_are_new_for_each_step_and_place_and_the_same_again_on_resume(chat: ChatTokens) -> None:
    def seeds(step: int) -> list[int]:
        workers = EchoWorkers()
        collect_groups(TASKS, SiblingScores(), workers, collection_of(chat).at_step(step), Collecting())
        return [request.seed for request in workers.calls[0]]

    assert seeds(3) == seeds(3)
    assert len({*seeds(3), *seeds(4)}) == 4
    assert all(0 <= seed < 2**63 for seed in seeds(3))


def test_how_long_a_tasks_answers_were_is_told_when_it_comes_again(chat: ChatTokens) -> None:
    workers, lengths = EchoWorkers(), ExpectedLengths()
    for step in (1, 2):
        settings = collection_of(chat).at_step(step)
        collect_groups(TASKS[:2], SiblingScores(), workers, settings, Collecting(lengths))
    first, second = workers.calls
    assert [request.expected_tokens for request in first] == [None]
    assert [request.expected_tokens for request in second] == [2]
    assert lengths.of_task == {"a": 2}  # nothing was drawn for the prompt that is too long


def noted_for_a(task: Task, completion_text: str) -> float:
    """The sibling's number; the scores of task a leave a file each."""
    sibling = completion_text.rpartition(".")[2]
    if task.id == "a":
        Path(task.metadata["folder"], sibling).touch()
    return float(sibling)


def hangs_for_a(task: Task, completion_text: str) -> float:
    time.sleep(60.0 if task.id == "a" else 0.0)
    return float(completion_text.rpartition(".")[2])


class Sampling(EchoWorkers):
    """Ends one completion after the other, and calls back meanwhile, as forwards do, `until` something holds."""

    def __init__(self, until: Callable[[], bool] = lambda: True) -> None:
        super().__init__()
        self.until = until

    def generate(
        self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None, _: object = None
    ) -> list[list[Completion]]:
        drawn = self._drawn(requests)
        assert on_completions is not None
        for index, completions in enumerate(drawn):
            for sibling, completion in enumerate(completions):
                on_completions([(index, sibling, completion)])
                on_completions([])
        end = time.monotonic() + 60.0
        while not self.until():
            assert time.monotonic() < end, "it did not come while completions were sampled"
            time.sleep(0.001)
            on_completions([])
        return drawn


def test_answers_are_scored_while_others_are_sampled(chat: ChatTokens, tmp_path: Path) -> None:
    """The engine's call does not return before the first task's answers are scored."""
    tasks = [Task("a", "1 + 2 =", metadata={"folder": str(tmp_path)}), *(Task(name, "1 + 2 =") for name in "bc")]
    with RewardWorkers(noted_for_a, timeout_seconds=60.0, processes=2) as scores:
        workers = Sampling(until=lambda: len(list(tmp_path.iterdir())) == 4)
        groups = collect_groups(tasks, scores, workers, collection_of(chat), Collecting())
    assert [group.rewards for group in groups] == [(0.0, 1.0, 2.0, 3.0)] * 3


def test_an_interrupted_collection_ends_its_scores(chat: ChatTokens) -> None:
    class Interrupted(Sampling):
        def generate(
            self, requests: Sequence[GenerationRequest], on_completions: OnCompletions | None = None, _: object = None
        ) -> list[list[Completion]]:
            assert on_completions is not None
            on_completions([(0, 0, self._drawn(requests)[0][0])])
            raise KeyboardInterrupt

    with RewardWorkers(hangs_for_a, timeout_seconds=60.0, processes=1) as scores:
        with pytest.raises(KeyboardInterrupt):
            collect_groups(TASKS[:1], scores, Interrupted(), collection_of(chat), Collecting())
        assert scores.restarts == 1
        (group,) = collect_groups([Task("b", "1 + 2 =")], scores, Sampling(), collection_of(chat), Collecting())
    assert group.rewards == (0.0, 1.0, 2.0, 3.0)


# --- refills: how much is drawn, when it ends, and seeds that never meet


class Tasks:
    def __init__(self) -> None:
        self.metrics: dict[str, float] = {}
        self.drawn: list[int] = []
        self.recorded: list[str] = []

    def next_batch(self, n: int) -> list[Task]:
        assert self.recorded == [str(i) for i in range(sum(self.drawn))], (
            "all earlier groups, before the next are drawn"
        )
        self.drawn.append(n)
        first = sum(self.drawn[:-1])
        return [Task(str(first + i), "1") for i in range(n)]

    def record(self, groups: Sequence[RolloutGroup]) -> None:
        self.recorded += [group.task.id for group in groups]


def collect(
    chat: ChatTokens, every: int, *, prompts: int = 8, max_refills: int = 10
) -> tuple[CollectedBatch, Tasks, EchoWorkers]:
    """Keeps the groups of every so many tasks; 0: none."""

    def keeps(group: RolloutGroup) -> bool:
        return every > 0 and int(group.task.id) % every == 0

    tasks, workers = Tasks(), EchoWorkers()
    settings = replace(collection_of(chat), prompts=prompts, max_refills=max_refills)
    return collect_batch(tasks, keeps, SiblingScores(), workers, settings, ExpectedLengths()), tasks, workers


def test_one_draw_is_enough_where_all_teach(chat: ChatTokens) -> None:
    collected, tasks, _ = collect(chat, 1)
    assert tasks.drawn == [8] and collected.metrics == {
        "rollout/groups": 8.0, "rollout/kept_groups": 8.0, "rollout/refills": 0.0, "rollout/reward_restarts": 0.0
    }  # fmt: skip


def test_it_draws_as_many_as_should_do(chat: ChatTokens) -> None:
    collected, tasks, workers = collect(chat, 2)
    assert tasks.drawn == [8, 8] and len(collected.kept) == 8 and len(collected.groups) == 16
    few, tasks, _ = collect(chat, 2, prompts=3)  # 2 of 3 kept, then 1 is missing
    assert tasks.drawn == [3, 2] and len(few.kept) == 3
    assert len({request.seed for call in workers.calls for request in call}) == 16
    assert [request.id.split(":")[0] for call in workers.calls for request in call] == [
        str(place) for place in range(16)
    ]


def test_no_more_than_the_cap(chat: ChatTokens) -> None:
    collected, tasks, _ = collect(chat, 0, max_refills=3)
    assert tasks.drawn == [8] * 4 and not collected.kept and collected.counts["rollout/refills"] == 3
    assert collect(chat, 0, max_refills=0)[1].drawn == [8]


# --- what a rollout is expected to take, before it is sampled


def test_a_task_that_came_before_is_expected_to_take_as_long_again() -> None:
    lengths = ExpectedLengths()
    lengths.record(Task("sum/1", "?"), 20, 100)
    lengths.record(Task("sum/2", "?"), 20, 300)
    lengths.record(Task("sum/1", "?"), 20, 120)
    assert lengths.estimate(Task("sum/1", "?"), 20) == 120
    assert lengths.estimate(Task("sum/2", "?"), 20) == 300


def test_a_new_task_takes_the_mean_of_its_class_and_else_of_its_kind() -> None:
    lengths = ExpectedLengths()
    assert lengths.estimate(Task("sum/1", "?"), 20) is None
    for number, (prompt, tokens) in enumerate([(20, 100), (31, 200), (100, 900)]):
        lengths.record(Task(f"sum/{number}", "?"), prompt, tokens)
    lengths.record(Task("code/hard/1", "?"), 20, 5000)
    assert lengths.estimate(Task("sum/new", "?"), 16) == 150  # prompts of 16 to 31 tokens
    assert lengths.estimate(Task("sum/new", "?"), 127) == 900
    assert lengths.estimate(Task("sum/new", "?"), 5) == 400  # the mean of all sums
    assert lengths.estimate(Task("code/hard/2", "?"), 500) == 5000
    assert lengths.estimate(Task("code/easy/2", "?"), 20) is None


def test_a_class_forgets() -> None:
    lengths = ExpectedLengths()
    for number in range(MEMORY):
        lengths.record(Task(f"sum/{number}", "?"), 20, 100)
    for number in range(4 * MEMORY):
        lengths.record(Task(f"sum/late-{number}", "?"), 20, 1000)
    assert 970 < (lengths.estimate(Task("sum/new", "?"), 20) or 0) < 1000


def test_a_checkpoint_keeps_both() -> None:
    lengths, restored = ExpectedLengths(), ExpectedLengths()
    lengths.record(Task("sum/1", "?"), 20, 100)
    restored.restore(json.loads(json.dumps(lengths.state())))
    assert restored == lengths


# ---------------------------------------------------------------- groups to samples


TASK = Task(id="a", prompt="?")


def completion(*token_ids: int, version: int = 3) -> Completion:
    logprobs = tuple(-0.5 - token for token in token_ids)
    return Completion(token_ids, logprobs, "text", FinishReason.STOP, version, "digest")


def rollout(reward: float | None, status: RolloutStatus = RolloutStatus.SCORED) -> Rollout:
    return Rollout(TASK, (Turn((1, 2), completion(5, 6, 7)),), status, reward)


def group_of(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(TASK, rollouts)


def test_a_rollout_without_reward_is_in_neither_baseline_nor_training() -> None:
    algorithm = build_algorithm(objective(normalize_advantages=False))
    failed = rollout(None, RolloutStatus.REWARD_ERROR)
    with_failed = to_samples([group_of(rollout(1.0), failed, rollout(0.0))], algorithm)
    without = to_samples([group_of(rollout(1.0), rollout(0.0))], algorithm)
    assert with_failed == without
    assert [sample.advantage for sample in without] == [0.5, -0.5]
    twice = to_samples([group_of(rollout(1.0), failed), group_of(rollout(1.0), rollout(0.0))], algorithm)
    assert [sample.group for sample in twice] == [0, 1, 1]
    as_zero = to_samples([group_of(rollout(1.0), rollout(0.0), rollout(0.0))], algorithm)
    assert as_zero[0].advantage != without[0].advantage


def test_a_masked_overlong_rollout_counts_in_the_baseline_alone() -> None:
    algorithm = build_algorithm(objective(normalize_advantages=False, overlong="mask"))
    group = group_of(rollout(1.0), rollout(0.0, RolloutStatus.TRUNCATED), rollout(0.0))
    assert [sample.advantage for sample in to_samples([group], algorithm)] == pytest.approx([2 / 3, -1 / 3])


def test_only_generated_tokens_are_trained_on_across_turns() -> None:
    turns = (Turn((1, 2), completion(5, 6), replies=(Reply("user", "and?"),)), Turn((8, 9), completion(7)))
    group = group_of(Rollout(TASK, turns, RolloutStatus.SCORED, 1.0), rollout(0.0))
    sample = to_samples([group], build_algorithm(objective()))[0]
    assert sample.token_ids == (1, 2, 5, 6, 8, 9, 7)
    assert sample.loss_mask == (False, False, True, True, False, False, True)
    assert sample.generator_logprobs == (0.0, 0.0, -5.5, -6.5, 0.0, 0.0, -7.5)
    assert (sample.policy_version, sample.precision_digest) == (3, "digest")


def test_each_token_has_the_policy_that_sampled_it() -> None:
    first = replace(completion(5, 6, 7), updates=((1, 4), (2, 6)))
    turns = (Turn((1,), first), Turn((2, 9), completion(8, version=6)))
    group = group_of(Rollout(TASK, turns, RolloutStatus.SCORED, 1.0), rollout(0.0))
    samples = to_samples([group], build_algorithm(objective()))
    assert samples[0].token_versions == (3, 3, 4, 6, 6, 6, 6)
    assert [(sample.policy_version, sample.token_versions is None) for sample in samples] == [(3, False), (3, True)]
    assert versions_of(samples[1]) == (3,) * 5


def test_turns_under_two_precision_tables_are_a_bug() -> None:
    turns = (Turn((1,), completion(5)), Turn((2,), replace(completion(6), precision_digest="other")))
    group = group_of(Rollout(TASK, turns, RolloutStatus.SCORED, 1.0), rollout(0.0))
    with pytest.raises(AssertionError, match="several precision tables"):
        to_samples([group], build_algorithm(objective()))
