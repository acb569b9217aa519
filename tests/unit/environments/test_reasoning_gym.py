"""reasoning_gym by name: its own scores, tasks that never change, and errors that help."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import pytest

from octetrl.environments.reasoning_gym import EntryGenerator, EntryTasks, check_dataset, reasoning_gym_environment
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.tasks import TaskEnvironment, Taskset
from octetrl.process.plain_data import from_text, to_text
from octetrl.system.errors import UserError

sys.path.append(str(Path(__file__).parent))  # where a child process will look too
misbehaving_rewards = importlib.import_module("misbehaving_rewards")

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
    with RewardWorkers(environment.score, timeout_seconds=60.0) as workers:
        texts = [
            (task, text) for task in tasks for text in (f"well\n#### {task.answer}", "#### 9999", str(task.answer))
        ]
        assert [score.reward for score in workers.score(texts)] == [1.0, 0.0, 0.0] * len(tasks)


def test_tasks_depend_neither_on_the_process_nor_on_what_was_asked_before() -> None:
    one, other = (reasoning_gym_environment("word_ladder", {}, size=20, seed=5).tasks for _ in range(2))
    assert one[7] == other[7]
    generate = EntryGenerator("list_functions", {}, 40, 5)
    first = [generate.entry(index) for index in range(40)]
    assert [generate.entry(index) for index in reversed(range(40))] == first[::-1]


@pytest.mark.parametrize(("how", "seconds"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 3.0)])
def test_a_generator_that_is_killed_or_stopped_is_replaced(
    how: signal.Signals, seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    make = EntryTasks(misbehaving_rewards.Entries(), "{prompt}", seconds=seconds)  # type: ignore[arg-type]
    (first,) = make([4])
    pid = first.metadata["entry"]["metadata"]["pid"]
    os.kill(pid, how)
    task, again = make([5, 4])
    assert (task.prompt, task.answer) == ("5?", "5")
    assert task.metadata["entry"]["metadata"][2] == (5, {5})  # keys and types as the generator made them
    assert again.prompt == first.prompt and again.metadata["entry"]["metadata"]["pid"] != pid
    assert make.restarts == 1 and "made no task 5" in caplog.text


def test_tasks_are_created_together() -> None:
    make = EntryTasks(misbehaving_rewards.Entries(), "{prompt}")  # type: ignore[arg-type]
    assert [task.answer for task in make(range(20, 220))] == [str(index) for index in range(20, 220)]
    assert make._process is not None and make._process._call < 100


def test_a_task_that_can_not_be_made_is_one_line_and_is_named_among_others() -> None:
    make = EntryTasks(misbehaving_rewards.Entries(hangs=27), "{prompt}", seconds=60.0)  # type: ignore[arg-type]
    assert make([3])[0].answer == "3"
    make._seconds = 0.5  # only for the one that hangs: a process may take longer to start
    with pytest.raises(UserError, match=r"'entries' made no task 28 in 3 processes \(no answer in 0\.5 s\); raise env"):
        make([28])
    make._seconds = 60.0
    with pytest.raises(UserError, match=r"can't make task 13 \(ValueError: unlucky \(misbehaving_rewards\.py:\d+\)\)"):
        make(range(10, 20))
    assert make([3])[0].answer == "3"


def test_a_task_that_ends_its_process_ends_few() -> None:
    make = EntryTasks(misbehaving_rewards.Entries(ends=27), "{prompt}")  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"made no task 27 in 3 processes"):
        make(range(20, 29))
    assert make.restarts == 4  # of all nine together, then of task 27 alone


@pytest.mark.parametrize("dataset", ["graph_color", "knights_knaves", "advanced_geometry", "rotate_matrix"])
def test_entries_arrive_as_they_were_made(dataset: str) -> None:
    """Dictionaries with numbers for keys, tuples: the dataset's own scorer wants them back as they were."""
    entry = EntryGenerator(dataset, {}, 3, 5).entry(1)
    assert from_text(to_text(entry)) == entry


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
