"""One rollout of several turns, from its first completion to its reward.

    completion -> message -> replies of the environment -> their tokens behind it -> the next request -> completion ...

A generator, which yields what it waits for, a GenerationRequest or calls of the environment's code (`Do`), and is sent
what came of it. So a rollout reads from top to bottom, while one thread leads hundreds of them (rollout/drive.py).

It ends when the environment has nothing more to say; when an answer is cut at max_new_tokens (OVERLONG), for a model
can't be answered in the middle of its words; when its turns or the context run out (TRUNCATED); and when the
environment fails it. What was drawn until then is kept in each case.

What is drawn depends on the weights, the task, and (run seed, step, place, sibling, turn). It does not depend on when
the environment answered.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from octetrl.config.text import TextTooLong
from octetrl.environments.scoring import Score
from octetrl.environments.turns.conversation import Conversation
from octetrl.environments.turns.dialogue import Dialogue, Do, Failed
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
from octetrl.rollout.chat_tokens import ChatTokens, ReplyError

Wanted = GenerationRequest | tuple[Do, ...]
RolloutSteps = Generator[Wanted, Any, Rollout]  # sent a Completion, or a Called for each Do


@dataclass(frozen=True, slots=True)
class Place:
    """Which rollout it is: all that its luck depends on."""

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
    """How completions are drawn and put into tokens."""

    chat: ChatTokens
    sampling: SamplingParams
    context_length: int


def seed_of(*parts: int) -> int:
    """A request's seed, from 0 to 2^63 - 1."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


def converse(
    dialogue: Dialogue,
    task: Task,
    prompt_token_ids: tuple[int, ...],
    completion: Completion,
    place: Place,
    speaking: ConversationSettings,
) -> RolloutSteps:
    """The rollout of `task` whose first completion has been drawn. Its reward lacks that of `dialogue.scorer`."""
    conversation = dialogue.begin(task, str(place))
    turns: list[Turn] = []
    reward: float | None = None
    components: dict[str, float] = {}
    metrics: dict[str, float] = {}
    detail = trace = None
    try:
        status = yield from _speak(dialogue, conversation, turns, prompt_token_ids, completion, place, speaking)
        judged = yield from dialogue.judge(conversation)
        reward, components, metrics = judged.reward, judged.components, judged.metrics
    except Failed as failed:
        status, detail, trace = failed.status, failed.detail, failed.trace
    try:
        yield from dialogue.hook("finish", conversation)
    except Failed as failed:
        if status.has_reward:  # what went wrong first is what is told
            status, detail, trace, reward = failed.status, failed.detail, failed.trace, None
    return Rollout(
        task=task,
        turns=tuple(turns),
        status=status,
        reward=reward,
        detail=detail,
        trace=trace,
        answered=conversation.answered,
        components=components,
        metrics=metrics | dialogue.counts(conversation),
    )


def _speak(
    dialogue: Dialogue,
    conversation: Conversation,
    turns: list[Turn],
    prompt_token_ids: tuple[int, ...],
    completion: Completion,
    place: Place,
    speaking: ConversationSettings,
) -> Generator[Wanted, Any, RolloutStatus]:
    """Turn by turn, put into `turns`, to the end."""
    chat, sampling = speaking.chat, speaking.sampling
    token_ids: tuple[int, ...] = ()
    new = prompt_token_ids
    while True:
        turns.append(Turn(new, completion))
        token_ids += (*new, *completion.token_ids)
        if not conversation.turns:
            yield from dialogue.hook("start", conversation)
        heard = dialogue.hear(conversation, completion)
        if completion.finish_reason is FinishReason.LENGTH:
            has_all = len(completion.token_ids) >= sampling.max_new_tokens
            return RolloutStatus.OVERLONG if has_all else RolloutStatus.TRUNCATED
        replies = yield from dialogue.answer(conversation, heard)
        turns[-1] = replace(turns[-1], replies=replies)
        if not replies:
            return RolloutStatus.SCORED
        try:
            new = chat.reply_tokens(replies, completion.token_ids)
        except ReplyError as error:
            raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"ReplyError: {error}") from error
        except TextTooLong:  # for the context, by its length alone
            return RolloutStatus.TRUNCATED
        prompt = token_ids + new
        if len(turns) == dialogue.limits.max_turns or len(prompt) >= speaking.context_length:
            return RolloutStatus.TRUNCATED
        turn = len(turns)
        name = f"{place.place}.{place.sibling}.{turn}:{conversation.task.id}"
        completion = yield GenerationRequest(name, prompt, sampling, seed=place.seed(turn))


def with_score(rollout: Rollout, score: Score) -> Rollout:
    """`rollout` with what its last message was scored on top."""
    if rollout.reward is None:
        return rollout
    if score.reward is None:
        return replace(rollout, status=score.status, reward=None, detail=score.detail, trace=score.trace)
    components = {"score": score.reward, **rollout.components} if rollout.components else {}
    reward, answered = rollout.reward + score.reward, score.answered or rollout.answered
    return replace(rollout, reward=reward, components=components, answered=answered)
