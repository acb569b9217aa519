"""Collects the rollouts of an environment with one turn: samples the answers, and scores each as soon as it ends.

The lengths of answers are ragged. While the longest are still being sampled, the others already have their scores.
"""

from __future__ import annotations

from collections.abc import Sequence

from octetrl.environments.scoring import Score
from octetrl.environments.scoring_round import begin_round
from octetrl.records import Completion, FinishReason, GenerationRequest, Rollout, RolloutStatus, Task, Turn
from octetrl.rollout.collection_settings import CollectionSettings, Generates, Scores


def collect_answers(
    requests: Sequence[tuple[int, Task, GenerationRequest]],
    scorer: Scores,
    workers: Generates,
    collection: CollectionSettings,
) -> dict[tuple[int, int], Rollout]:
    """Rollouts by (place, sibling), for (place, task, request for its siblings)."""
    with begin_round(scorer) as scoring:

        def score(ended: Sequence[tuple[int, int, Completion]]) -> None:
            for index, sibling, completion in ended:
                place, task, _ = requests[index]
                if completion.finish_reason is FinishReason.FAILED:
                    continue
                scoring.submit((place, sibling), task, completion.text)
            scoring.advance()

        generated = workers.generate([request for _, _, request in requests], score)
        scores = scoring.finish()
    for (_, task, request), completions in zip(requests, generated, strict=True):
        mean = sum(len(one.token_ids) for one in completions) // len(completions)
        collection.lengths.record(task, len(request.prompt_token_ids), mean)
    return {
        (place, sibling): without_answer(task, completion)
        if completion.finish_reason is FinishReason.FAILED
        else rollout_of(task, request, completion, scores[place, sibling], collection)
        for (place, task, request), completions in zip(requests, generated, strict=True)
        for sibling, completion in enumerate(completions)
    }


def rollout_of(
    task: Task, request: GenerationRequest, completion: Completion, score: Score, collection: CollectionSettings
) -> Rollout:
    """One answer with its score and its length penalty."""
    was_cut = score.status is RolloutStatus.SCORED and completion.finish_reason is FinishReason.LENGTH
    penalty = collection.penalty
    return Rollout(
        task=task,
        turns=(Turn(request.prompt_token_ids, completion),),
        status=RolloutStatus.TRUNCATED if was_cut else score.status,
        reward=score.reward,
        detail=score.detail,
        penalty=0.0 if penalty is None else penalty(len(completion.token_ids), was_cut=was_cut),
        trace=score.trace,
        answered=score.answered,
    )


def without_answer(task: Task, failed: Completion) -> Rollout:
    """A rollout that got no answer, with the reason."""
    return Rollout(task=task, turns=(), status=RolloutStatus.GENERATION_ERROR, reward=None, detail=failed.detail)
