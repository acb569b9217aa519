"""OpenEnv's protocol: against what a real server has answered once, and against that server where it is installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octetrl.environments.openenv import OpenEnvironment, openenv_environment
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.environments.playing import play

SCHEMA = {"properties": {"metadata": {"type": "object"}, "guess": {"type": "integer"}}, "required": ["guess"]}


def told(said: str, reward: float | None, done: bool = False) -> dict[str, Any]:
    observation = {"metadata": {}, "said": said}
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


def failed(code: str, message: str, *errors: Any) -> dict[str, Any]:
    return {"type": "error", "data": {"message": message, "code": code} | ({"errors": [*errors]} if errors else {})}


RECORDED = [  # what is sent, and what openenv 0.10 answers (guess_server.py)
    ("reset", {"seed": 7}, told("Round 7: a number from 0 to 4", None)),
    ("step", {"guess": 4}, told("lower", -0.25)),
    ("step", {"guess": 2}, told("right", 1.0, done=True)),
    ("step", {"guess": 99}, failed("EXECUTION_ERROR", "no such number")),
    (
        "step",
        {"guess": "two"},
        failed("VALIDATION_ERROR", "Invalid message", {"loc": ["guess"], "msg": "Input should be a valid integer"}),
    ),
]


class Recorded:
    """A session that answers as recorded. loses: the number of messages after which the connection is lost."""

    def __init__(self, loses: int = 99, first: Any = None) -> None:
        self.sent: list[Any] = []
        self.is_closed = False
        self._loses, self._first = loses, first

    def send(self, message: str) -> None:
        self.sent.append(json.loads(message))

    def recv(self, timeout: float | None = None) -> str:
        if len(self.sent) > self._loses:
            raise ConnectionResetError("the peer is gone")
        if self._first is not None:
            return json.dumps(self._first)
        last = self.sent[-1]
        return next(
            json.dumps(answer) for kind, data, answer in RECORDED if (kind, data) == (last["type"], last["data"])
        )

    def close(self) -> None:
        self.is_closed = True


def environment(connect: Callable[[], Any] = Recorded, **options: Any) -> OpenEnvironment:
    return OpenEnvironment(connect=connect, schema=SCHEMA, size=1, seed=7, **options)


def call(guess: str) -> str:
    return f'<tool_call>{{"name": "step", "arguments": {{"guess": {guess}}}}}</tool_call>'


def check_played(made: OpenEnvironment, family: str | None = None) -> None:
    calls = call if family else str
    words = iter(['"two"' if family else "two", "4", "2"])
    ends = iter(["Done."])
    played = play(made, lambda _: calls(word) if (word := next(words, None)) else next(ends), family=family)
    assert (played.status, played.reward) == (RolloutStatus.SCORED, 0.75), played.detail
    assert played.metrics["steps"] == 2
    assert played.said[0][1].endswith("\n\nRound 7: a number from 0 to 4")
    answers = [text for role, text in played.said if role == ("tool" if family else "user")][0 if family else 1 :]
    assert "guess: Input should be a valid integer" in answers[0] and answers[1] == "lower"
    assert answers[2:] == (["The episode is done."] if family else [])
    assert (played.metrics["wrong_actions"], played.conversation.refused_calls) == ((0, 1) if family else (1, 0))


@pytest.mark.parametrize("family", [None, "hermes"])
def test_a_message_or_a_call_is_an_action(family: str | None) -> None:
    sessions: list[Recorded] = []

    def connect() -> Recorded:
        sessions.append(Recorded())
        return sessions[-1]

    check_played(environment(connect, tool=family is not None), family)
    assert len(sessions) == 2 and all(one.sent[-1]["type"] == "close" and one.is_closed for one in sessions)


@pytest.mark.parametrize("family", [None, "hermes"])
@pytest.mark.parametrize(("loses", "word", "said"), [(2, "4", "the peer is gone"), (99, "99", "EXECUTION_ERROR")])
def test_what_the_server_fails_at_is_no_reward(loses: int, word: str, said: str, family: str | None) -> None:
    made = environment(lambda: Recorded(loses), tool=family is not None)
    text = call(word) if family else word
    played = play(made, lambda _: text, family=family)
    assert (played.status, played.reward) == (RolloutStatus.ENVIRONMENT_ERROR, None) and said in str(played.detail)


def test_a_full_server_is_asked_again() -> None:
    answers = iter([failed("CAPACITY_REACHED", "2/2"), failed("CAPACITY_REACHED", "2/2"), RECORDED[0][2]])
    assert environment(lambda: Recorded(first=next(answers))).tasks[0].metadata["seed"] == 7


def test_actions_and_observations_of_several_fields() -> None:
    schema = {"properties": {"x": {"type": "number"}, "text": {"type": "string"}}}
    several = OpenEnvironment(connect=Recorded, schema=schema, size=1)
    assert several._action('{"x": 1}') == {"x": 1}
    with pytest.raises(Exception, match="a JSON object with x, text"):
        several._action("1")
    assert OpenEnvironment(connect=Recorded, schema=schema, size=1, action="text")._action("1") == {"text": "1"}
    assert OpenEnvironment(connect=Recorded, schema=schema, size=1, action="x")._action("1") == {"x": 1}
    seen = {"metadata": {}, "a": {"b": "deep"}, "c": 1, "d": None}
    assert several._show(seen) == '{"a": {"b": "deep"}, "c": 1}'
    assert OpenEnvironment(connect=Recorded, schema=schema, size=1, observation="a.b")._show(seen) == "deep"
    with pytest.raises(UserError, match="an action has no 'y'"):
        OpenEnvironment(connect=Recorded, schema=schema, size=1, action="y")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    try:
        import openenv  # noqa: F401
        import websockets  # noqa: F401
    except ImportError as error:
        missing("openenv", f"{error.name} is not installed; `make test-outside` runs them")
    command = [sys.executable, str(Path(__file__).parent / "guess_server.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"ws://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


@pytest.mark.parametrize("family", [None, "hermes"])
def test_the_real_server_answers_as_recorded(server: str, family: str | None) -> None:
    made = openenv_environment(server, {"tool": family is not None}, size=2, seed=7, action_marker=None)
    assert made.schema["properties"]["guess"]["type"] == "integer"
    check_played(made, family)
    session = made.connect()
    for kind, data, answer in RECORDED:
        session.send(json.dumps({"type": kind, "data": data}))
        got = json.loads(session.recv())
        for each in got["data"].get("errors", ()):
            assert each["msg"].startswith(answer["data"]["errors"][0]["msg"])
        assert {**got["data"], "errors": 0} == {**answer["data"], "errors": 0} and got["type"] == answer["type"]
    session.close()


def test_what_is_no_server_is_one_line(server: str) -> None:
    for address, parameters, said in [
        ("ws://127.0.0.1:9", {}, "does not answer as an OpenEnv server"),
        ("localhost", {}, "is not the address of a server"),
        (server, {"seed": 1}, "openenv has no 'seed'"),
    ]:
        with pytest.raises(UserError, match=said):
            openenv_environment(address, parameters, size=1, seed=0, action_marker=None)
