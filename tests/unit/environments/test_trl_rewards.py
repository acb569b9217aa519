"""Reward functions of TRL's form, in reward processes and as methods of an environment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octetrl.environments.python_object import PythonReward
from octetrl.environments.reward_workers import RewardWorkers
from octetrl.environments.trl_rewards import TrlRewards, has_trl_form, trl_reward
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError
from tests.house.markdown import code_blocks
from tests.house.tree import REPO
from tests.unit.environments import trl_functions as of
from tests.unit.environments.playing import play

HERE = "tests.unit.environments.trl_functions"
TASK = Task("sum/1", "3 + 4 =", answer="7", metadata={"level": 2})


@pytest.mark.parametrize(
    ("name", "rewards"), [("accuracy", [1.0, 0.0]), ("both", [1.0, 0.25]), ("by_column", [1.0, 0.0])]
)
def test_one_or_several_functions_score_in_a_reward_process(name: str, rewards: list[float]) -> None:
    with RewardWorkers(PythonReward(f"{HERE}:{name}"), timeout_seconds=60.0) as workers:
        scores = workers.score([(TASK, "7"), (TASK, "8 please")])
    assert [score.reward for score in scores] == rewards


def test_it_is_what_trls_trainer_computes_for_the_batch() -> None:
    """nansum over functions of weight * reward, each function called once with all completions."""
    texts, weights = ["7", "7 please", "no", "please"], (1.0, 0.25)
    columns: dict[str, Any] = {"answer": ["7"] * 4, "level": [2] * 4}
    called = [
        of.accuracy(prompts=["3 + 4 ="] * 4, completions=texts, **columns),
        asyncio.run(of.polite(prompts=["3 + 4 ="] * 4, completions=texts, **columns)),
    ]
    theirs = [sum(w * float(rewards[row]) for w, rewards in zip(weights, called, strict=True)) for row in range(4)]
    assert [of.both(TASK, text) for text in texts] == theirs


def test_none_leaves_a_function_out_and_all_none_is_no_reward() -> None:
    unknown = Task("sum/2", "?", answer="7", metadata={"level": None})
    scorer = TrlRewards([of.levels, of.accuracy], weights=[3.0, 0.5])
    assert (scorer(TASK, "7"), scorer(unknown, "7")) == (6.5, 0.5)
    with pytest.raises(ValueError, match="every reward function returned None"):
        TrlRewards([of.levels])(unknown, "7")


def test_messages_are_given_as_in_conversational_data_sets() -> None:
    assert TrlRewards([of.of_messages], messages=True)(TASK, "seven") == len("3 + 4 =") + len("seven")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (of.of_ids, "needs the column 'completion_ids', which the task does not have; it has level, id, answer"),
        (of.a_number, "returned a float; return a list of one number"),
        (of.two, "returned 2 rewards for 1 completion"),
        (of.of_messages, "gives lists of messages"),
    ],
)
def test_a_wrong_function_is_a_reward_error(function: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        TrlRewards([function])(TASK, "7")
    with RewardWorkers(PythonReward(f"{HERE}:{function.__name__}"), timeout_seconds=60.0) as workers:
        (score,) = workers.score([(TASK, "7")])
    assert score.status is RolloutStatus.REWARD_ERROR and text in str(score.detail)


def test_other_forms_are_refused() -> None:
    def ours(task: Task, text: str) -> float:
        return 1.0

    assert has_trl_form(of.polite) and not has_trl_form(ours) and not has_trl_form(of.of_task)
    for functions, weights, line in (
        ([], None, "there is no reward function"),
        ([of.accuracy], [1.0, 2.0], "2 weights for 1 functions"),
        ([ours], None, "has no parameter named completions"),
    ):
        with pytest.raises(UserError, match=line):
            TrlRewards(functions, weights)
    with pytest.raises(UserError, match="is not of the form"):
        trl_reward(ours)


def test_as_methods_each_is_a_component() -> None:
    class Sums:
        tasks = (TASK,)
        accuracy = trl_reward(of.accuracy)
        polite = trl_reward(of.polite, weight=0.25)

    for text, reward, components in (
        ("7", 1.0, {"accuracy": 1.0, "polite": 0.0}),
        ("7, please", 0.25, {"accuracy": 0.0, "polite": 1.0}),
    ):
        played = play(Sums(), lambda conversation, text=text: text)
        assert (played.reward, played.components) == (reward, components)


def test_the_page_shows_what_runs() -> None:
    page = (REPO / "docs/environments.md").read_text(encoding="utf-8")
    shown = page.split("## Reward functions of TRL")[1].split("\n## ")[0]
    module: dict[str, Any] = {}
    for text in [block.text for block in code_blocks(shown) if block.language == "python"]:
        exec(text, module)
    assert module["both"](TASK, "7") == 1.0 and module["both"](TASK, "please") == 0.2 * 0.5
    played = play(module["Sums"](), lambda conversation: "7", task=6)
    assert (played.reward, played.components) == (1.0, {"accuracy": 1.0, "polite": 0.0})
