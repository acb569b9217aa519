"""Tasksets of verifiers as agents: with the real package where it is installed, and without it what it says."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from octetrl.environments.verifiers_v1 import VerifiersEnvironment, ending, measured, verifiers_environment
from octetrl.records import GenerationRequest
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.agents.programs import played_task

try:
    import verifiers.v1 as vf
except ImportError:
    vf = None
NOW = 1.0


@pytest.fixture(scope="module")
def sums() -> Iterator[VerifiersEnvironment]:
    if vf is None:
        missing("verifiers", "not installed; `make test-outside` runs them")
    sys.path.insert(0, str(Path(__file__).parent))
    short = {"setup": 1.0, "scoring": 1.0}
    environment = verifiers_environment("sums-taskset", {"agent": {"timeout": short}}, size=4, max_turns=3)
    yield environment
    environment.close()
    sys.path.remove(str(Path(__file__).parent))


def test_an_episode_is_a_rollout_and_how_it_ends_is_its_status(sums: VerifiersEnvironment) -> None:
    names = [own.data.name for own in sums._theirs]
    assert [task.prompt for task in sums.tasks] == [f"{name}: 7 + 8 =" for name in names]
    expected = {
        "right": ("scored", 2.0, 2),
        "wrong": ("scored", 0.0, 2),
        "too long": ("unfinished", 2.0, 3),
        "harness fails": ("agent_error", None, 0),
        "setup raises": ("environment_error", None, 0),
        "setup hangs": ("environment_timeout", None, 0),
        "scoring raises": ("reward_error", None, 2),
        "scoring hangs": ("reward_timeout", None, 2),
    }
    for place, name in enumerate(names):
        rollout, session = played_task(sums, place, max_turns=9)
        assert (rollout.status, rollout.reward, len(session.submitted)) == expected[name], (name, rollout.detail)
        assert len(rollout.turns) == len(session.submitted) and len(rollout.segments) <= 1
        if rollout.reward is not None:
            assert (rollout.metrics["right"], rollout.metrics["replies"]) == (rollout.reward / 2, len(rollout.turns))
            assert rollout.result == ("so 15" if name != "too long" else None)


def test_an_agent_that_is_not_trained_is_answered(sums: VerifiersEnvironment) -> None:
    environment = verifiers_environment(
        "sums-taskset", {"id": "judged-sums", "judge": {"harness": {"id": "sums-taskset"}}}, size=4, max_turns=3
    )

    def says(request: GenerationRequest, _: Any) -> str:
        return "so 15"

    rollout, session = played_task(environment, 0, says, max_turns=9)
    assert (rollout.status, rollout.reward) == ("scored", 2.0), rollout.detail
    assert len(session.submitted) == 4 and len(rollout.turns) == 2
    assert rollout.metrics["agent_right"] == rollout.metrics["judge_right"] == 1.0


def test_a_game_of_textarena_is_played_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With verifiers' own harness, which uv installs, and without the words that nltk would download."""
    if vf is None or find_spec("textarena") is None:
        missing("verifiers", "textarena is not installed; `make test-outside` runs it")
    (tmp_path / "corpora/words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "corpora/words" / name).write_text("banana\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # uv
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)
    game = {"taskset": {"game": "Hangman-v0"}, "player": {"harness": {"id": "null"}}}
    environment = verifiers_environment("textarena", game, size=2, max_turns=9)
    letters = iter("bxan")
    try:
        rollout, session = played_task(
            environment, 1, lambda *_: f"so [{next(letters)}]", context=8000, max_turns=9, agent_seconds=240.0
        )
    finally:
        environment.close()
    assert (rollout.status, rollout.reward) == ("scored", 1.0), rollout.detail
    assert len(session.submitted) == len(rollout.turns) == 4 and len(rollout.segments) == 1


@pytest.mark.parametrize(("verdict", "expected"), [({"reward": 0.5}, ("scored", 0.5)), ({}, ("reward_error", None))])
def test_a_task_of_nemo_gym_is_verified_by_its_resources_server(
    verdict: dict[str, Any], expected: tuple[str, float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A double of the server, by its protocol: /seed_session with a cookie, then /verify with the whole response."""
    if vf is None:
        missing("verifiers", "not installed; `make test-outside` runs them")
    asked: list[tuple[str, str | None, dict[str, Any]]] = []

    class Resources(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            given = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append((self.path, self.headers["cookie"], given))
            echoed = {name: given[name] for name in ("responses_create_params", "response") if name in given}
            self.send_response(200)
            self.send_header("set-cookie", "session=7")
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({**echoed, **verdict, "extra": 3} if self.path == "/verify" else {}).encode())

        def log_message(self, *_: object) -> None:
            pass

    row = {"responses_create_params": {"input": [{"role": "user", "content": "7 + 8 ="}]}, "expected": "15"}
    (tmp_path / "sums.jsonl").write_text(json.dumps(row))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")  # uv
    server = HTTPServer(("127.0.0.1", 0), Resources)
    Thread(target=server.serve_forever, daemon=True).start()
    task = {"resources_url": f"http://127.0.0.1:{server.server_port}"}
    taskset = {"dataset": str(tmp_path / "sums.jsonl"), "task": task}
    parameters = {"taskset": taskset, "agent": {"harness": {"id": "null"}}}
    environment = verifiers_environment("nemo_gym", parameters, size=2, max_turns=3)
    try:
        rollout, session = played_task(environment, 0, max_turns=9, agent_seconds=240.0)
    finally:
        environment.close()
        server.shutdown()
        server.server_close()
    assert (rollout.status, rollout.reward) == expected, rollout.detail
    assert [(path, cookie) for path, cookie, _ in asked] == [("/seed_session", None), ("/verify", "session=7")]
    assert asked[1][2]["expected"] == "15" and "so 15" in json.dumps(asked[1][2]["response"])
    assert len(session.submitted) == len(rollout.turns) == 1


def test_what_cannot_be_loaded_is_one_line(sums: VerifiersEnvironment, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="verifiers can't load 'no-such-thing-here'"):
        verifiers_environment("no-such-thing-here", {}, size=4, max_turns=3)
    with pytest.raises(UserError, match="runs code of the model; say where"):
        verifiers_environment("sums-taskset", {"agent": {"harness": {"id": "bash"}}}, size=4, max_turns=3)


def trace(**changes: Any) -> Any:
    """As much of a trace as is read."""
    one = SimpleNamespace(
        id="t", ok=True, is_timeout=False, stop_condition="agent_completed", last_error=None,
        agent=SimpleNamespace(name="agent", trainable=True), timing=SimpleNamespace(scoring=SimpleNamespace(start=NOW)),
        rewards={"right": SimpleNamespace(score=0.5)}, metrics={"replies": 2.0},
    )  # fmt: skip
    vars(one).update(changes)
    return one


def episode(*traces: Any, **changes: Any) -> Any:
    one = SimpleNamespace(ok=all(each.ok for each in traces), is_timeout=False, last_error=None, traces=list(traces))
    vars(one).update(changes)
    return one


@pytest.mark.parametrize(
    ("given", "status"),
    [
        (episode(trace()), "scored"),
        (episode(trace(stop_condition="max_total_tokens")), "unfinished"),
        (episode(trace(stop_condition="agent_timeout", is_timeout=True)), "unfinished"),
        (episode(trace(stop_condition="finalize_timeout", is_timeout=True)), "environment_timeout"),
        (episode(trace(stop_condition="scoring_timeout", is_timeout=True)), "reward_timeout"),
        (episode(trace(ok=False)), "reward_error"),
        (episode(trace(), ok=False), "environment_error"),
        (episode(trace(), ok=False, is_timeout=True), "environment_timeout"),
        *(
            (
                episode(
                    trace(
                        ok=False,
                        last_error=SimpleNamespace(type=kind, message="x"),
                        timing=SimpleNamespace(scoring=SimpleNamespace(start=0.0)),
                    )
                ),
                status,
            )
            for kind, status in [
                ("HarnessError", "agent_error"), ("ProviderError", "agent_error"),
                ("SandboxError", "box_error"), ("TunnelError", "box_error"),
                ("TaskError", "environment_error"),
            ]
        ),
    ],
)  # fmt: skip
def test_no_failure_of_the_machine_is_an_end_with_a_reward(given: Any, status: str) -> None:
    assert ending(given)[0] == status


def test_rewards_are_metrics_by_name_and_none_is_no_reward() -> None:
    two = [trace(), trace(agent=SimpleNamespace(name="Judge-1", trainable=False), rewards={"ok": None})]
    assert measured(episode(*two)) == {"agent_right": 0.5, "agent_replies": 2.0, "judge_1_replies": 2.0}
    environment = VerifiersEnvironment(None, "sums", 4)
    for rewards in ({"right": None}, {}):
        state = SimpleNamespace(episode=episode(trace(rewards=rewards, reward=0.0, metrics={})))
        with pytest.raises(RuntimeError, match=r"not computed: right|nothing in the taskset"):
            environment.verifiers(SimpleNamespace(state=state))  # type: ignore[arg-type]


@pytest.mark.parametrize("installed", [None, types.ModuleType("verifiers")])
def test_without_the_right_version_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", installed)
    for name in [name for name in sys.modules if name.startswith("verifiers.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(UserError, match=r"pip install 'octetrl\[verifiers\]'"):
        verifiers_environment("x", {}, size=1, max_turns=1)
