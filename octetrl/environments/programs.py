"""Agents: the policy as a program calls it, and a command of the recipe as an agent for the tasks of any file.

    environment: {kind: math, dataset: gsm8k.jsonl, agent: {command: [my-agent, --task, "{prompt}"]}}

The command runs once for each rollout, in an empty folder of its own, with OPENAI_BASE_URL, OPENAI_API_KEY,
ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN set. What it prints is its result, which the environment's scorer reads. An
exit code other than 0 is a failure of the agent, not of the policy: the rollout has no reward.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from octetrl.boxes.box import Box
from octetrl.boxes.boxes import RolloutBoxes
from octetrl.config.environment import PLACEHOLDERS, AgentConfig
from octetrl.environments.scoring import Scorer
from octetrl.process.command import CommandResult, run_command
from octetrl.records import Task

POLICY = "policy"  # the model's name
_UNTIL_CANCELLED = 2e6  # seconds: environment.turns.agent_timeout_seconds ends it before
_SHOWN = 300  # letters of what a failed command has said


class AgentFailed(Exception):
    """Raised by an environment's `agent`: the policy has failed the task. The rollout is scored as it stands."""


@dataclass(frozen=True, slots=True)
class Model:
    """The policy as an agent calls it, by OpenAI's or Anthropic's interface. The key belongs to one rollout."""

    base_url: str  # with /v1
    api_key: str = field(repr=False)
    name: str = POLICY
    sessions: Callable[[str, bool], None] | None = field(default=None, repr=False, compare=False)
    boxes: RolloutBoxes = field(default_factory=RolloutBoxes, repr=False, compare=False)

    def open_session(self, session: str, *, trains: bool = True) -> None:
        """Also take requests with this `X-Session-ID` and without a known key, until the rollout ends: for a library
        whose rollouts share one client. Each session is a random text of its own. trains: False: these calls are
        answered and not trained on."""
        assert self.sessions is not None, "a model of a running rollout"
        self.sessions(session, trains)

    @property
    def variables(self) -> dict[str, str]:
        """Variables by which clients and programs find the policy."""
        address = self.base_url.removesuffix("/v1")
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": self.api_key,
            "ANTHROPIC_AUTH_TOKEN": self.api_key,
        }

    async def run(
        self,
        command: Sequence[str],
        *,
        cwd: str | None = ".",
        env: Mapping[str, str] = MappingProxyType({}),
        stdin: str = "",
        seconds: float = 3600.0,
    ) -> CommandResult:
        """Run a command that calls the policy. Everything that it starts ends with it, with the rollout or the run.
        cwd: None: an empty folder of its own, which is removed then."""
        cancelled = threading.Event()
        given = {**self.variables, **env}
        call = partial(run_command, command, cwd=cwd, env=given, stdin=stdin, seconds=seconds, cancelled=cancelled)
        try:
            return await asyncio.to_thread(call)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def box(self, *, calls_policy: bool = False, **settings: Any) -> Box:
        """Start a box by the recipe's `environment.box`, with these of its settings changed. It ends after the rewards,
        or by `close`. calls_policy: programs in it reach `base_url`. Raises BoxError, UserError."""
        port = urlsplit(self.base_url).port if calls_policy else None
        return await self.boxes.open(policy_port=port, **settings)


@dataclass(frozen=True)
class CommandEnvironment:
    """Tasks whose answers a command gives, in a box if the recipe has one. score: of what it prints."""

    tasks: Sequence[Task]
    score: Scorer
    config: AgentConfig
    eval_tasks: Sequence[Task] | Mapping[str, Sequence[Task]] | None = None

    async def agent(self, task: Task, model: Model) -> str:
        command = filled_command(self.config, task, model)
        stdin = task.text if self.config.prompt_on_stdin else ""
        if model.boxes.config is None:
            result = await model.run(command, cwd=None, env=self.config.env, stdin=stdin, seconds=_UNTIL_CANCELLED)
        else:
            box, env = await model.box(calls_policy=True), {**model.variables, **self.config.env}
            result = await box.run(command, env=env, stdin=stdin, seconds=_UNTIL_CANCELLED)
        return check_exit(command[0], result)


def check_exit(name: str, result: CommandResult) -> str:
    """What an agent's command has printed. Raises RuntimeError if it has failed."""
    if result.code != 0:
        said = " ".join((result.stderr or result.stdout)[-_SHOWN:].split())
        ended = result.stopped or f"exit code {result.code}"
        raise RuntimeError(f"{name}: {ended}{f': {said}' if said else ''}")
    return result.stdout.strip()


def filled_command(config: AgentConfig, task: Task, model: Model) -> list[str]:
    """The command with each placeholder replaced, in one pass: a prompt may hold such a name itself."""
    values = dict(zip(PLACEHOLDERS, (task.text, task.id, model.name), strict=True))
    pattern = r"\{(" + "|".join(PLACEHOLDERS) + r")\}"
    return [re.sub(pattern, lambda found: values[found[1]], word) for word in config.command]
