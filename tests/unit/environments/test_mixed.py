"""Tasks of several environments: the order against exact fractions, its resumption, and each task's own scorer."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.mixed import MixedDialogues, MixedScorer, MixedTaskset
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.scoring import Score
from octetrl.environments.tasks import Taskset, furthest_behind, named, own_task, shares_of
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError
from tests.e2e.tiny_rewards import always_hangs, by_text
from tests.e2e.tiny_turns import ScoredTalk, Talk


def numbered(name: str, n: int) -> list[Task]:
    return [Task(f"{index}", f"{name} {index}") for index in range(n)]


def mixed(weights: Mapping[str, float], eval_size: int = 2) -> MixedTaskset:
    places = {name: place for place, name in enumerate(sorted(weights))}
    members = {
        name: Taskset(numbered(name, 7 + places[name]), eval_size=eval_size, seed=places[name]) for name in weights
    }
    return MixedTaskset(members, weights)


def reference(weights: Sequence[int], turns: int) -> list[int]:
    """Whose turn it is, in exact fractions: the one whose share of all turns is the most ahead of what it had."""
    shares = [Fraction(weight, sum(weights)) for weight in weights]
    taken, order = [0] * len(weights), []
    for n in range(1, turns + 1):
        behind = [share * n - had for share, had in zip(shares, taken, strict=True)]
        place = max(range(len(weights)), key=lambda one: (behind[one], -one))
        taken[place] += 1
        order.append(place)
    return order


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_the_shares_follow_the_weights_exactly(weights: list[int]) -> None:
    turns, total = 3 * sum(weights), sum(weights)
    taken, order = [0] * len(weights), []
    for n in range(1, turns + 1):
        order.append(furthest_behind([Fraction(one, total) for one in weights], taken))  # type: ignore[misc]
        taken[order[-1]] += 1
        assert all(abs(Fraction(one * n, total) - had) < 1 for one, had in zip(weights, taken, strict=True))
        if n % total == 0:
            assert taken == [one * n // total for one in weights]
    assert order == reference(weights, turns)


@pytest.mark.parametrize("weights", [[2, 1], [1, 1, 2], [8, 4, 2, 1]])
def test_rounding_does_not_change_the_order(weights: list[int]) -> None:
    shares, taken, order = shares_of([float(one) for one in weights]), [0] * len(weights), []
    for _ in range(400):
        order.append(furthest_behind(shares, taken))
        taken[order[-1]] += 1
    assert order == reference(weights, 400)


def test_each_environment_keeps_its_own_order_and_epochs() -> None:
    tasks, listed_backwards = mixed({"a": 2.0, "b": 1.0}), mixed({"b": 1.0, "a": 2.0})
    batch = tasks.next_batch(60)
    assert listed_backwards.next_batch(60) == batch and listed_backwards.held_out() == tasks.held_out()
    assert Counter(task.environment for task in batch) == {"a": 40, "b": 20}
    for place, name in enumerate("ab"):
        alone = Taskset(numbered(name, 7 + place), eval_size=2, seed=place)
        of_name = [task for task in batch if task.environment == name]
        assert [own_task(task) for task in of_name] == alone.next_batch(len(of_name))
        assert [task.id for task in of_name[:3]] == [f"{name}/{own_task(task).id}" for task in of_name[:3]]
        assert tasks.metrics[f"environments/{name}/epoch"] == alone.epoch > 2


@given(st.integers(1, 9), st.integers(0, 12), st.integers(1, 9))
def test_a_resumed_order_is_the_order_never_interrupted(batch: int, killed_after: int, other_batch: int) -> None:
    weights = {"a": 3.0, "b": 1.0, "c": 1.5}
    whole, cut = mixed(weights), mixed(weights)
    expected = [task.id for task in whole.next_batch(batch * killed_after + 40)]
    before = [task.id for _ in range(killed_after) for task in cut.next_batch(batch)]
    resumed = mixed(weights)
    resumed.restore(json.loads(json.dumps(cut.state())))
    after: list[str] = []
    while len(before) + len(after) < len(expected):
        after += [task.id for task in resumed.next_batch(other_batch)]
    assert (before + after)[: len(expected)] == expected


def test_a_new_weight_holds_at_once_and_no_task_is_skipped() -> None:
    before = mixed({"a": 1.0, "b": 1.0})
    drawn = before.next_batch(41)
    after = mixed({"a": 1.0, "b": 3.0})
    after.restore(before.state())
    new = after.next_batch(40)
    assert Counter(task.environment for task in new) == {"a": 10, "b": 30}
    for place, name in enumerate("ab"):
        both = [own_task(task) for task in (*drawn, *new) if task.environment == name]
        assert both == Taskset(numbered(name, 7 + place), eval_size=2, seed=place).next_batch(len(both))


def test_checkpoints_of_others_and_environments_without_tasks_are_refused() -> None:
    with pytest.raises(UserError, match=r"environments: a, b differ from the checkpoint's \(a, c\)"):
        mixed({"a": 1.0, "b": 1.0}).restore(mixed({"a": 1.0, "c": 1.0}).state())
    with pytest.raises(UserError, match="differ from the checkpoint's \\(one\\)"):
        mixed({"a": 1.0}).restore(Taskset(numbered("a", 7), eval_size=2, seed=0).state())
    with pytest.raises(UserError, match=r"environments\.a: its tasks or seed differ"):
        mixed({"a": 1.0, "b": 1.0}).restore(mixed({"a": 1.0, "b": 1.0}, eval_size=3).state())
    same = numbered("same", 6)
    held = Taskset(same, eval_size=5, seed=0)
    members = {"a": held, "b": Taskset(held.held_out(), eval_size=0, seed=0)}
    with pytest.raises(UserError, match=r"environments\.b\.dataset: none of its \d tasks is left for training"):
        MixedTaskset(members, {"a": 1.0, "b": 1.0})


def test_held_out_tasks_of_each_are_never_trained_on_by_any() -> None:
    same = numbered("same", 12)
    members = {"a": Taskset(same, eval_size=4, seed=0), "b": Taskset(same, eval_size=2, seed=1)}
    tasks = MixedTaskset(members, {"a": 1.0, "b": 1.0})
    held_out = tasks.held_out()
    assert Counter(task.environment for task in held_out) == {"a": 4, "b": 2}
    trained = {task.prompt for task in tasks.next_batch(80)}
    assert trained == {task.prompt for task in same} - {task.prompt for task in held_out}
    assert len(tasks.evaluation_sets(all_tasks=True)[""]) == 24


class Recorded:
    """A scorer that keeps what it was asked for."""

    def __init__(self, reward: float) -> None:
        self.asked: list[tuple[Task, str]] = []
        self.reward, self.is_closed = reward, False

    def score(self, completions: Sequence[tuple[Task, str]]) -> list[Score]:
        self.asked += completions
        return [Score(RolloutStatus.SCORED, self.reward) for _ in completions]

    def close(self) -> None:
        self.is_closed = True


def test_each_task_goes_to_the_scorer_of_its_environment_as_that_made_it() -> None:
    scorers = {"a": Recorded(1.0), "b": Recorded(2.0)}
    mixed_scorer = MixedScorer(scorers)
    tasks = {name: Task("7", f"of {name}", metadata={"key": object()}) for name in "ab"}
    completions = [(named(tasks[name], name), f"text {place}") for place, name in enumerate("abba")]
    assert [score.reward for score in mixed_scorer.score(completions)] == [1.0, 2.0, 2.0, 1.0]
    assert scorers["b"].asked == [(tasks["b"], "text 1"), (tasks["b"], "text 2")]
    assert scorers["b"].asked[0][0] is tasks["b"]
    mixed_scorer.close()
    assert all(scorer.is_closed for scorer in scorers.values())


class WaitsForOther:
    """A scorer whose round ends only while the other one's is advanced too."""

    times = None

    def __init__(self) -> None:
        self.other: WaitsForOther | None = None
        self.times_advanced = 0
        self.keys: list[tuple[int, int]] = []

    def begin(self) -> Any:
        return contextlib.nullcontext(self)

    def submit(self, key: tuple[int, int], task: Task, completion_text: str) -> None:
        self.keys.append(key)

    def advance(self) -> None:
        self.times_advanced += 1

    @property
    def is_done(self) -> bool:
        assert self.other is not None
        return self.other.times_advanced >= 3

    def finish(self) -> dict[tuple[int, int], Score]:
        assert self.is_done, "this one is waited for, while the other is not advanced"
        return {key: Score(RolloutStatus.SCORED, 1.0) for key in self.keys}


def test_scorers_work_at_the_same_time() -> None:
    one, two = WaitsForOther(), WaitsForOther()
    one.other, two.other = two, one
    scorers: Any = {"a": one, "b": two}
    scores = MixedScorer(scorers).score([(named(Task("1", "?"), name), "") for name in "aba"])
    assert [score.reward for score in scores] == [1.0] * 3


def test_one_environments_time_outs_do_not_touch_another_and_name_their_section() -> None:
    quick = RewardWorkers(by_text, timeout_seconds=60.0)
    hangs = RewardWorkers(always_hangs, timeout_seconds=0.3, gives_up=False)
    scorer = MixedScorer({"quick": quick, "hangs": hangs, "recorded": Recorded(1.0)})
    try:
        task = Task("1", "?")
        completions = [(named(task, name), f"{n}") for n in range(2) for name in ("hangs", "quick", "recorded")]
        with scorer.begin() as scoring:
            for place, (task, text) in enumerate(completions):
                scoring.submit((place, 0), task, text)
            by_place = scoring.finish()
        scores = [score for _, score in sorted(by_place.items(), key=lambda item: item[0])]
        assert [score.status.value for score in scores] == ["reward_timeout", "scored", "scored"] * 2
        assert [score.reward for score in scores[1::3]] == [by_text(task, "0"), by_text(task, "1")]
        assert scores[0].detail is not None and "environments.hangs.reward_timeout_seconds" in scores[0].detail
        assert scorer.restarts == 2
        times = scoring.times
        assert times is not None and times.slowest_task == "hangs/1" and times.slowest >= 0.3 and times.waited >= 0.3
    finally:
        scorer.close()


def test_dialogues_are_those_of_the_tasks_environments() -> None:
    members = {
        "talk": Dialogue(Talk(), ConversationLimits(max_turns=3)),
        "scored": Dialogue(ScoredTalk(), ConversationLimits(), scorer=Recorded(0.5)),
    }
    dialogues = MixedDialogues(members)
    task = named(Talk.tasks[0], "talk")
    assert dialogues.of(task) is members["talk"] and dialogues.of(task).limits.max_turns == 3
    assert dialogues.of(task).begin(task, "0").task is Talk.tasks[0]
    assert dialogues.scorer is not None
    with dialogues.scorer.begin() as scoring:
        scoring.submit((0, 0), task, "rewarded by its own methods")
        scoring.submit((1, 0), named(Talk.tasks[1], "scored"), "scored")
        assert {key: score.reward for key, score in scoring.finish().items()} == {(1, 0): 0.5}
    dialogues.close()
    assert members["scored"].scorer.is_closed  # type: ignore[union-attr]
