"""Collects the rollouts of an environment with one turn: samples the answers, and scores each as soon as it ends.

The lengths of answers are ragged. While the longest are still being sampled, the others already have their scores. A
group is passed to `Collecting.on_group` as soon as all its answers have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from octetrl.environments.score import Score
from octetrl.environments.scoring_round import ScoresAll, ScoringRound, begin_round
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Task,
    Turn,
)
from octetrl.rollout.collected import Collecting
from octetrl.rollout.collection_settings import CollectionSettings, Generates


def collect_answers(
    requests: Sequence[tuple[int, Task, GenerationRequest]],
    scorer: ScoresAll,
    workers: Generates,
    collection: CollectionSettings,
    state: Collecting,
) -> dict[tuple[int, int], Rollout]:
    """Rollouts by (place, sibling), for (place, task, request for its siblings)."""
    early = None if state.on_group is None else EarlyGroups(requests, collection, state.on_group)
    with begin_round(scorer) as scoring:

        def score(ended: Sequence[tuple[int, int, Completion]]) -> bool:
            for index, sibling, completion in ended:
                place, task, _ = requests[index]
                if completion.finish_reason is FinishReason.FAILED:
                    continue
                scoring.submit((place, sibling), task, completion.text)
            scoring.advance()
            if early is not None:
                early.take(ended, scoring)
            return not scoring.is_done

        generated = workers.generate([request for _, _, request in requests], score, state.end_session)
        scores = scoring.finish()
    for (_, task, request), completions in zip(requests, generated, strict=True):
        mean = sum(len(one.token_ids) for one in completions) // len(completions)
        state.lengths.record(task, len(request.prompt_token_ids), mean)
    return {
        (place, sibling): without_answer(task, completion)
        if completion.finish_reason is FinishReason.FAILED
        else rollout_of(task, request, completion, scores[place, sibling], collection)
        for (place, task, request), completions in zip(requests, generated, strict=True)
        for sibling, completion in enumerate(completions)
    }


class EarlyGroups:
    """Groups that are complete before the last answer has ended."""

    def __init__(
        self,
        requests: Sequence[tuple[int, Task, GenerationRequest]],
        collection: CollectionSettings,
        on_group: Callable[[int, RolloutGroup], None],
    ) -> None:
        self._requests, self._collection, self._on_group = requests, collection, on_group
        self._answers: dict[int, dict[int, Completion]] = {index: {} for index in range(len(requests))}
        self._ended: list[int] = []  # whose answers have all ended, and perhaps not their scores

    def take(self, ended: Sequence[tuple[int, int, Completion]], scoring: ScoringRound) -> None:
        """Passes on the groups that are complete now."""
        for index, sibling, completion in ended:
            self._answers[index][sibling] = completion
            if len(self._answers[index]) == self._requests[index][2].num_siblings:
                self._ended.append(index)
        scores = scoring.so_far() if self._ended else {}
        for index in list(self._ended):
            place, task, request = self._requests[index]
            answers = sorted(self._answers[index].items())
            if all((place, sibling) in scores for sibling, _ in answers):
                self._ended.remove(index)
                rollouts = (
                    rollout_of(task, request, one, scores[place, sibling], self._collection) for sibling, one in answers
                )
                self._on_group(place, RolloutGroup(task, tuple(rollouts)))


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
