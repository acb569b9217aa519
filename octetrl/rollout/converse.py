"""One rollout of several turns, from its first completion to its reward.

    completion -> message -> replies of the environment -> the next prompt (history.py) -> its request -> completion ...

The rollout is a generator. It yields a `GenerationRequest`, or calls of the environment's code (`RequestedCall`), and
receives the results. Its code therefore reads from top to bottom, while one thread runs hundreds of rollouts
(rollout/drive.py).

It ends in one of four ways. The environment returns no reply. An answer reaches max_new_tokens (TRUNCATED); the
environment cannot reply to half an answer. Turns or context run out (UNFINISHED). The environment fails. In each case
the tokens sampled so far are kept.

The sampled tokens depend on the weights, the task, and (run seed, step, place, sibling, turn). They do not depend on
the time at which the environment answered.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from octetrl.environments.dialogue import Dialogue, Failed, RequestedCall
from octetrl.environments.scoring import Score
from octetrl.environments.turns import Conversation
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    Rollout,
    RolloutStatus,
    SamplingParams,
    Task,
    Turn,
)
from octetrl.rollout.backend import first_request, seed_of
from octetrl.rollout.chat_tokens import ChatTokens, ReplyError
from octetrl.rollout.history import History, RecordedHistory, TemplateHistory
from octetrl.system.text import TextTooLong

_CLOSE_SECONDS = 60.0  # for the boxes of a rollout
Wanted = GenerationRequest | tuple[RequestedCall, ...]
RolloutSteps = Generator[Wanted, Any, Rollout]  # sent a Completion, or a CallResult for each RequestedCall


@dataclass(frozen=True, slots=True)
class RolloutPlace:
    """Identifies a rollout within a run. Its random numbers depend only on this."""

    run_seed: int
    step: int
    place: int  # of its task in the step
    sibling: int

    def seed(self, turn: int) -> int:
        return seed_of(self.run_seed, self.step, self.place, self.sibling, turn)

    def __str__(self) -> str:
        return f"{self.run_seed}/{self.step}/{self.place}/{self.sibling}"


@dataclass(frozen=True, slots=True)
class ConversationSettings:
    """Settings for sampling and tokenizing a conversation."""

    chat: ChatTokens
    sampling: SamplingParams
    context_length: int
    history: History = "recorded"
    own_temperatures: bool = True  # as in `CollectionSettings`

    def of(self, task: Task) -> ConversationSettings:
        """With the task's own tools, variables of the template, and temperature."""
        sampling = sampling_of(task, self.sampling) if self.own_temperatures else self.sampling
        return replace(self, chat=self.chat.of(task), sampling=sampling)


def sampling_of(task: Task, sampling: SamplingParams) -> SamplingParams:
    """`sampling` with the task's own temperature, if it has one."""
    return sampling if task.temperature is None else replace(sampling, temperature=task.temperature)


def converse(
    dialogue: Dialogue,
    task: Task,
    prompt_token_ids: tuple[int, ...],
    completion: Completion,
    place: RolloutPlace,
    settings: ConversationSettings,
) -> RolloutSteps:
    """Runs the rollout of `task` from its first completion on. Its reward does not yet include `dialogue.scorer`."""
    conversation = dialogue.begin(task, str(place))
    turns: list[Turn] = []
    reward: float | None = None
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    detail = trace = None
    settings = settings.of(task)
    first = Turn(prompt_token_ids, completion), first_request(place.place, task)
    try:
        status = yield from _take_turns(dialogue, conversation, turns, first, place, settings)
        judged = yield from dialogue.judge(conversation)
        reward, components, metrics = judged.reward, judged.components, judged.metrics
    except Failed as failed:
        status, detail, trace = failed.status, failed.detail, failed.trace
    ended = Rollout(
        task, tuple(turns), status, reward, detail=detail, trace=trace, components=components, metrics=metrics
    )
    return (yield from finished(dialogue, conversation, ended))


def finished(dialogue: Dialogue, conversation: Conversation, rollout: Rollout) -> RolloutSteps:
    """Runs the environment's `finish`, ends the rollout's boxes, and adds to it what the conversation has counted by
    then."""
    try:
        yield from dialogue.hook("finish", conversation)
    except Failed as failed:
        if rollout.status.has_reward:  # the first failure is reported
            rollout = replace(rollout, status=failed.status, detail=failed.detail, trace=failed.trace, reward=None)
    if conversation.boxes.is_used:
        lost = conversation.boxes.lost()
        yield (RequestedCall(conversation.boxes.close, (), _CLOSE_SECONDS, conversation),)
        if lost is not None:  # whatever its code made of it
            rollout = replace(rollout, status=RolloutStatus.BOX_ERROR, detail=lost, reward=None)
    metrics = {**rollout.metrics, **dialogue.counts(conversation)}
    return replace(rollout, answered=conversation.answered, metrics=metrics)


def _take_turns(
    dialogue: Dialogue,
    conversation: Conversation,
    turns: list[Turn],
    first: tuple[Turn, str],
    place: RolloutPlace,
    settings: ConversationSettings,
) -> Generator[Wanted, Any, RolloutStatus]:
    """Runs the conversation to its end and appends each turn to `turns`. `first`: the first one, and its request."""
    chat, sampling = settings.chat, settings.sampling
    is_rendered = settings.history == "template"
    history = TemplateHistory(chat, conversation.task.prompt) if is_rendered else RecordedHistory(chat)
    token_ids: tuple[int, ...] = ()
    new, completion, is_fork = first[0].prompt_token_ids, first[0].completion, False
    drawn = (first[1], place.sibling)
    while True:
        turns.append(Turn(new, completion, is_fork=is_fork))
        history.add(new, completion, is_fork=is_fork)
        token_ids = (*(() if is_fork else token_ids), *new, *completion.token_ids)
        if not conversation.turns:
            yield from dialogue.hook("start", conversation)
        if completion.finish_reason is FinishReason.FAILED:
            raise Failed(RolloutStatus.GENERATION_ERROR, completion.detail or "no answer")
        completion = chat.with_calls(completion, sampling.stop)
        turns[-1] = replace(turns[-1], completion=completion)
        message = dialogue.receive(conversation, completion)
        if completion.finish_reason is FinishReason.LENGTH:
            has_all = len(completion.token_ids) >= sampling.max_new_tokens
            return RolloutStatus.TRUNCATED if has_all else RolloutStatus.UNFINISHED
        replies = yield from dialogue.answer(conversation, message)
        turns[-1] = replace(turns[-1], replies=replies)
        if not replies:
            return RolloutStatus.SCORED
        try:
            new, is_fork = history.next_prompt(conversation.messages, replies, completion, message.calls)
        except ReplyError as error:
            raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"ReplyError: {error}") from error
        except TextTooLong:  # too long for the context, by its length alone
            return RolloutStatus.UNFINISHED
        prompt = new if is_fork else token_ids + new
        if len(turns) == dialogue.limits.max_turns or len(prompt) >= settings.context_length:
            return RolloutStatus.UNFINISHED
        turn = len(turns)
        name = f"{place.place}.{place.sibling}.{turn}:{conversation.task.id}"
        completion = yield GenerationRequest(name, prompt, sampling, seed=place.seed(turn), continues=drawn)
        drawn = (name, 0)


def with_score(rollout: Rollout, score: Score) -> Rollout:
    """`rollout` with the score of its last message added to its reward."""
    if rollout.reward is None:
        return rollout
    if score.reward is None:
        return replace(rollout, status=score.status, reward=None, detail=score.detail, trace=score.trace)
    components = {"score": score.reward, **rollout.components} if rollout.components else {}
    components |= score.components
    metrics = {**rollout.metrics, **score.metrics}
    reward, answered = rollout.reward + score.reward, score.answered or rollout.answered
    detail = score.detail or rollout.detail
    return replace(rollout, reward=reward, components=components, answered=answered, detail=detail, metrics=metrics)
