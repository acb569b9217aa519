"""Runs environments with the classic interface of `verifiers`: versions 0.1.14 to 0.3, which have `load_environment`.

    environment: {kind: verifiers, dataset: wordle, parameters: {num_train_examples: 500}}

    verifiers                           OctetRL
    get_dataset(), a row's prompt       tasks: a system message, if any, that all rows share, and one of the user
    setup_state                         start
    is_completed, env_response          reply
    ToolEnv.tools                       tools, with arguments checked and mistakes reported as for our tools
    rubric.score_rollout                the reward
    cleanup                             finish

The state is verifiers' own, with trajectory and completion as in its own rollouts. It has no client, so an environment
that calls the policy's endpoint fails with an environment_error. A reward function that raises is a reward_error here;
verifiers' rubric would log the error and score 0.

These are refused when they are loaded: rewards of whole groups, prompts of several messages, tools with hidden
arguments (StatefulToolEnv and its subclasses), and environments that rewrite the conversation between turns
(`get_prompt_messages`), because the policy is trained on exactly the tokens that it sampled. From 0.4 on verifiers runs
its agents itself, over its own endpoint; OctetRL can't step such an environment.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octetrl.environments.tools import Tool
from octetrl.environments.turns import Conversation, reward
from octetrl.records import Task
from octetrl.system.errors import UserError, error_line, type_of

_FIELD = "environment.dataset"
_failures: ContextVar[list[str]] = ContextVar("what a rubric logged as an error")


def verifiers_environment(name: str, parameters: Mapping[str, Any]) -> VerifiersEnvironment:
    """Load the installed environment `name`. Raises UserError if it can't be loaded or is not supported."""
    try:
        import verifiers
    except ImportError:
        raise UserError(
            f"{_FIELD}: '{name}' needs verifiers, which is not installed; pip install 'verifiers>=0.1.14,<0.4'"
        ) from None
    if not hasattr(verifiers, "load_environment"):
        raise UserError(f"{_FIELD}: this verifiers has no load_environment; pip install 'verifiers>=0.1.14,<0.4'")
    try:
        loaded = verifiers.load_environment(name, **parameters)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, SystemExit) as error:
        reason = error_line(error)
        raise UserError(f"{_FIELD}: verifiers can't load '{name}' with {dict(parameters)} ({reason})") from error
    return VerifiersEnvironment(loaded, name)


@dataclass(frozen=True)
class VerifiersEnvironment:
    """A loaded verifiers environment with OctetRL's interface."""

    environment: Any
    name: str = "verifiers"

    def __post_init__(self) -> None:
        import verifiers

        reason = None
        if isinstance(self.environment, verifiers.StatefulToolEnv):
            reason = "its tools have hidden arguments"
        elif not isinstance(self.environment, verifiers.MultiTurnEnv):
            reason = f"it is {type_of(self.environment)}, not a MultiTurnEnv"
        elif type(self.environment).get_prompt_messages is not verifiers.MultiTurnEnv.get_prompt_messages:
            reason = "it rewrites the conversation between turns (get_prompt_messages)"
        elif self.environment.rubric.has_group_rewards:
            reason = "it rewards whole groups"
        if reason is not None:
            raise UserError(f"{_FIELD}: '{self.name}' can't be played here: {reason}; use another environment")
        logger = logging.getLogger("verifiers")
        if not any(isinstance(handler, _Failures) for handler in logger.handlers):
            logger.addHandler(_Failures(logging.ERROR))

    @cached_property
    def tasks(self) -> Sequence[Task]:
        rows = enumerate(self._rows)
        return [Task(f"{self.name}/{at}", self._split(row, at)[1], metadata={"row": dict(row)}) for at, row in rows]

    @cached_property
    def system_prompt(self) -> str | None:
        different = {self._split(row, index)[0] for index, row in enumerate(self._rows)}
        if len(different) > 1:
            number = len(different)
            raise UserError(f"{_FIELD}: '{self.name}' has {number} different system prompts; only one is supported")
        return different.pop() if different else None

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        return tuple(Tool(function) for function in getattr(self.environment, "tools", None) or ())

    async def start(self, conversation: Conversation) -> None:
        state = await self.environment.init_state(conversation.task.metadata["row"], _no_client(), "policy")
        conversation.state.theirs = await self.environment.setup_state(state) or state

    async def reply(self, conversation: Conversation) -> list[dict[str, str]] | None:
        environment, state = self.environment, conversation.state.theirs
        await self._catch_up(conversation)
        if await environment.is_completed(state):
            return None
        so_far = [*state["trajectory"][-1]["prompt"], *state["trajectory"][-1]["completion"]]
        messages = await environment.get_prompt_messages(state)
        if state.get("final_env_response") is not None:
            return None
        return [_plain(message) for message in messages[len(so_far) :]] or None

    @reward
    async def rubric(self, conversation: Conversation) -> float:
        """The weighted sum of the rubric's rewards."""
        state = conversation.state.theirs
        await self._catch_up(conversation)
        await self.environment.render_completion(state)
        failures: list[str] = []
        token = _failures.set(failures)
        try:
            await self.environment.rubric.score_rollout(state)
        finally:
            _failures.reset(token)
        if failures:
            raise RuntimeError(f"the rubric logged: {failures[0]}")
        return float(state["reward"])

    async def finish(self, conversation: Conversation) -> None:
        if hasattr(conversation.state, "theirs"):
            await self.environment.cleanup(conversation.state.theirs)

    async def _catch_up(self, conversation: Conversation) -> None:
        """Add each message of the model, also with tool calls, to verifiers' trajectory as a step."""
        from verifiers.utils.message_utils import normalize_messages

        state = conversation.state.theirs
        theirs = [_theirs(message) for message in conversation.messages[1:]]
        messages = list(normalize_messages(theirs, field_name="conversation"))
        places = [place for place, message in enumerate(messages) if message.role == "assistant"]
        for place in places[len(state["trajectory"]) :]:
            step = {"prompt": [*state["prompt"], *messages[:place]], "completion": [messages[place]]}
            unknown = dict.fromkeys(("response", "tokens", "reward", "advantage"))
            common = {"is_truncated": False, "trajectory_id": state["trajectory_id"], "extras": {}}
            await self.environment.add_trajectory_step(state, step | unknown | common)

    @cached_property
    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return list(self.environment.get_dataset())

    def _split(self, row: Mapping[str, Any], index: int) -> tuple[str | None, str]:
        """The system prompt and the user message of a row."""
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return None, prompt
        messages = [_plain(message) for message in prompt]
        roles = [message["role"] for message in messages]
        if roles not in (["user"], ["system", "user"]):
            raise UserError(
                f"{_FIELD}: '{self.name}', row {index}: its prompt is {', '.join(roles)}; only one message of the user"
                " is supported, and a system prompt before it"
            )
        return (messages[0]["content"] if len(messages) == 2 else None), messages[-1]["content"]


class _Failures(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            _failures.get().append(record.getMessage())
        except LookupError:
            return  # not ours


def _no_client() -> Any:
    """Stands where verifiers requires a client; every use of it fails."""
    from verifiers.clients import Client

    kind: Any = type("NoClient", (Client,), {})
    kind.__abstractmethods__ = frozenset()
    return kind.__new__(kind)


def _theirs(message: Mapping[str, Any]) -> dict[str, Any]:
    """Convert one of our messages, with its tool calls, to verifiers' form."""
    if "tool_calls" not in message:
        return {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
    calls = [
        {"id": call["id"], "name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}
        for call in message["tool_calls"]
    ]
    return {"role": message["role"], "content": message["content"], "tool_calls": calls}


def _plain(message: Any) -> dict[str, str]:
    """Role and text of a verifiers message, which is a dictionary or an object."""
    message = message if isinstance(message, Mapping) else vars(message)
    role, content = message["role"], message["content"]
    if not isinstance(content, str):
        parts = [part if isinstance(part, Mapping) else vars(part) for part in content or ()]
        content = "".join(str(part.get("text", "")) for part in parts)
    return {"role": str(role), "content": content}
