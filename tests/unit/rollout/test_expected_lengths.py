"""What a rollout is expected to take, before it is sampled."""

from __future__ import annotations

import json

from octetrl.records import Task
from octetrl.rollout.expected_lengths import MEMORY, ExpectedLengths


def task(name: str) -> Task:
    return Task(name, "?")


def test_a_task_that_came_before_is_expected_to_take_as_long_again() -> None:
    lengths = ExpectedLengths()
    lengths.record(task("sum/1"), 20, 100)
    lengths.record(task("sum/2"), 20, 300)
    lengths.record(task("sum/1"), 20, 120)
    assert lengths.estimate(task("sum/1"), 20) == 120
    assert lengths.estimate(task("sum/2"), 20) == 300


def test_a_new_task_takes_the_mean_of_its_class_and_else_of_its_kind() -> None:
    lengths = ExpectedLengths()
    assert lengths.estimate(task("sum/1"), 20) is None
    for number, (prompt, tokens) in enumerate([(20, 100), (31, 200), (100, 900)]):
        lengths.record(task(f"sum/{number}"), prompt, tokens)
    lengths.record(task("code/hard/1"), 20, 5000)
    assert lengths.estimate(task("sum/new"), 16) == 150  # prompts of 16 to 31 tokens
    assert lengths.estimate(task("sum/new"), 127) == 900
    assert lengths.estimate(task("sum/new"), 5) == 400  # the mean of all sums
    assert lengths.estimate(task("code/hard/2"), 500) == 5000
    assert lengths.estimate(task("code/easy/2"), 20) is None


def test_a_class_forgets() -> None:
    lengths = ExpectedLengths()
    for number in range(MEMORY):
        lengths.record(task(f"sum/{number}"), 20, 100)
    for number in range(4 * MEMORY):
        lengths.record(task(f"sum/late-{number}"), 20, 1000)
    assert 970 < (lengths.estimate(task("sum/new"), 20) or 0) < 1000


def test_a_checkpoint_keeps_both() -> None:
    lengths, restored = ExpectedLengths(), ExpectedLengths()
    lengths.record(task("sum/1"), 20, 100)
    restored.restore(json.loads(json.dumps(lengths.state())))
    assert restored == lengths
