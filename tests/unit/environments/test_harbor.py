"""Harbor's tasks in boxes: what is read, how a task ends, and that Harbor itself gives the same reward."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octetrl.boxes.box import Box
from octetrl.boxes.boxes import Boxes
from octetrl.config.box import BoxConfig
from octetrl.config.environment import AgentConfig, EnvironmentConfig
from octetrl.environments.dialogue import Failed
from octetrl.environments.harbor import (
    HarborEnvironment,
    _check_health,
    _read_json,
    _read_text,
    harbor_environment,
    read_task,
)
from octetrl.process.command import CommandResult
from octetrl.records import Rollout
from octetrl.system.errors import UserError
from tests.required import missing
from tests.unit.agents.programs import played_task
from tests.unit.boxes.made import IMAGE, config_of

ASKS = """wget -q -O /tmp/said --header "Authorization: Bearer $OPENAI_API_KEY" \
--header "Content-Type: application/json" \
--post-data '{"model": "m", "messages": [{"role": "user", "content": "7 + 8 ="}]}' "$OPENAI_BASE_URL/chat/completions"
grep -o "so [0-9]*" /tmp/said | head -n 1 | cut -c 4- >/app/answer
"""
CHECKS = 'if [ "$(cat /app/answer)" = "$EXPECTED" ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n'
TOML = """
version = "1.0"
[environment]
workdir = "/app"
memory = "1G"
[environment.env]
HELLO = "${OCTETRL_NO_SUCH:-there}"
[verifier]
timeout_sec = 20
[verifier.env]
EXPECTED = "15"
"""


def make_task(folder: Path, tests: str = CHECKS, toml: str = TOML, dockerfile: str = "FROM scratch\n") -> Path:
    for name, text in {
        "task.toml": toml,
        "instruction.md": "<!-- harbor-canary GUID 1 -->\n\nWrite 7 + 8 into /app/answer.\n",
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": f"#!/bin/sh\n{tests}",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def made(folder: Path, box: BoxConfig, script: str = ASKS, **parameters: Any) -> HarborEnvironment:
    command = AgentConfig(command=("sh", "-c", script))
    config = EnvironmentConfig(kind="harbor", agent=command, box=box, parameters=parameters)
    return harbor_environment(str(folder), config)


def folder_box(tmp_path: Path) -> BoxConfig:
    box = config_of("folder", tmp_path)
    for name in ("app", "logs", "tests"):
        (Path(box.image or "") / name).mkdir()
    return box


def played(environment: HarborEnvironment) -> Rollout:
    limits = {"agent_seconds": 200.0, "reward_seconds": 200.0}
    return played_task(environment, 0, boxes=Boxes(environment.box), **limits)[0]


ENDS: Mapping[str, tuple[str, str, dict[str, float], float | None, str]] = {
    "right": (ASKS, CHECKS, {"reward": 1.0}, 1.0, "scored"),
    "several": (
        ASKS,
        'echo \'{"reward": 0.5, "Time-s": 3}\' >/logs/verifier/reward.json',
        {"time_s": 3.0},
        0.5,
        "scored",
    ),
    "the agent fails": (f"{ASKS}echo no space >&2; exit 3", CHECKS, {}, None, "agent_error"),
    "a reward of the agent": (f"{ASKS}echo 1 >/logs/verifier/reward.txt", "exit 1", {}, None, "reward_error"),
    "the tests are killed": (ASKS, "kill -9 1; kill -9 -1; sleep 2", {}, None, "reward_error"),
}


@pytest.mark.parametrize("end", ENDS)
def test_how_a_task_ends_is_its_status(end: str, tmp_path: Path) -> None:
    script, tests, metrics, reward, status = ENDS[end]
    rollout = played(made(make_task(tmp_path / "sum", tests), folder_box(tmp_path), script))
    assert (rollout.status, rollout.reward) == (status, reward), rollout.detail
    assert {name: rollout.metrics[name] for name in metrics} == metrics
    assert len(rollout.turns) == 1


@pytest.mark.parametrize("place", ["agent", "verifier"])
def test_a_limit_of_time_is_the_tasks(place: str, tmp_path: Path) -> None:
    toml = (
        TOML.replace("timeout_sec = 20", "timeout_sec = 1")
        if place == "verifier"
        else f"{TOML}[agent]\ntimeout_sec = 4"
    )
    tests = "sleep 30" if place == "verifier" else CHECKS
    script = ASKS if place == "verifier" else f"{ASKS}sleep 30"
    rollout = played(made(make_task(tmp_path / "sum", tests, toml), folder_box(tmp_path), script))
    expected = ("reward_timeout", None) if place == "verifier" else ("unfinished", 1.0)
    assert (rollout.status, rollout.reward) == expected, rollout.detail


@pytest.mark.parametrize(
    ("turns", "seconds"),
    [({}, 30.0), ({"agent_timeout_seconds": 10.0}, 10.0), ({"agent_timeout_seconds": 60.0}, 30.0)],
)
def test_an_agents_time_is_the_tasks_and_at_most_the_recipes(
    turns: dict[str, float], seconds: float, tmp_path: Path
) -> None:
    folder = make_task(tmp_path / "sum", toml=f"{TOML}[agent]\ntimeout_sec = 30")
    given = {"kind": "harbor", "agent": {"command": ("a",)}, "box": {"program": ("true",)}, "turns": turns}
    environment = harbor_environment(str(folder), EnvironmentConfig.model_validate(given))
    assert environment._agent_seconds(environment.harbor_tasks["sum"]) == seconds


@pytest.mark.parametrize(("start", "retries", "is_healthy"), [(30, 1, True), (0, 1, False), (0, 2, True)])
def test_a_health_check_may_fail_while_the_box_starts_and_then_less_than_retries(
    start: float, retries: int, is_healthy: bool, tmp_path: Path
) -> None:
    class StartingBox(Box):
        codes = iter([1, 0])

        async def run(self, *_: Any, **__: Any) -> CommandResult:
            return CommandResult(next(self.codes), "", "")

    check = {"command": "", "start_period_sec": start, "retries": retries, "interval_sec": 0, "start_interval_sec": 0}
    own = replace(read_task(make_task(tmp_path / "sum"), BoxConfig()), healthcheck=check)
    with nullcontext() if is_healthy else pytest.raises(Failed):
        asyncio.run(_check_health(StartingBox(BoxConfig()), own))


def test_an_image_is_built_once(tmp_path: Path) -> None:
    box = config_of("podman", tmp_path).model_copy(update={"image": None})
    folder = make_task(tmp_path / "sum", dockerfile=f"FROM {IMAGE}\nRUN mkdir -p /app && echo {tmp_path} >/app/made\n")
    environment = made(folder, box, f"{ASKS}cat /app/made; echo $HELLO", build_options=["--pull=never"])
    (own,) = environment.harbor_tasks.values()
    try:
        rollout = played(environment)
        assert (rollout.status, rollout.reward) == ("scored", 1.0), rollout.detail
        assert rollout.result == f"{tmp_path}\nthere"
        (folder / "environment/Dockerfile").unlink()  # of the next call, which has the digest and builds nothing
        assert environment._image(own) == f"octetrl-harbor:{own.digest[:24]}"
    finally:
        subprocess.run([*(box.program or ["podman"]), "rmi", "-f", f"octetrl-harbor:{own.digest[:24]}"], check=False)


@pytest.mark.parametrize("text", ["nan", "", "[1]", '{"reward": "1"}', '{"reward": 1e999}'])
def test_what_is_no_number_is_no_reward(text: str) -> None:
    with pytest.raises(ValueError):
        (_read_json if text.startswith(("[", "{")) else _read_text)(text)


def test_what_is_read_of_a_task(tmp_path: Path) -> None:
    own = read_task(make_task(tmp_path / "sum"), BoxConfig())
    assert own.instruction == "Write 7 + 8 into /app/answer." and own.name == "sum"
    assert own.settings == {"memory_mib": 1024, "env": {"HELLO": "there"}}
    assert (own.workdir, own.test_seconds, own.agent_seconds) == ("/app", 20.0, None)
    named = read_task(make_task(tmp_path / "b", toml=f'{TOML}[task]\nname = "me/sum"'), BoxConfig())
    assert named.name == "me/sum" and named.digest == own.digest
    off = make_task(tmp_path / "c", toml='[environment]\nnetwork_mode = "no-network"\ncpus = 2\nmemory_mb = 512')
    assert read_task(off, BoxConfig()).settings == {"cpus": 2.0, "memory_mib": 512, "network": "off", "env": {}}


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("[[steps]]\nname = 'a'", "has several steps"),
        ("[environment]\ngpus = 1", "needs GPUs"),
        ("[verifier]\nenvironment_mode = 'separate'", "a verifier with a box of its own"),
        ("[environment]\nnetwork_mode = 'allowlist'", "an allowlist of hosts"),
        ("[environment.env]\nA = '${OCTETRL_NO_SUCH}'", "needs the environment variable OCTETRL_NO_SUCH"),
        ("[environment", "task.toml and an instruction.md"),
    ],
)
def test_what_cannot_run_here_is_one_line(toml: str, said: str, tmp_path: Path) -> None:
    make_task(tmp_path / "sum", toml=toml)
    with pytest.raises(UserError, match=said):
        made(tmp_path, BoxConfig(kind="podman", program=("true",)))


def test_wrong_settings_are_one_line(tmp_path: Path) -> None:
    make_task(tmp_path / "sum")
    with pytest.raises(UserError, match="bubblewrap takes a folder"):
        made(tmp_path, BoxConfig(kind="bubblewrap"))
    with pytest.raises(UserError, match="harbor has no 'rewards'"):
        made(tmp_path, BoxConfig(), rewards="x")
    with pytest.raises(UserError, match="has no tasks"):
        made(tmp_path / "tests", BoxConfig())
    with pytest.raises(UserError, match="has no tasks"):
        made(tmp_path, BoxConfig(), leave_out=["sum"])
    with pytest.raises(UserError, match="has no task 'summ'; did you mean 'sum'"):
        made(tmp_path, BoxConfig(), leave_out=["summ"])
    with pytest.raises(UserError, match="give either a command here, or"):
        made(tmp_path, BoxConfig(), agent="a:b")
    make_task(tmp_path / "copy", toml=f'{TOML}[task]\nname = "sum"')
    with pytest.raises(UserError, match="have the name 'sum'"):
        made(tmp_path, BoxConfig(kind="podman", program=("true",)))


@pytest.mark.parametrize("answer", ["15", "16"])
def test_harbor_gives_the_same_reward(answer: str, tmp_path: Path) -> None:
    python = Path(os.environ.get("OCTETRL_OUTSIDE", ""), "python")
    if not python.with_name("harbor").is_file():
        missing("harbor", "not installed; `make test-outside` runs it")
    box, folder = folder_box(tmp_path), make_task(tmp_path / "sum")
    script = str(Path(__file__).with_name("harbor_trial.py"))
    said = subprocess.run(
        [str(python), script, str(folder), str(tmp_path / "trials"), str(box.image), f"echo {answer} >/app/answer"],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    rollout = played(made(folder, box, f"{ASKS}echo {answer} >/app/answer"))
    assert said.stdout.split()[-1] == str(rollout.reward) == str(float(answer == "15"))
