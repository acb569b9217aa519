"""Runs a folder of Harbor's tasks in boxes, without Harbor: an agent works in a task's box, then its tests score it.

    environment: {kind: harbor, dataset: tasks/, agent: {command: [my-agent, "{prompt}"]}, box: {kind: docker}}

    NAME/task.toml         time limits, resources, users, variables (${NAME} and ${NAME:-default} are this machine's)
    NAME/instruction.md    the prompt, without a canary at its beginning
    NAME/environment/      a Dockerfile, whose image is built once by its digest, unless task.toml has `docker_image`
    NAME/tests/test.sh     runs after the agent, and writes /logs/verifier/reward.json or reward.txt

`environment.box.image` replaces the task's image. `reward.json` is an object of numbers, each a metric; its key
`reward` (or `parameters.reward`), or its only one, is the reward.

    the agent returns; its time is over                    SCORED; UNFINISHED, both with the tests' reward
    it ends with another exit code, or raises              AGENT_ERROR       none
    the image, the box or the health check fails           BOX_ERROR, ENVIRONMENT_ERROR
    the tests take too long; write no reward, or a bad one REWARD_TIMEOUT; REWARD_ERROR

A reward that was there before the tests is removed. Refused when loaded: tasks of several steps, with a compose file,
MCP servers, GPUs, Windows, an allowlist of hosts, or a verifier with a box of its own.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import math
import os
import re
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from octetrl.boxes.box import Box, BoxError, program_of
from octetrl.boxes.containers import call_engine
from octetrl.config.box import BoxConfig
from octetrl.config.environment import AgentConfig, EnvironmentConfig
from octetrl.environments.dialogue import ConversationLimits, Failed
from octetrl.environments.programs import Model, check_exit, filled_command
from octetrl.environments.python_object import load_object
from octetrl.environments.scoring import log
from octetrl.environments.turns import Conversation, reward
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError, nearest

_FIELD = "environment.dataset"
_PARAMETERS = ("agent", "reward", "leave_out", "build_options")
_LOGS = "/logs/verifier"
_ROOT = "0"  # an image may have no names of users
_BUILDS = 4  # at once
_UPLOADS = 16  # at once, for a box
_START_SECONDS = 900.0  # for box, health check and the upload of the tests
_SHOWN = 300  # letters of what a command has said
_COMPOSE = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)

PythonAgent = Callable[[Task, Model, Box], Any]


@dataclass(frozen=True)
class HarborTask:
    """What is read of a task. Times in seconds."""

    folder: Path
    name: str
    instruction: str
    image: str | None
    settings: Mapping[str, Any]  # of its box, besides the recipe's
    workdir: str | None
    user: str | None
    agent_seconds: float | None
    build_seconds: float
    healthcheck: Mapping[str, Any] | None
    test_env: Mapping[str, str]
    test_user: str | None
    test_seconds: float

    @cached_property
    def digest(self) -> str:
        """Of the files that the image is built from."""
        hashed = hashlib.sha256()
        for path in _files(self.folder / "environment"):
            name = path.relative_to(self.folder).as_posix()
            hashed.update(f"{name}\0{os.access(path, os.X_OK)}\0{path.stat().st_size}\0".encode() + path.read_bytes())
        return hashed.hexdigest()


@dataclass(eq=False)
class HarborEnvironment:
    """agent_seconds: the most of an agent, where the recipe says so."""

    harbor_tasks: Mapping[str, HarborTask]  # by name
    box: BoxConfig
    agent_seconds: float | None
    default_seconds: float  # of an agent whose task has no limit
    command: AgentConfig | None = None
    python_agent: PythonAgent | None = None
    reward_key: str = "reward"
    build_options: Sequence[str] = ()
    _built: dict[str, threading.Lock] = field(default_factory=dict)
    _builds: threading.Semaphore = field(default_factory=lambda: threading.BoundedSemaphore(_BUILDS))

    @cached_property
    def tasks(self) -> Sequence[Task]:
        return [Task(name, own.instruction, metadata={"task": name}) for name, own in self.harbor_tasks.items()]

    def limits(self, given: ConversationLimits) -> ConversationLimits:
        """Each task has limits of its own; these are beyond all of them."""
        own = self.harbor_tasks.values()
        agent = max(_START_SECONDS + one.build_seconds + self._agent_seconds(one) for one in own)
        tests = max(_START_SECONDS + one.test_seconds for one in own)
        return replace(given, agent_seconds=agent, reward_seconds=max(tests, given.reward_seconds))

    async def agent(self, task: Task, model: Model) -> str | None:
        own, state = self.harbor_tasks[task.metadata["task"]], Conversation.current().state
        image = await asyncio.to_thread(self._image, own)
        env = {**self.box.env, **own.settings.get("env", {})}
        box = await model.box(calls_policy=True, **{**own.settings, "image": image, "env": env})
        await _shell(box, f"mkdir -p {_LOGS} /logs/agent /logs/artifacts && chmod -R 777 /logs")
        await _check_health(box, own)
        state.box = box
        seconds = self._agent_seconds(own)
        if self.python_agent is not None:
            try:
                async with asyncio.timeout(seconds) as limit:
                    said = await self.python_agent(task, model, box)
            except TimeoutError:
                if not limit.expired():
                    raise
                raise Failed(RolloutStatus.UNFINISHED, f"the agent took more than {seconds:g} s") from None
            return None if said is None else str(said)
        assert self.command is not None, "one of the two is given"
        result = await box.run(
            filled_command(self.command, task, model),
            cwd=own.workdir,
            env={**model.variables, **self.command.env},
            user=own.user,
            stdin=task.text if self.command.prompt_on_stdin else "",
            seconds=seconds,
        )
        if result.stopped is not None:
            raise Failed(RolloutStatus.UNFINISHED, f"the agent took more than {seconds:g} s")
        return check_exit(self.command.command[0], result)

    @reward
    async def tests(self, conversation: Conversation) -> float:
        """The reward that the task's tests write."""
        own, box = self.harbor_tasks[conversation.task.metadata["task"]], getattr(conversation.state, "box", None)
        if box is None:
            raise RuntimeError("the agent's time was over before its box had started")
        earlier = f"{_LOGS}/reward.txt {_LOGS}/reward.json"
        await _shell(box, f"mkdir -p /tests {_LOGS} && chmod 777 /tests && rm -f {earlier}")
        await _upload(box, own.folder / "tests", "/tests")
        command = ["sh", "-c", "exec /tests/test.sh"]
        result = await box.run(command, cwd=own.workdir, env=own.test_env, user=own.test_user, seconds=own.test_seconds)
        if result.stopped is not None:
            raise Failed(RolloutStatus.REWARD_TIMEOUT, f"its tests took more than {own.test_seconds:g} s")
        for name, read in (("reward.json", _read_json), ("reward.txt", _read_text)):
            try:
                text = (await box.get(f"{_LOGS}/{name}")).decode()
            except OSError:
                continue
            return self._chosen(read(text))
        said = " ".join((result.stdout + result.stderr)[-_SHOWN:].split())
        raise RuntimeError(f"its tests wrote no {_LOGS}/reward.json or .txt (exit code {result.code}: {said})")

    def _agent_seconds(self, own: HarborTask) -> float:
        seconds = own.agent_seconds or self.default_seconds
        return seconds if self.agent_seconds is None else min(seconds, self.agent_seconds)

    def _chosen(self, rewards: Mapping[str, float]) -> float:
        for name, value in rewards.items():
            log(re.sub(r"[^a-z0-9_]", "_", name.lower()), value)
        if self.reward_key in rewards:
            return rewards[self.reward_key]
        if len(rewards) == 1:
            return next(iter(rewards.values()))
        raise ValueError(f"reward.json has {', '.join(rewards) or 'nothing'}, and no '{self.reward_key}'")

    def _image(self, own: HarborTask) -> str | None:
        """The name of the task's image, which is built if there is none. Raises Failed."""
        if self.box.image is not None or own.image is not None:
            return self.box.image or own.image
        tag = f"octetrl-harbor:{own.digest[:24]}"
        with self._built.setdefault(tag, threading.Lock()), self._builds:
            try:
                call_engine(self.box, "image", "inspect", tag)
            except OSError:  # there is none
                words = ("build", "--tag", tag, *self.build_options, str(own.folder / "environment"))
                try:
                    call_engine(self.box, *words, seconds=own.build_seconds)
                except OSError as error:
                    said = f"the image of {own.name} can't be built: {error}"
                    raise Failed(RolloutStatus.BOX_ERROR, said) from error
        return tag


async def _shell(box: Box, script: str) -> None:
    result = await box.run(["sh", "-c", script], user=_ROOT, seconds=60.0)
    if result.code != 0:
        said = result.stopped or result.stderr.strip()[-_SHOWN:]
        raise Failed(RolloutStatus.BOX_ERROR, f"in the box, '{script[:60]}' failed: {said}")


async def _upload(box: Box, folder: Path, target: str) -> None:
    files = _files(folder)
    names = [f"{target}/{path.relative_to(folder).as_posix()}" for path in files]
    pairs = list(zip(names, files, strict=True))
    for first in range(0, len(pairs), _UPLOADS):
        await asyncio.gather(*(box.put(name, path.read_bytes()) for name, path in pairs[first : first + _UPLOADS]))
    runs = [name for name, path in pairs if os.access(path, os.X_OK) or name == f"{target}/test.sh"]
    await box.run(["chmod", "+x", *runs], user=_ROOT, seconds=60.0)


async def _check_health(box: Box, own: HarborTask) -> None:
    """Docker's rule: within `start_period_sec` failures do not count, then there may be `retries`."""
    if (check := own.healthcheck) is None:
        return
    loop = asyncio.get_running_loop()
    starts, failures = loop.time() + float(check.get("start_period_sec", 0.0)), 0
    while True:
        result = await box.run(["sh", "-c", check["command"]], seconds=float(check.get("timeout_sec", 30.0)))
        if result.code == 0:
            return
        is_starting = loop.time() < starts
        failures += not is_starting
        if failures >= int(check.get("retries", 3)):
            said = result.stopped or (result.stderr or result.stdout).strip()[-_SHOWN:]
            raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"the health check of {own.name} failed: {said}")
        await asyncio.sleep(float(check.get("start_interval_sec" if is_starting else "interval_sec", 5.0)))


def _read_json(text: str) -> dict[str, float]:
    given = json.loads(text)
    if not isinstance(given, dict) or not all(isinstance(value, int | float) for value in given.values()):
        raise ValueError(f"reward.json is no object of numbers: {text[:80]}")
    return {name: _finite(value) for name, value in given.items()}


def _read_text(text: str) -> dict[str, float]:
    return {"reward": _finite(float(text))}


def _finite(value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return float(value)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def harbor_environment(folder: str, config: EnvironmentConfig) -> HarborEnvironment:
    """The tasks of `folder`: one in each folder with a task.toml, or itself. Raises UserError for one that can't run
    here."""
    parameters = config.parameters
    if unknown := set(parameters) - set(_PARAMETERS):
        names = ", ".join(sorted(unknown))
        raise UserError(f"environment.parameters: harbor has no '{names}'; it has {', '.join(_PARAMETERS)}")
    if (config.agent is None) == ("agent" not in parameters):
        raise UserError("environment.agent: give either a command here, or parameters.agent as module:name")
    box = config.box or BoxConfig()
    root, left_out = Path(folder), set(parameters.get("leave_out", ()))
    found = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("*/task.toml"))
    if unknown := left_out - {path.name for path in found}:
        first = min(unknown)
        near = nearest(first, [path.name for path in found])
        raise UserError(f"environment.parameters.leave_out: '{folder}' has no task '{first}'{near}; remove it")
    tasks = [read_task(path, box) for path in found if path.name not in left_out]
    if not tasks:
        raise UserError(f"{_FIELD}: '{folder}' has no tasks; give a folder of folders with a task.toml")
    try:
        program_of(box)
    except BoxError as error:
        raise UserError(f"environment.box: {error}") from error
    name = parameters.get("agent")
    agent = None if name is None else load_object("environment.parameters.agent", name, config.load_timeout_seconds)
    if agent is not None and not inspect.iscoroutinefunction(agent):
        raise UserError(f"environment.parameters.agent: {name} must be an async function of task, model and box")
    by_name = {own.name: own for own in tasks}
    if double := next((own for own in tasks if by_name[own.name] is not own), None):
        both = f"{double.folder} and {by_name[double.name].folder}"
        raise UserError(f"{_FIELD}: {both} have the name '{double.name}'; change one, or name one in leave_out")
    turns = config.turns
    return HarborEnvironment(
        by_name,
        box,
        turns.agent_timeout_seconds if "agent_timeout_seconds" in turns.model_fields_set else None,
        turns.agent_timeout_seconds,
        config.agent,
        agent,
        parameters.get("reward", "reward"),
        tuple(parameters.get("build_options", ())),
    )


def read_task(folder: Path, box: BoxConfig) -> HarborTask:
    """Raises UserError for a task that is broken, or can't run in such a box."""
    where = f"{_FIELD}: {folder}"
    try:
        given = tomllib.loads((folder / "task.toml").read_text("utf-8"))
        text = (folder / "instruction.md").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: {error}; each task has a task.toml and an instruction.md") from error
    environment, tests, agent = (given.get(name, {}) for name in ("environment", "verifier", "agent"))
    if reasons := list(_unsupported(folder, given, environment, tests, box)):
        raise UserError(f"{where}: it {reasons[0]}, which can't run here; name it in parameters.leave_out")
    try:
        return HarborTask(
            folder,
            str(given.get("task", {}).get("name", folder.name)),
            _without_canary(text),
            environment.get("docker_image"),
            dict(_box_settings(environment, box)),
            environment.get("workdir"),
            _name(agent.get("user")),
            agent.get("timeout_sec"),
            float(environment.get("build_timeout_sec", 600.0)),
            environment.get("healthcheck"),
            {name: _resolved(value) for name, value in tests.get("env", {}).items()},
            _name(tests.get("user")),
            float(tests.get("timeout_sec", 600.0)),
        )
    except KeyError as error:
        raise UserError(f"{where}: it needs the environment variable {error.args[0]}; set it") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{where}: task.toml: {error}") from error


def _unsupported(
    folder: Path, given: Mapping[str, Any], environment: Mapping[str, Any], tests: Mapping[str, Any], box: BoxConfig
) -> Iterator[str]:
    files = folder / "environment"
    if given.get("steps"):
        yield "has several steps"
    if any((files / name).exists() for name in _COMPOSE):
        yield "has a compose file"
    if "environment" in tests or tests.get("environment_mode") == "separate" or tests.get("collect"):
        yield "has a verifier with a box of its own"
    if "allowlist" in (one.get("network_mode") for one in (environment, tests, given.get("agent", {}))):
        yield "has an allowlist of hosts"
    is_linux = str(environment.get("os", "linux")).lower() == "linux"
    if environment.get("mcp_servers") or environment.get("tpu") or not is_linux:
        yield "needs MCP servers, a TPU or Windows"
    if environment.get("gpus") and not any("gpu" in option for option in box.options):
        yield "needs GPUs, and environment.box.options has none"
    if not (folder / "tests/test.sh").is_file():
        yield "has no tests/test.sh"
    if box.image is None and (box.kind == "bubblewrap" or not environment.get("docker_image")):
        if box.kind == "bubblewrap":
            yield "has an image, and bubblewrap takes a folder, environment.box.image"
        elif not (files / "Dockerfile").is_file():
            yield "has neither docker_image nor environment/Dockerfile"


def _box_settings(environment: Mapping[str, Any], box: BoxConfig) -> Iterator[tuple[str, Any]]:
    """The task's own, where it has them. Its network is never more than the recipe's."""
    if environment.get("cpus") and box.kind != "bubblewrap":
        yield "cpus", float(environment["cpus"])
    memory = environment.get("memory_mb")
    if memory is None and (old := re.fullmatch(r"([\d.]+)\s*([GM])B?", str(environment.get("memory", "")).upper())):
        memory = float(old[1]) * (1024 if old[2] == "G" else 1)
    if memory is not None:
        yield "memory_mib", int(memory)
    if environment.get("network_mode") == "no-network" or environment.get("allow_internet") is False:
        yield "network", "off"
    yield "env", {name: _resolved(value) for name, value in environment.get("env", {}).items()}


def _resolved(value: object) -> str:
    """With this machine's variables in it. Raises KeyError for one that is missing."""

    def variable(found: re.Match[str]) -> str:
        return os.environ[found[1]] if found[2] is None else os.environ.get(found[1], found[2])

    return _VARIABLE.sub(variable, str(value))


def _name(user: object) -> str | None:
    return None if user is None else str(user)


def _without_canary(text: str) -> str:
    lines = text.split("\n")
    while lines and _CANARY.fullmatch(lines[0].strip()):
        lines.pop(0)
    return "\n".join(lines).strip()
