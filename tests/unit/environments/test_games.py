"""Games that are ready-made: played well, badly and not at all."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from octetrl.environments.base import Taskset
from octetrl.environments.games import GuessNumber, game_environment
from octetrl.environments.turns import Conversation
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError
from tests.unit.environments.playing import play

GAME = GuessNumber(size=50, numbers=100, guesses=8)


def halving(conversation: Conversation) -> str:
    """The middle of what is left."""
    low, high = conversation.task.metadata["low"], conversation.task.metadata["high"]
    guesses = [message["content"] for message in conversation.messages[1::2]]
    for guess, answer in zip(guesses, conversation.messages[2::2], strict=True):
        number = int(guess.removeprefix("I say "))
        low, high = (number + 1, high) if answer["content"].startswith("Higher") else (low, number - 1)
    return f"I say {(low + high) // 2}"


def test_whoever_halves_finds_every_number() -> None:
    for task in range(20):
        played = play(GAME, halving, task=task)
        assert played.components["found"] == 1.0 and played.conversation.turns <= 7
        assert played.reward == pytest.approx(1 + 0.2 * (1 - played.conversation.turns / 8))
        assert played.conversation.answered == GAME.tasks[task].answer
        assert all(text.startswith(("Higher", "Lower")) for role, text in played.said[2:] if role == "user")


def test_who_says_no_number_is_told_and_runs_out_of_guesses() -> None:
    played = play(GAME, lambda conversation: "<think>it may be 5</think>What is it?")
    assert played.said[2] == ("user", "That is no number. Say one. Guesses left: 7.")
    assert (played.reward, played.metrics["guesses_made"], played.status) == (0.0, 8, RolloutStatus.SCORED)


def test_the_last_number_counts_whatever_its_length() -> None:
    assert play(GAME, lambda conversation: f"not 7 but {conversation.task.answer}").reward == pytest.approx(1.175)
    assert play(GAME, lambda conversation: "9" * 9000).said[2][1].startswith("Lower")
    assert play(GAME, lambda conversation: "-" + "9" * 9000).said[2][1].startswith("Higher")


def test_tasks_differ_and_are_the_same_each_time() -> None:
    again: GuessNumber = pickle.loads(pickle.dumps(GAME))
    assert list(again.tasks) == list(GAME.tasks) and again.tasks[3:5] == list(GAME.tasks)[3:5]
    assert len({task.prompt for task in GAME.tasks}) > 40
    assert GuessNumber(size=50, seed=1).tasks[0] != GAME.tasks[0]
    assert len(Taskset(GAME.tasks, eval_size=10, seed=0).held_out()) == 10
    with pytest.raises(IndexError):
        GAME.tasks[50]


@pytest.mark.parametrize(
    ("name", "parameters", "said"),
    [
        ("gues_number", {}, "there is no game 'gues_number'; did you mean 'guess_number'?"),
        ("guess_number", {"guess": 3}, "has no parameter 'guess'; did you mean 'guesses'?; it takes numbers, guesses"),
        ("guess_number", {"guesses": 0}, "environment.parameters.guesses: 0 is not a whole number of at least 1"),
        ("guess_number", {"seed": 0}, "has no parameter 'seed'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refusal:
        game_environment(name, parameters, size=5, seed=0)
    assert said in str(refusal.value) and "\n" not in str(refusal.value)
