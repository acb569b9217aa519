"""Runs an environment with several turns: replies to completions, and the reward of the conversation.

    receive   the completion becomes the model's message; its tool calls are read in the format of the chat template
    answer    tool calls by the tools, all of a message at once; anything else by `reply`, if there is one
    judge     @reward and @metric functions, all at once

The author's code is never called here. The functions are generators: they yield the calls to make (`RequestedCall`) and
receive the results (`CallResult`, calls.py). One thread can therefore run hundreds of conversations. A failure of
the environment is raised as `Failed`, with the rollout's status.

    start, reply or finish raises, or gives no reply    ENVIRONMENT_ERROR
    ... gives nothing in turns.reply_timeout_seconds    ENVIRONMENT_TIMEOUT
    a tool raises, or hangs                             TOOL_ERROR, or reported to the model (turns.tool_failure)
    a reward or metric raises, or is no number          REWARD_ERROR
    ... gives nothing in reward_timeout_seconds         REWARD_TIMEOUT

An error of the model is never a failure: a call that can't be read, an unknown tool, wrong arguments, or a ToolError.
It is reported to the model and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Literal, TypeVar

from octetrl.boxes.boxes import Boxes
from octetrl.config.schema import EnvironmentConfig
from octetrl.environments.calls import CallResult, Calls
from octetrl.environments.scoring import OpenScorer, finite_number
from octetrl.environments.tasks import own_task
from octetrl.environments.tools.definition import Toolbox
from octetrl.environments.tools.formats import FORMATS
from octetrl.environments.tools.formats.reading import Call, MalformedCall, ParsedMessage, ToolFormat
from octetrl.environments.tools.messages import to_message, tool_message
from octetrl.environments.turns import Conversation, components_of, replies_of
from octetrl.records import Completion, Reply, RolloutStatus, Task
from octetrl.system.errors import UserError
from octetrl.system.json_file import kind_of

_HOOKS = ("start", "finish", "reply")
MEASURED = ("turns", "tool_calls", "refused_calls", "failed_calls", "score")  # no names for rewards and metrics


@dataclass(frozen=True, slots=True)
class RequestedCall:
    """A call of the environment's code that a dialogue or rollout asks for."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    seconds: float
    conversation: Conversation  # the conversation that the call belongs to


Found = TypeVar("Found")
Asking = Generator[tuple[RequestedCall, ...], tuple[CallResult, ...], Found]  # yields calls, is sent their results


class Failed(Exception):
    """The environment failed a rollout."""

    def __init__(self, status: RolloutStatus, detail: str | None, trace: str | None = None) -> None:
        super().__init__(detail)
        self.status, self.detail, self.trace = status, detail, trace


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Limits of one rollout, from the recipe's `environment` section."""

    max_turns: int = 16
    reply_seconds: float = 60.0
    tool_seconds: float = 30.0
    agent_seconds: float = 600.0
    reward_seconds: float = 10.0
    max_in_flight: int | None = None  # None: all rollouts of a step
    tool_failure: Literal["end", "tell"] = "end"

    @classmethod
    def from_config(cls, config: EnvironmentConfig) -> ConversationLimits:
        turns = config.turns
        return cls(
            max_turns=turns.max_turns,
            reply_seconds=turns.reply_timeout_seconds,
            tool_seconds=turns.tool_timeout_seconds,
            agent_seconds=turns.agent_timeout_seconds,
            reward_seconds=config.reward_timeout_seconds,
            max_in_flight=turns.max_in_flight,
            tool_failure=turns.tool_failure,
        )


@dataclass(frozen=True, slots=True)
class RewardParts:
    reward: float  # the weighted sum, without `score`'s
    components: dict[str, float]
    metrics: dict[str, float]


class Dialogues:
    """What runs the conversations of a step: a `Dialogue`, or one for each environment of several.

    `calls`: runs the environments' code. `scorer`: scores last messages; None: no scorer. `capture`: receives the calls
    of agents (rollout/agent.py); None: there are none. `closes`: called at the end."""

    calls: Calls
    scorer: OpenScorer | None
    capture: Any = None
    closes: Callable[[], None] | None = None

    def of(self, task: Task) -> Dialogue:
        """The dialogue of this task's environment."""
        raise NotImplementedError

    def close(self) -> None:
        self.calls.close()
        if self.closes is not None:
            self.closes()
        if self.scorer is not None:
            self.scorer.close()


class Dialogue(Dialogues):
    """`environment` with its tools, rewards and limits. Raises UserError for an incomplete environment.

    tool_format: how the model writes tool calls; None: it cannot. scorer: scores the last message, instead of the
    environment's own rewards if `only_scorer`, besides them otherwise; None: no scorer.
    boxes: None: the recipe describes none.
    """

    def __init__(
        self,
        environment: Any,
        limits: ConversationLimits,
        *,
        tool_format: ToolFormat | None = None,
        scorer: OpenScorer | None = None,
        only_scorer: bool = False,
        boxes: Boxes | None = None,
    ) -> None:
        self.boxes = boxes or Boxes(None)
        self.limits, self.scorer, self.calls = limits, scorer, Calls()
        self.agent: Callable[..., Any] | None = getattr(environment, "agent", None)
        check_environment(environment, tool_format is not None, has_scorer=scorer is not None)
        self._close: Callable[[], None] | None = getattr(environment, "close", None)
        self._hooks: dict[str, Any] = {name: getattr(environment, name, None) for name in _HOOKS}
        self._toolbox = toolbox_of(environment)
        self._components = components_of(environment)
        if only_scorer:
            self._components = tuple(replace(each, weight=None) for each in self._components)
        self._format = tool_format or FORMATS["hermes"]
        self._schemas = self._toolbox.schemas()

    def of(self, task: Task) -> Dialogue:
        return self

    def close(self) -> None:
        """Also closes the environment, if it has `close`."""
        super().close()
        self.boxes.close()
        if self._close is not None:
            self._close()

    def begin(self, task: Task, seed: str) -> Conversation:
        own = own_task(task)
        return Conversation(own, Random(seed), boxes=self.boxes.of(own))

    def hook(self, name: Literal["start", "finish"], conversation: Conversation) -> Asking[None]:
        """The environment's method of this name, if it has one."""
        if self._hooks[name] is not None:
            yield from self._call_hook(name, conversation)

    def receive(self, conversation: Conversation, completion: Completion) -> ParsedMessage:
        """Add the completion to the conversation, as the model's message."""
        conversation.turns += 1
        conversation.text = completion.text
        if not self._toolbox.tools:
            _messages_of(conversation).append({"role": "assistant", "content": completion.text})
            return ParsedMessage(completion.text)
        parsed = self._format.parse(completion.text, [*self._schemas, *conversation.task.tools])
        _messages_of(conversation).append(to_message(parsed))
        return parsed

    def answer(self, conversation: Conversation, message: ParsedMessage) -> Asking[tuple[Reply, ...]]:
        """The environment's answer to the model's last message; no messages: the conversation is over."""
        if message.calls:
            return (yield from self._call_tools(conversation, message.calls))
        if self._hooks["reply"] is None:
            return ()
        value = yield from self._call_hook("reply", conversation)
        try:
            replies = replies_of(value)
        except TypeError as error:
            raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"TypeError: {error}") from None
        _messages_of(conversation).extend({"role": reply.role, "content": reply.text} for reply in replies)
        return replies

    def judge(self, conversation: Conversation) -> Asking[RewardParts]:
        """Rewards and metrics of a conversation that has ended."""
        values: dict[str, float] = {}
        results: tuple[CallResult, ...] = ()
        if self._components:
            seconds = self.limits.reward_seconds
            results = yield tuple(
                RequestedCall(each.function, (conversation,), seconds, conversation) for each in self._components
            )
        for each, result in zip(self._components, results, strict=True):
            value = _value(result, RolloutStatus.REWARD_ERROR, RolloutStatus.REWARD_TIMEOUT)
            values[each.name] = _reward_number(value, "metric" if each.weight is None else "reward", f"{each.name}: ")
        weights = {each.name: each.weight for each in self._components if each.weight is not None}
        return RewardParts(
            reward=_reward_number(sum(weights[name] * values[name] for name in weights), "weighted reward"),
            components={name: values[name] for name in weights},
            metrics={name: value for name, value in values.items() if name not in weights},
        )

    def counts(self, conversation: Conversation) -> dict[str, float]:
        """Metrics that every rollout has."""
        counts = {"turns": float(conversation.turns)}
        if self._toolbox.tools:
            names = ("tool_calls", "refused_calls", "failed_calls")
            counts |= {name: float(getattr(conversation, name)) for name in names}
        return {**conversation.logged, **counts}

    def _call_hook(self, name: str, conversation: Conversation) -> Asking[Any]:
        function, seconds = self._hooks[name], self.limits.reply_seconds
        (result,) = yield (RequestedCall(function, (conversation,), seconds, conversation),)
        return _value(result, RolloutStatus.ENVIRONMENT_ERROR, RolloutStatus.ENVIRONMENT_TIMEOUT)

    def _call_tools(self, conversation: Conversation, calls: Sequence[Call]) -> Asking[tuple[Reply, ...]]:
        conversation.tool_calls += len(calls)
        answer, seconds = self._toolbox.answer, self.limits.tool_seconds
        results = yield tuple(RequestedCall(answer, (call,), seconds, conversation) for call in calls)
        replies = []
        for call, result in zip(calls, results, strict=True):
            if result.error is None:
                text = result.value.text
                conversation.refused_calls += result.value.refused
            else:
                conversation.failed_calls += 1
                if self.limits.tool_failure == "end" or isinstance(result.raised, Failed):
                    _value(result, RolloutStatus.TOOL_ERROR, RolloutStatus.TOOL_ERROR)
                text = f"Error: {result.error}"
            message = tool_message(call, text)
            if self._format.names_calls and isinstance(call, MalformedCall):
                message["role"] = "user"  # templates refuse a tool's result without a call
            _messages_of(conversation).append(message)
            replies.append(Reply("tool", text))
        return tuple(replies)


def _messages_of(conversation: Conversation) -> list[dict[str, Any]]:
    """Its messages, which the environment may edit. Raises Failed if it left no list."""
    if isinstance(given := conversation.messages, list):
        return given
    reason = f"TypeError: conversation.messages is {kind_of(given)}; it must stay a list of messages"
    raise Failed(RolloutStatus.ENVIRONMENT_ERROR, reason)


def _value(result: CallResult, error: RolloutStatus, timeout: RolloutStatus) -> Any:
    """The value of a call. Raises Failed, with one of the statuses, if it has none."""
    if result.error is None:
        return result.value
    if isinstance(result.raised, Failed):  # an adapter's: it knows the status
        raise result.raised
    raise Failed(timeout if result.timed_out else error, result.error, result.trace)


def _reward_number(value: object, what: str, prefix: str = "") -> float:
    try:
        return finite_number(value, what)
    except (TypeError, ValueError) as error:
        raise Failed(RolloutStatus.REWARD_ERROR, f"{type(error).__name__}: {prefix}{error}") from None


def is_dialogue(environment: object) -> bool:
    """Whether the environment has several turns or decorated rewards. Otherwise it has only tasks and a score."""
    has_more = any(getattr(environment, name, None) is not None for name in ("reply", "start", "finish"))
    return (
        has_more
        or has_agent(environment)
        or bool(getattr(environment, "tools", ()))
        or bool(components_of(environment))
    )


def has_agent(environment: object) -> bool:
    """Whether a program of its own takes the turns (rollout/agent.py)."""
    return getattr(environment, "agent", None) is not None


def toolbox_of(environment: object) -> Toolbox:
    """The environment's tools. Raises UserError for an object that is not a tool."""
    return Toolbox(getattr(environment, "tools", ()))


def check_environment(environment: object, calls_tools: bool, *, has_scorer: bool) -> None:
    """Raises UserError if the environment is incomplete, or if it has tools and the model can't call any."""
    if (tools := toolbox_of(environment).tools) and not calls_tools:
        raise UserError(
            f"environment: it has tools ({', '.join(tools)}), and the tokenizer's chat template has none, or writes"
            f" calls in an unknown format; name it in rollout.tool_format ({', '.join(FORMATS)}), or use a model that"
            " can call tools"
        )
    if has_agent(environment) and (tools or any(getattr(environment, name, None) for name in ("start", "reply"))):
        raise UserError("environment: its agent takes the turns itself; leave out tools, start and reply")
    components = components_of(environment)
    if not has_scorer and all(each.weight is None for each in components):
        raise UserError("environment: nothing in it gives a reward; add a method with @reward, or score(task, text)")
    for each in components:
        if each.name in MEASURED:
            kind = "metric" if each.weight is None else "reward"
            raise UserError(f"environment: '{each.name}' is measured of every rollout; give your {kind} another name")
