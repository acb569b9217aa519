"""Runs environments behind OpenEnv's WebSocket protocol as conversations: a server, and a connection for each rollout.

    environment: {kind: openenv, dataset: "ws://localhost:8000"}

    prompt        {instructions}, then the observation of reset(seed); task i has seed + i
    message       the model's action
    reply         the observation of step(action); an action that the server refuses is reported to the model
    reward        the sum of the steps' rewards, when the episode is done, or out of turns

The fields of an action come from the server's `/schema`. Without `tool` a message (after `environment.answer_marker`)
is the value of `action`, or of the only field, by its type in the schema; or else a JSON object of all fields. With
`tool: true` the model calls a tool `step`, whose arguments are the fields; its first message without a call ends the
rollout. An observation is shown as `observation`, a field of it, else as its only field, if that is a text, else as
JSON; without its metadata and fields that are null.

    ->  {"type": "reset", "data": {"seed": 7}}      {"type": "step", "data": {ACTION}}      {"type": "close"}
    <-  {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
    <-  {"type": "error", "data": {"message": ..., "code": VALIDATION_ERROR or another}}

A connection that is lost, and any error but of an action's form, is an environment_error. A server that allows fewer
sessions than rollouts need is asked again for some seconds; `environment.turns.max_in_flight` should be its limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from octetrl.environments.dialogue import Failed
from octetrl.environments.reset_step import Episodes, RefusedAction
from octetrl.environments.tools.definition import Tool, ToolError
from octetrl.environments.turns import Conversation, reward
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError, error_line
from octetrl.system.names import is_address

_FIELD = "environment.dataset"
_PARAMETERS = ("instructions", "action", "observation", "tool", "reset")
_MOST_BYTES = 64 << 20  # of a message
_ANSWER_SECONDS = 600.0  # environment.turns.reply_timeout_seconds ends a rollout before
_FULL_SECONDS = 20.0  # for a place at a server that is full


class Connection(Protocol):
    """A session at the server."""

    def send(self, message: str, /) -> None: ...

    def recv(self, timeout: float | None = None) -> Any: ...

    def close(self) -> None: ...


@dataclass(eq=False, kw_only=True)
class OpenEnvironment(Episodes):
    """connect: opens a session. schema: JSON schema of an action. The other fields are the recipe's."""

    connect: Callable[[], Connection]
    schema: Mapping[str, Any]
    instructions: str = "Act in this environment. Answer each message with your next action."
    action: str | None = None
    observation: str | None = None
    tool: bool = False
    reset: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        fields = [name for name in self.schema.get("properties", {}) if name != "metadata"]
        if self.action is not None and self.action not in fields:
            raise UserError(f"environment.parameters.action: an action has no '{self.action}'; it has {fields}")
        self._only = self.action or (fields[0] if len(fields) == 1 else None)

    @property
    def tools(self) -> tuple[Tool, ...]:
        return (_StepTool(self),) if self.tool else ()

    def start(self, conversation: Conversation) -> None:
        conversation.state.is_scored = conversation.state.is_done = False
        super().start(conversation)

    def reply(self, conversation: Conversation) -> str | None:
        return None if self.tool else super().reply(conversation)  # a message without a call

    def act(self, state: Any, said: str) -> str | None:
        return self.step(state, self._action(said))

    def close_episode(self, episode: Connection) -> None:
        _close(episode)

    @reward
    def gained(self, conversation: Conversation) -> float:
        """The sum of the steps' rewards."""
        state = conversation.state
        if state.is_done and not state.is_scored:
            raise RuntimeError("the episode is done, and no step has given a reward")
        return state.total

    def begin(self, seed: int) -> tuple[Connection, str]:
        """A session after its reset, and what it shows. A server that is full is asked again."""
        until = time.monotonic() + _FULL_SECONDS
        while True:
            connection = self.connect()
            try:
                answer = _ask(connection, "reset", {"seed": seed, **self.reset})
                return connection, self._show(answer["observation"])
            except _Full as error:
                _close(connection)
                if time.monotonic() > until:
                    raise RuntimeError(f"{error}; lower environment.turns.max_in_flight to its limit") from None
                time.sleep(0.1)
            except BaseException:
                _close(connection)
                raise

    def step(self, state: Any, action: Mapping[str, Any]) -> str | None:
        """What the step shows; None: the episode is done. Raises RefusedAction."""
        answer = _ask(state.episode, "step", action)
        state.steps += 1
        if answer.get("reward") is not None:
            state.total, state.is_scored = state.total + float(answer["reward"]), True
        state.is_done = bool(answer.get("done"))
        return None if state.is_done else self._show(answer["observation"])

    def _action(self, said: str) -> Mapping[str, Any]:
        """Raises RefusedAction."""
        if self._only is None:
            try:
                value = json.loads(said)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                raise RefusedAction(f"An action is a JSON object with {', '.join(self.schema.get('properties', {}))}.")
            return value
        if self.schema["properties"][self._only].get("type") == "string":
            return {self._only: said}
        try:
            return {self._only: json.loads(said)}
        except (ValueError, RecursionError):
            return {self._only: said}  # the server says what is wrong with it

    def _show(self, observation: Any) -> str:
        shown = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
        if self.observation is not None:
            value: Any = observation
            for key in self.observation.split("."):
                value = value.get(key) if isinstance(value, Mapping) else None
        else:
            value = next(iter(shown.values())) if len(shown) == 1 else shown
        return value if isinstance(value, str) else json.dumps(value if value is not None else shown)


class _StepTool(Tool):
    """The action of a step, with the server's schema; the server checks the arguments."""

    def __init__(self, environment: OpenEnvironment) -> None:
        schema = environment.schema
        properties = {name: value for name, value in schema.get("properties", {}).items() if name != "metadata"}
        self.name, self.description, self._environment = "step", "Take the next action.", environment
        self.function = environment.step
        self.parameters = {**schema, "type": "object", "properties": properties}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        conversation = Conversation.current()
        if conversation.state.is_done:
            raise ToolError("the episode is done; answer without a call")
        try:
            shown = await asyncio.to_thread(self._environment.step, conversation.state, arguments)
        except RefusedAction as refusal:
            raise ToolError(str(refusal)) from None
        return "The episode is done." if shown is None else shown


class _Full(Exception):
    """The server has no place for another session."""


def _ask(connection: Connection, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """The data of the answer. Raises RefusedAction for an action of the wrong form, Failed for anything else."""
    try:
        connection.send(json.dumps({"type": kind, "data": data}))
        answer = json.loads(connection.recv(_ANSWER_SECONDS))
        given = answer["data"]
        if answer["type"] == "observation" and isinstance(given["observation"], dict):
            return given
        code, message = given.get("code"), given.get("message")
    except Exception as error:  # foreign: the connection's, and what the server sends
        raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"{kind}: {error_line(error)}") from error
    if code == "VALIDATION_ERROR" and kind == "step":
        details = [f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg')}" for one in given.get("errors") or ()]
        raise RefusedAction(f"That is no action here: {'; '.join(details) or message}")
    if code == "CAPACITY_REACHED":
        raise _Full(f"the server is full: {message}")
    raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"{kind}: {code}: {message}")


def _close(connection: Connection) -> None:
    connection.send(json.dumps({"type": "close"}))
    connection.close()


class _Session:
    """A connection of websockets. A server that refuses a session says why before it closes it, so only reading
    fails."""

    def __init__(self, address: str) -> None:
        from websockets.sync.client import connect

        self._socket = connect(address, max_size=_MOST_BYTES, open_timeout=30.0).__enter__()

    def send(self, message: str) -> None:
        from websockets.exceptions import ConnectionClosed

        with contextlib.suppress(ConnectionClosed):
            self._socket.send(message)

    def recv(self, timeout: float | None = None) -> str | bytes:
        return self._socket.recv(timeout)

    def close(self) -> None:
        self._socket.close()


def openenv_environment(
    address: str, parameters: Mapping[str, Any], *, size: int, seed: int, action_marker: str | None
) -> OpenEnvironment:
    """`address` of the server, such as ws://localhost:8000. Raises UserError if there is none."""
    if unknown := set(parameters) - set(_PARAMETERS):
        names = ", ".join(sorted(unknown))
        raise UserError(f"environment.parameters: openenv has no '{names}'; it has {', '.join(_PARAMETERS)}")
    if importlib.util.find_spec("websockets") is None:
        raise UserError(f"{_FIELD}: OpenEnv needs websockets; pip install 'octetrl[openenv]'")
    web = "http" + address.removeprefix("ws").removeprefix("http") if address.startswith(("ws", "http")) else address
    web = web.rstrip("/").removesuffix("/ws")
    if not is_address(web):
        raise UserError(f"{_FIELD}: '{address}' is not the address of a server; give one such as ws://localhost:8000")
    try:
        with urllib.request.urlopen(f"{web}/schema", timeout=30.0) as response:
            schema = json.load(response)["action"]
        connect = partial(_Session, f"ws{web.removeprefix('http')}/ws")
        environment = OpenEnvironment(
            connect=connect, schema=schema, size=size, seed=seed, action_marker=action_marker, **parameters
        )
        _ = environment.tasks[0]
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, Failed) as error:
        raise UserError(f"{_FIELD}: '{address}' does not answer as an OpenEnv server ({error_line(error)})") from error
    return environment
