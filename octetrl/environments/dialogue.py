"""Runs an environment with several turns: replies to completions, and the reward of the conversation.

    receive   the completion becomes the model's message; its tool calls are read by the family of the chat template
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

from octetrl.config.schema import EnvironmentConfig
from octetrl.environments.calls import CallResult, Calls
from octetrl.environments.scoring import OpenScorer, finite_number
from octetrl.environments.tasks import own_task
from octetrl.environments.tools.definition import Toolbox
from octetrl.environments.tools.messages import Call, Family, ParsedMessage, parse_message, to_message, tool_message
from octetrl.environments.turns import Conversation, components_of, replies_of
from octetrl.records import Completion, Reply, RolloutStatus, Task
from octetrl.system.errors import UserError

_HOOKS = ("start", "finish", "reply")


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

    `calls`: runs the environments' code. `scorer`: scores last messages; None: no scorer."""

    calls: Calls
    scorer: OpenScorer | None

    def of(self, task: Task) -> Dialogue:
        """The dialogue of this task's environment."""
        raise NotImplementedError

    def close(self) -> None:
        self.calls.close()
        if self.scorer is not None:
            self.scorer.close()


class Dialogue(Dialogues):
    """`environment` with its tools, rewards and limits. Raises UserError for an incomplete environment.

    family: how the model writes tool calls; None: it cannot. scorer: scores the last message, instead of the
    environment's own rewards if `only_scorer`, besides them otherwise; None: no scorer.
    """

    def __init__(
        self,
        environment: Any,
        limits: ConversationLimits,
        *,
        family: Family | None = None,
        scorer: OpenScorer | None = None,
        only_scorer: bool = False,
    ) -> None:
        self.limits, self.scorer, self.calls = limits, scorer, Calls()
        check_environment(environment, family, has_scorer=scorer is not None)
        self._hooks: dict[str, Any] = {name: getattr(environment, name, None) for name in _HOOKS}
        self._toolbox = toolbox_of(environment)
        self._components = components_of(environment)
        if only_scorer:
            self._components = tuple(replace(each, weight=None) for each in self._components)
        self._family: Family = family or "hermes"

    def of(self, task: Task) -> Dialogue:
        return self

    def begin(self, task: Task, seed: str) -> Conversation:
        return Conversation(own_task(task), Random(seed))

    def hook(self, name: Literal["start", "finish"], conversation: Conversation) -> Asking[None]:
        """The environment's method of this name, if it has one."""
        if self._hooks[name] is not None:
            yield from self._call_hook(name, conversation)

    def receive(self, conversation: Conversation, completion: Completion) -> ParsedMessage:
        """Add the completion to the conversation, as the model's message."""
        conversation.turns += 1
        conversation.text = completion.text
        if not self._toolbox.tools:
            conversation.messages.append({"role": "assistant", "content": completion.text})
            return ParsedMessage(completion.text)
        parsed = parse_message(completion.text, self._family)
        conversation.messages.append(to_message(parsed))
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
        conversation.messages += [{"role": reply.role, "content": reply.text} for reply in replies]
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
                if self.limits.tool_failure == "end":
                    raise Failed(RolloutStatus.TOOL_ERROR, result.error, result.trace)
                text = f"Error: {result.error}"
            conversation.messages.append(tool_message(call, text))
            replies.append(Reply("tool", text))
        return tuple(replies)


def _value(result: CallResult, error: RolloutStatus, timeout: RolloutStatus) -> Any:
    """The value of a call. Raises Failed, with one of the statuses, if it has none."""
    if result.error is None:
        return result.value
    raise Failed(timeout if result.timed_out else error, result.error, result.trace)


def _reward_number(value: object, what: str, prefix: str = "") -> float:
    try:
        return finite_number(value, what)
    except (TypeError, ValueError) as error:
        raise Failed(RolloutStatus.REWARD_ERROR, f"{type(error).__name__}: {prefix}{error}") from None


def is_dialogue(environment: object) -> bool:
    """Whether the environment has several turns or decorated rewards. Otherwise it has only tasks and a score."""
    has_more = any(getattr(environment, name, None) is not None for name in ("reply", "start", "finish"))
    return has_more or bool(getattr(environment, "tools", ())) or bool(components_of(environment))


def toolbox_of(environment: object) -> Toolbox:
    """The environment's tools. Raises UserError for an object that is not a tool."""
    return Toolbox(getattr(environment, "tools", ()))


def check_environment(environment: object, family: Family | None, *, has_scorer: bool) -> None:
    """Raises UserError if the environment is incomplete, or if a model of this family can't call its tools."""
    if (tools := toolbox_of(environment).tools) and family is None:
        raise UserError(
            f"environment: it has tools ({', '.join(tools)}), and the tokenizer's chat template has none, or writes"
            " calls in a way that is not known here (Hermes/Qwen and Llama 3 are); use a model that has, or no tools"
        )
    components = components_of(environment)
    if not has_scorer and all(each.weight is None for each in components):
        raise UserError("environment: nothing in it gives a reward; add a method with @reward, or score(task, text)")
    for each in components:
        if each.name in ("turns", "tool_calls", "refused_calls", "failed_calls", "score"):
            kind = "metric" if each.weight is None else "reward"
            raise UserError(f"environment: '{each.name}' is measured of every rollout; give your {kind} another name")
