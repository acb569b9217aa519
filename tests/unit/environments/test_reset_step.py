"""Environments with reset and step as conversations, Gymnasium's own among them."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import pytest

from octetrl.environments.reset_step import ResetStep, gymnasium_environment
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError
from tests.unit.environments.playing import play
from tests.unit.environments.walks import Corridor

CORRIDOR = "tests.unit.environments.walks:Corridor"


def made(name: str = CORRIDOR, *, marker: str | None = None, **parameters: Any) -> ResetStep:
    return gymnasium_environment(name, parameters, size=10, seed=0, action_marker=marker)


def test_steps_are_replies_and_the_reward_is_their_sum() -> None:
    environment = made(length=3)
    start = int(environment.tasks[2].metadata["shown"].split()[3])
    played = play(environment, lambda conversation: "1", task=2)
    assert played.said[0][1].endswith(f"You are at {start} of 3.")
    assert [text for role, text in played.said[1:] if role == "user"] == [
        f"You are at {place} of 3." for place in range(start + 1, 3)
    ]
    assert played.reward == pytest.approx(1.0 - 0.1 * (2 - start))
    assert played.metrics == {"steps": 3 - start, "wrong_actions": 0}


def test_actions_by_name_after_a_marker() -> None:
    environment = made(length=2, actions=["left", "right"], marker="Action:")
    words = iter(["hm", "Action: jump", *["<think>Action: left</think>So\nAction: Right."] * 9])
    played = play(environment, lambda conversation: next(words))
    assert played.said[2] == ("user", "There is no action in that: write it after Action:")
    assert played.said[4] == ("user", "'jump' is no action. The actions are: left, right.")
    assert played.metrics["wrong_actions"] == 2 and played.components["gained"] > 0.8


@pytest.mark.parametrize("said", ["2", "-1", "1.0", "¹", "9" * 5000, ""])
def test_a_number_that_is_none_is_told(said: str) -> None:
    played = play(made(), lambda conversation: said, max_turns=2)
    assert played.said[2][1].endswith("is no action. The actions are the numbers 0 to 1.")
    assert played.status is RolloutStatus.UNFINISHED and played.reward == 0.0


@pytest.mark.parametrize(("actions", "said"), [(["left", "right"], "right"), ([], "2")])
def test_actions_are_counted_from_the_first_of_their_space(actions: list[str], said: str) -> None:
    environment = made("tests.unit.environments.walks:FromOne", actions=actions)
    played = play(environment, lambda conversation: said)
    assert played.components["gained"] > 0.7 and played.metrics["wrong_actions"] == 0
    played = play(environment, lambda conversation: "0", max_turns=2)
    assert played.said[2][1].endswith("left, right." if actions else "The actions are the numbers 1 to 2.")


def test_a_space_of_texts_takes_the_text() -> None:
    words = iter(["too long", "abc", "end"])
    played = play(made("tests.unit.environments.walks:Words"), lambda conversation: next(words))
    assert [text for role, text in played.said[1:] if role == "user"] == ["'too long' is no action here.", "ABC"]
    assert played.reward == 1.0


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("raise", "RuntimeError: the floor gave way"),
        ("old", "TypeError: step gave something else"),
        ("forget", "RuntimeError: reset(seed=0) showed"),
    ],
)
def test_what_it_does_wrong_is_an_environment_error_and_it_is_closed(does: str, said: str) -> None:
    environment = made(does=does)
    _ = environment.tasks[0]
    before = Corridor.open
    played = play(environment, lambda conversation: "1")
    assert (played.status, played.reward) == (RolloutStatus.ENVIRONMENT_ERROR, None)
    assert said in str(played.detail) and Corridor.open == before


def test_it_can_be_sent_to_another_process() -> None:
    environment = made()
    assert list(pickle.loads(pickle.dumps(environment)).tasks) == list(environment.tasks)


def test_gymnasiums_own_are_made_by_id() -> None:
    pytest.importorskip("gymnasium")
    environment = made("FrozenLake-v1", render_mode="ansi", is_slippery=False, actions=["left", "down", "right", "up"])
    assert environment.tasks[0].prompt.endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    moves = iter(["down", "down", "right", "right", "down", "right"])
    played = play(environment, lambda conversation: next(moves))
    assert played.said[2][1] == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert played.reward == 1.0 and played.metrics["steps"] == 6


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("FrozenLke-v1", {}, "gymnasium has no environment 'FrozenLke-v1'; did you mean 'FrozenLake"),
        ("FrozenLake-v1", {"size": 3}, "gives no environment with reset(seed=...)"),
        ("tests.unit.environments.walks:MADE", {}, "(TypeError: the first argument must be callable"),
        ("tests.unit.environments.walks:no_reset", {}, "gives no environment with reset(seed=...)"),
        ("tests.unit.environments.walks:Coridor", {}, "did you mean 'Corridor'?"),
    ],
)
def test_what_cannot_be_made_is_refused_in_one_line(name: str, parameters: dict[str, Any], said: str) -> None:
    if ":" not in name:
        pytest.importorskip("gymnasium")
    with pytest.raises(UserError) as refusal:
        made(name, **parameters)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UserError, match=r"pip install 'octetrl\[gymnasium\]'"):
        made("FrozenLake-v1")
