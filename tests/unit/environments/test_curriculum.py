"""Tasks that rest by their pass rate: against the order without a curriculum, resumed anywhere, and against chance."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.config.environment import CurriculumConfig
from octetrl.environments.curriculum import CurriculumTaskset, order_by
from octetrl.environments.mixed import MixedTaskset
from octetrl.environments.tasks import EvalSet, Taskset
from octetrl.records import Rollout, RolloutGroup, RolloutStatus, Task, differ
from octetrl.system.errors import UserError

SIZE = 23
Solve = Callable[[Task, int], bool]  # whether this sibling's answer is right


def numbered(n: int = SIZE) -> list[Task]:
    return [Task(f"{index}", f"question {index}", metadata={"level": index * 7 % n}) for index in range(n)]


def taskset_of(eval_size: int = 3, n: int = SIZE, **changes: Any) -> CurriculumTaskset:
    given = CurriculumConfig.model_validate({"pass_rate": (0.3, 0.7), **changes})
    return CurriculumTaskset(numbered(n), settings=given, right_from=1.0, eval_size=eval_size, seed=3)


def group_of(task: Task, rewards: list[float | None]) -> RolloutGroup:
    status = {True: RolloutStatus.REWARD_ERROR, False: RolloutStatus.SCORED}
    return RolloutGroup(task, tuple(Rollout(task, (), status[reward is None], reward) for reward in rewards))


def chance(*parts: object) -> float:
    return int(hashlib.sha256(repr(parts).encode()).hexdigest()[:8], 16) / 2**32


def played(taskset: Taskset, batches: int, size: int = 4, first: int = 0) -> list[list[str]]:
    """The ids that are drawn, if every task has a share of right answers of its own."""
    drawn = []
    for batch in range(first, first + batches):
        tasks = taskset.next_batch(size)
        rewards = [[float(chance(task.id, batch, one) < chance(task.id)) for one in range(4)] for task in tasks]
        taskset.record([group_of(task, [*each]) for task, each in zip(tasks, rewards, strict=True)])
        drawn.append([task.id for task in tasks])
    return drawn


@settings(max_examples=20)
@given(st.integers(0, 5), st.integers(1, 9))
def test_with_a_window_for_all_it_is_the_order_of_any_taskset(eval_size: int, size: int) -> None:
    plain = Taskset(numbered(), eval_size=eval_size, seed=3)
    all_of_them = taskset_of(eval_size, pass_rate=(0.0, 1.0))
    assert played(all_of_them, 60 // size, size) == played(plain, 60 // size, size)


@pytest.mark.parametrize(("retries", "reward"), [({"retry_hard": 1.0}, 0.0), ({"retry_easy": 1.0}, 1.0)])
def test_a_pool_that_is_always_retried_is_in_the_order_of_any_taskset(retries: dict[str, float], reward: float) -> None:
    plain = Taskset(numbered(), eval_size=3, seed=3)
    retried = taskset_of(**{"retry_hard": 0.0, "retry_easy": 0.0, **retries})
    for _ in range(20):
        tasks = retried.next_batch(4)
        assert tasks == plain.next_batch(4)
        retried.record([group_of(task, [reward]) for task in tasks])


fields = st.fixed_dictionaries(
    {
        "pass_rate": st.sampled_from([(0.0, 0.5), (0.3, 0.7), (0.49, 0.5), (0.9, 1.0)]),
        "retry_hard": st.sampled_from([0.0, 0.1, 1.0]),
        "retry_easy": st.sampled_from([0.0, 0.3]),
        "unseen": st.sampled_from([1.0, 0.5, 0.1]),
    }
)


@settings(max_examples=30)
@given(fields, st.integers(0, 20), st.integers(1, 7))
def test_nothing_is_drawn_twice_in_an_epoch_and_nothing_that_is_held_out(
    given: dict[str, Any], eval_size: int, size: int
) -> None:
    taskset = taskset_of(eval_size, **given)
    held_out = {task.id for task in taskset.held_out()}
    epochs: dict[int, list[str]] = {}  # 0: of tasks that were never drawn
    while sum(map(len, epochs.values())) < 120:
        seen, passed = taskset._position, taskset._passed
        ((name,),) = played(taskset, 1, 1)
        assert name not in held_out
        epoch = 0 if taskset._passed == passed else math.ceil(taskset._passed / SIZE)
        assert epoch or taskset._position > seen
        epochs.setdefault(epoch, []).append(name)
    assert all(len(set(names)) == len(names) for names in epochs.values())
    assert len(epochs[0]) == SIZE - eval_size or given["unseen"] < 1


@settings(max_examples=30)
@given(fields, st.integers(0, 12), st.integers(1, 9))
def test_a_resumed_run_draws_what_an_uninterrupted_one_does(given: dict[str, Any], cut: int, size: int) -> None:
    whole, killed, resumed = (taskset_of(**given) for _ in range(3))
    expected = played(whole, 20, size)
    assert played(killed, cut, size) == expected[:cut]
    state = json.dumps(killed.state())
    killed.next_batch(size)  # of the step that was cut off
    resumed.restore(json.loads(state))
    assert played(resumed, 20 - cut, size, first=cut) == expected[cut:]
    assert (resumed.metrics, resumed.epoch) == (whole.metrics, whole.epoch)


@pytest.mark.parametrize("solves", [True, False])
@pytest.mark.parametrize("retry", [0.0, 0.2])
def test_tasks_that_all_rest_are_drawn_all_the_same(solves: bool, retry: float) -> None:
    taskset = taskset_of(retry_easy=retry, retry_hard=retry)
    counts: Counter[str] = Counter()
    for _ in range(800):
        (task,) = taskset.next_batch(1)
        taskset.record([group_of(task, [float(solves)] * 4)])
        counts[task.id] += 1
    assert len(counts) == SIZE - 3 and (not retry or min(counts.values()) > 12)
    assert taskset.metrics == {
        "curriculum/hard": 20.0 * (not solves),
        "curriculum/normal": 0.0,
        "curriculum/easy": 20.0 * solves,
        "curriculum/resting_share": 1.0,
        "curriculum/pass_rate": float(solves),
        "curriculum/unseen": 0.0,
    }


def test_it_draws_more_useful_groups_than_chance() -> None:
    """A third of the tasks is always solved, a third never. With groups of 8, a useful one has both."""

    def useful(taskset: Taskset) -> float:
        kept = []
        for step in range(120):
            tasks = taskset.next_batch(10)
            groups = []
            for place, task in enumerate(tasks):
                level = (0.0, 0.5, 1.0)[int(task.id) % 3]
                groups.append(group_of(task, [float(chance(step, place, one) < level) for one in range(8)]))
            taskset.record(groups)
            kept += [differ(group.rewards) for group in groups]
        return sum(kept) / len(kept)

    uniform = useful(Taskset(numbered(300), eval_size=0, seed=3))
    first = useful(taskset_of(0, 300, pass_rate=(0.1, 0.9)))
    by_share = useful(taskset_of(0, 300, pass_rate=(0.1, 0.9), unseen=0.5))
    assert 0.30 < uniform < 0.36 and first > 0.7 and by_share > 0.55  # a quarter of the 1,200 draws are first ones


@pytest.mark.parametrize("eval_size", [0, 3, 9])
def test_the_unseen_tasks_are_those_that_training_may_still_draw(eval_size: int) -> None:
    taskset = taskset_of(eval_size)
    for drawn in range(SIZE - eval_size + 1):
        assert taskset.metrics["curriculum/unseen"] == SIZE - eval_size - drawn
        taskset.next_batch(1)


def test_a_share_of_the_draws_is_unseen() -> None:
    taskset = taskset_of(0, 200, unseen=0.25, retry_hard=1.0, retry_easy=1.0)
    drawn = [name for batch in played(taskset, 40, 5) for name in batch]
    new = [name not in drawn[:place] for place, name in enumerate(drawn)]
    assert abs(sum(new) - 0.25 * len(drawn)) <= 1


@settings(max_examples=30)
@given(fields, st.integers(0, 12), st.integers(1, 9))
def test_no_task_comes_again_before_its_answers_are_scored(given: dict[str, Any], eval_size: int, size: int) -> None:
    """While there are unseen tasks. A small share of these once filled the first batches with a single task."""
    taskset = taskset_of(eval_size, **given)
    for batch in range(12):
        (names,) = played(taskset, 1, size, batch)
        if taskset._position < SIZE:
            assert len(set(names)) == size


@pytest.mark.parametrize(("n", "eval_size"), [(1, 0), (3, 2), (20, 19), (20, 18)])
def test_few_tasks_that_rest_among_many_that_are_held_out(n: int, eval_size: int) -> None:
    taskset = taskset_of(eval_size, n, retry_hard=0.0)
    for _ in range(30):
        tasks = taskset.next_batch(2)
        taskset.record([group_of(task, [0.0, 0.0]) for task in tasks])


def test_only_completions_with_a_reward_count() -> None:
    taskset = taskset_of()
    (task,) = taskset.next_batch(1)
    taskset.record([group_of(task, [None, None])])
    assert "curriculum/pass_rate" not in taskset.metrics
    taskset.record([group_of(task, [None, 1.0, 0.5, 1.0, 0.0])])
    taskset.record([group_of(task, [1.0, 1.0])])
    assert taskset.metrics["curriculum/pass_rate"] == 0.75


def test_an_order_by_a_column_is_that_of_every_epoch() -> None:
    tasks = numbered()
    order = order_by(tasks, "level")
    taskset = Taskset(tasks, eval_size=0, seed=0, order=order)
    levels = [task.metadata["level"] for task in taskset.next_batch(2 * SIZE)]
    assert levels == [*range(SIZE), *range(SIZE)]
    assert order_by(tasks, "row") == [*range(SIZE)]
    nested = [Task(f"{n}", f"{n}", metadata={"a": {"b": "xyzabc"[n]}, "c.d": n}) for n in range(6)]
    assert order_by(nested, "a.b") == [3, 4, 5, 0, 1, 2] and order_by(nested, "c.d") == [*range(6)]


@pytest.mark.parametrize(
    ("values", "what"),
    [([1, None], "null"), ([1, "2"], "text"), ([1, [2]], "list"), ([1.0, math.nan], "NaN")],
)
def test_values_that_order_nothing_are_refused(values: list[Any], what: str) -> None:
    with pytest.raises(UserError, match=what):
        order_by([Task(f"{n}", f"{n}", metadata={"level": value}) for n, value in enumerate(values)], "level")
    with pytest.raises(UserError, match="did you mean 'level'"):
        order_by(numbered(), "levels")


def test_each_of_several_environments_has_its_own() -> None:
    def mixed() -> MixedTaskset:
        members = {"a": taskset_of(unseen=0.5), "b": Taskset(numbered(9), eval_size=2, seed=0)}
        return MixedTaskset(members, {"a": 2.0, "b": 1.0})

    whole, killed, resumed = mixed(), mixed(), mixed()
    expected = played(whole, 20, 6)
    assert played(killed, 8, 6) == expected[:8]
    resumed.restore(json.loads(json.dumps(killed.state())))
    assert played(resumed, 12, 6, first=8) == expected[8:]
    measured = whole.metrics
    assert measured["environments/a/curriculum/normal"] > 0 and "environments/b/curriculum/normal" not in measured
    assert measured["environments/a/epoch"] > 1


def test_a_curriculum_may_begin_or_end_with_a_resume() -> None:
    plain, by_rate = Taskset(numbered(), eval_size=3, seed=3), taskset_of()
    plain.next_batch(30)
    by_rate.restore(plain.state())
    assert by_rate.epoch == plain.epoch and [task.id for task in by_rate.next_batch(5)] == [
        task.id for task in plain.next_batch(5)
    ]
    plain.restore(by_rate.state())
    assert plain.epoch == by_rate.epoch


def test_sets_of_their_own_are_skipped_and_chosen_by_size() -> None:
    same = [Task(f"x/{task.id}", task.prompt) for task in numbered()[:5]]
    sets = {"small": EvalSet(same, 2), "whole": EvalSet([*same[:2], *same[:2]])}
    taskset = Taskset(numbered(), eval_size=100, seed=0, eval_sets=sets)
    assert {name: len(tasks) for name, tasks in taskset.evaluation_sets().items()} == {"small": 2, "whole": 2}
    assert {name: len(tasks) for name, tasks in taskset.evaluation_sets(all_tasks=True).items()} == {
        "small": 5,
        "whole": 2,
    }
    assert {int(task.id) for task in taskset.next_batch(SIZE)} == {*range(5, SIZE)}
