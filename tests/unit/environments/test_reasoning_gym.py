"""reasoning_gym by name: its own scores, tasks that never change, and errors that help."""

from __future__ import annotations

import pytest

from octetrl.config.errors import UserError
from octetrl.environments.base import TaskEnvironment, Taskset
from octetrl.environments.reasoning_gym import EntryGenerator, check_dataset, reasoning_gym_environment
from octetrl.environments.scoring import RewardWorkers

PARAMETERS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(scope="module")
def environment() -> TaskEnvironment:
    return reasoning_gym_environment(
        "chain_sum", PARAMETERS, size=400, seed=0, answer_marker="####", prompt_template="Q: {prompt}"
    )


def test_right_wrong_and_unmarked_answers_through_a_worker(environment: TaskEnvironment) -> None:
    taskset = Taskset(environment.tasks, eval_size=10, seed=0)
    tasks = taskset.next_batch(5)
    assert all(task.prompt.startswith("Q: ") and task.id.startswith("chain_sum/") for task in tasks)
    with RewardWorkers(environment.score, timeout_seconds=5.0) as workers:
        texts = [
            (task, text) for task in tasks for text in (f"well\n#### {task.answer}", "#### 9999", str(task.answer))
        ]
        assert [score.reward for score in workers.score(texts)] == [1.0, 0.0, 0.0] * len(tasks)


def test_a_small_dataset_repeats_itself_but_not_its_held_out_prompts(environment: TaskEnvironment) -> None:
    assert len({task.prompt for task in environment.tasks}) < 200
    taskset = Taskset(environment.tasks, eval_size=60, seed=0)
    held_out = {task.prompt for task in taskset.held_out()}
    assert len(held_out) == 60
    assert not held_out & {task.prompt for task in taskset.next_batch(400)}


def test_tasks_do_not_depend_on_the_process() -> None:
    one, other = (reasoning_gym_environment("word_ladder", {}, size=20, seed=5).tasks for _ in range(2))
    assert one[7] == other[7]


def test_tasks_do_not_depend_on_what_was_asked_before() -> None:
    generate = EntryGenerator("list_functions", {}, 40, 5)
    first = [generate(index) for index in range(40)]
    assert [generate(index) for index in reversed(range(40))] == first[::-1]


@pytest.mark.parametrize(
    ("dataset", "parameters", "message"),
    [
        ("chain_sun", {}, "no dataset 'chain_sun'; did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "no parameter 'min_term'; did you mean 'min_terms'"),
        ("chain_sum", {"seed": 2}, "set environment.seed instead"),
        ("chain_sum", {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
    ],
)
def test_errors_name_what_is_near(dataset: str, parameters: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match="environment") as caught:
        check_dataset(dataset, parameters)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
