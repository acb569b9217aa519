"""The request for the answers to a task, or of the first turn of its conversations."""

from __future__ import annotations

from dataclasses import dataclass

from octetrl.records import GenerationRequest, Rollout, RolloutStatus, Task
from octetrl.rollout.collection_settings import CollectionSettings
from octetrl.rollout.converse import first_request, seed_of
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.system.text import TextTooLong


@dataclass(frozen=True, slots=True)
class TooLong:
    """A prompt that gets no answer, and the reason."""

    detail: str


def request_of(
    task: Task, place: int, collection: CollectionSettings, lengths: ExpectedLengths
) -> GenerationRequest | TooLong:
    """The request of the task at this place of the step, for all its siblings."""
    limit = collection.max_prompt_tokens
    try:
        prompt_token_ids = collection.chat.of(task).prompt_tokens(task.prompt, limit)
    except TextTooLong as error:
        return TooLong(f"the prompt has {error} (rollout.max_prompt_tokens)")
    if len(prompt_token_ids) > limit:
        return TooLong(f"the prompt has {len(prompt_token_ids)} tokens, rollout.max_prompt_tokens is {limit}")
    return GenerationRequest(
        id=first_request(place, task),
        prompt_token_ids=prompt_token_ids,
        sampling=collection.sampling,
        num_siblings=collection.group_size,
        seed=seed_of(collection.seed, collection.step, place),
        expected_tokens=lengths.estimate(task, len(prompt_token_ids)),
        answer_limits=() if collection.answer_limits is None else collection.answer_limits(task),
    )


def without_answers(task: Task, prompt: TooLong, collection: CollectionSettings) -> tuple[Rollout, ...]:
    """The rollouts of a group whose prompt was too long."""
    status = RolloutStatus.PROMPT_TOO_LONG
    one = Rollout(task=task, turns=(), status=status, reward=None, detail=prompt.detail)
    return (one,) * collection.group_size
