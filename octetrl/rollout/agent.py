"""One rollout whose turns a program takes: it calls the policy over HTTP, and its calls become the rollout.

    open a key -> the environment's `agent(task, model)` runs and calls -> it returns -> the key is sealed -> rewards

How it ends decides the status. A reward is never made up for a failure of the program or the machine:

    the agent returns, or raises AgentFailed    SCORED       the rewards', from what was said and returned
    its time or its calls are used up           UNFINISHED   the rewards', from the state that is left
    it raises after the context was full        UNFINISHED   the same
    it raises `Failed`                          its status   none, or the rewards' for UNFINISHED
    it raises anything else, or made no call    AGENT_ERROR  none
    a box did not start, or is lost             BOX_ERROR    none (converse.py: finished)
    the engine or the capture failed            GENERATION_ERROR  none
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from octetrl.environments.dialogue import Dialogue, Failed, RequestedCall
from octetrl.environments.programs import AgentFailed, Model
from octetrl.records import GenerationRequest, Rollout, RolloutStatus, SessionEvent, Task, Turn
from octetrl.rollout.converse import ConversationSettings, RolloutPlace, RolloutSteps, finished


@dataclass(frozen=True, slots=True)
class Captured:
    """What a sealed key has captured."""

    turns: tuple[Turn, ...]
    messages: Sequence[dict[str, Any]]  # of the last call, with its answer
    text: str  # of the last answer
    calls: Sequence[Mapping[str, Any]]  # all answers, as of `Rollout.calls`
    metrics: dict[str, float]
    hit_limit: bool = False  # the last reply was an error: the context was full, or the calls were used up
    failure: str | None = None  # of the engine


class OpenKey(Protocol):
    """The capture of one rollout."""

    @property
    def model(self) -> Model: ...

    def seal(self) -> Captured:
        """No later request is answered or recorded."""


class Capture(Protocol):
    """Receives programs' requests, in threads of its own (octetrl/agents/). The collecting thread alone calls it."""

    def open(self, place: RolloutPlace, settings: ConversationSettings, max_calls: int) -> OpenKey: ...

    def requests(self) -> list[GenerationRequest]:
        """New requests for the session, of which each is then accepted or refused. Raises RunFailed if no more can
        arrive."""

    def accepted(self, request_id: str) -> None: ...

    def cancelled(self) -> list[str]:
        """Requests whose key was sealed before they ended."""

    def late_requests(self) -> int:
        """Requests since the last call of this that came after their key was sealed."""

    def take(self, event: SessionEvent) -> bool:
        """Whether the event belongs to an agent's request."""

    def refuse(self, request_id: str, message: str) -> None:
        """The session does not take it."""


def run_agent(
    dialogue: Dialogue, capture: Capture, task: Task, place: RolloutPlace, settings: ConversationSettings
) -> RolloutSteps:
    """Runs the rollout of `task`. Its reward does not yet include `dialogue.scorer`."""
    conversation = dialogue.begin(task, str(place))
    limits = dialogue.limits
    key = capture.open(place, settings, limits.max_turns)
    status, detail, trace = RolloutStatus.SCORED, None, None
    reward: float | None = None
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    captured = None
    try:
        assert dialogue.agent is not None, "the environment has an agent"
        call, model = dialogue.agent, replace(key.model, boxes=conversation.boxes)
        (returned,) = yield (RequestedCall(call, (conversation.task, model), limits.agent_seconds, conversation),)
        captured = key.seal()
        conversation.messages[:] = captured.messages or conversation.messages
        conversation.text, conversation.turns = captured.text, len(captured.calls)
        if captured.failure is not None:
            raise Failed(RolloutStatus.GENERATION_ERROR, captured.failure)
        if isinstance(returned.raised, Failed):
            if not returned.raised.status.has_reward:
                raise returned.raised
            status, detail = returned.raised.status, returned.raised.detail
        elif isinstance(returned.raised, AgentFailed):
            detail = str(returned.raised)
        elif returned.timed_out or (returned.error is not None and captured.hit_limit):
            status, detail = RolloutStatus.UNFINISHED, returned.error
        elif returned.error is not None:
            raise Failed(RolloutStatus.AGENT_ERROR, returned.error, returned.trace)
        if not captured.calls:
            raise Failed(
                RolloutStatus.AGENT_ERROR, f"the agent made no call that was answered ({returned.error or 'ended'})"
            )
        conversation.result = returned.value
        judged = yield from dialogue.judge(conversation)
        reward, components, metrics = judged.reward, judged.components, judged.metrics
    except Failed as failed:
        status, detail, trace = failed.status, failed.detail, failed.trace
    finally:
        captured = captured or key.seal()
    result = conversation.result if isinstance(conversation.result, str) else None
    measured = metrics | captured.metrics
    ended = Rollout(
        task, captured.turns, status, reward,
        detail=detail, trace=trace, components=components, metrics=measured, result=result, calls=captured.calls,
    )  # fmt: skip
    return (yield from finished(dialogue, conversation, ended))
