"""The endless order, its resumption, and held-out tasks that are never trained on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octetrl.environments.tasks import EndlessOrder, EvalSet, Taskset
from octetrl.records import Task
from octetrl.system.errors import UserError


def tasks_of(prompts: list[str]) -> list[Task]:
    return [Task(id=str(index), prompt=prompt) for index, prompt in enumerate(prompts)]


def numbered(n: int) -> list[Task]:
    return tasks_of([f"question {index}" for index in range(n)])


@given(length=st.integers(1, 40), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_each_epoch_is_a_permutation_found_from_any_place(length: int, seed: int, epoch: int) -> None:
    order = EndlessOrder(length, seed)
    indices = [order[position] for position in range(epoch * length, (epoch + 1) * length)]
    assert sorted(indices) == list(range(length))
    assert EndlessOrder(length, seed)[epoch * length + length // 2] == indices[length // 2]


def test_epochs_and_seeds_are_shuffled_and_held_out_tasks_spread() -> None:
    one, other = EndlessOrder(50, 0), EndlessOrder(50, 1)
    first = [one[position] for position in range(50)]
    assert first != [one[position] for position in range(50, 100)]
    assert first != [other[position] for position in range(50)]
    places = [int(task.id) for task in Taskset(numbered(1000), eval_size=50, seed=0).held_out()]
    assert min(places) < 200
    assert max(places) > 800


@given(st.lists(st.integers(0, 12), min_size=2, max_size=60), st.integers(0, 4), st.integers(0, 3))
def test_no_training_prompt_is_a_held_out_one(values: list[int], eval_size: int, seed: int) -> None:
    tasks = tasks_of([f"question {value}" for value in values])  # ids differ where prompts do not
    distinct = len(set(values))
    if eval_size >= distinct:
        with pytest.raises(UserError, match="eval_size"):
            Taskset(tasks, eval_size=eval_size, seed=seed)
        return
    taskset = Taskset(tasks, eval_size=eval_size, seed=seed)
    held_out = {task.prompt for task in taskset.held_out()}
    trained = {task.prompt for task in taskset.next_batch(2 * len(tasks))}
    assert len(held_out) == eval_size
    assert not held_out & trained
    assert held_out | trained == {task.prompt for task in tasks}


def test_training_skips_all_of_an_evaluation_split_and_not_only_what_was_chosen() -> None:
    taskset = Taskset(numbered(12), eval_size=2, seed=0, eval_sets={"": EvalSet(numbered(9), 2)})
    assert len(taskset.held_out()) == 2
    assert {task.prompt for task in taskset.next_batch(24)} == {f"question {index}" for index in (9, 10, 11)}


@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 9))
def test_a_resumed_order_is_the_order_never_interrupted(batch: int, killed_after: int, other_batch: int) -> None:
    def fresh() -> Taskset:
        return Taskset(numbered(17), eval_size=4, seed=3)

    whole = fresh().next_batch((killed_after + 20) * batch * other_batch)
    taskset = fresh()
    for _ in range(killed_after):
        taskset.next_batch(batch)
    resumed = fresh()
    resumed.restore(json.loads(json.dumps(taskset.state())))
    drawn = killed_after * batch
    assert resumed.next_batch(other_batch) == whole[drawn : drawn + other_batch]


def test_other_tasks_are_not_resumed() -> None:
    state = Taskset(numbered(17), eval_size=4, seed=3).state()
    for tasks, seed in ((numbered(18), 3), (numbered(17), 4)):
        with pytest.raises(UserError, match="differ from the checkpoint's"):
            Taskset(tasks, eval_size=4, seed=seed).restore(state)
    with pytest.raises(UserError, match="there are no tasks"):
        Taskset([], eval_size=0, seed=0)
