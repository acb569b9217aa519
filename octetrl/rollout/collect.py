"""From tasks to scored groups: prompts out, completions in, rewards on.

    tasks -> prompt tokens -> one GenerationRequest a task (its siblings share the prompt)
          -> one call of `generate` for the whole step, so that the engine can batch it all
          -> each completion is scored as it ends -> RolloutGroup, in the order of the tasks

Nothing fails silently, and no rollout gets a 0 that it did not earn. A prompt that is too long gets no answer. An
answer truncated at the limit is scored and marked. A reward that raised or hung is None. The rollout's status says so.

The lengths of answers are kept (expected_lengths.py). The engine receives them as hints and starts the longest first.
The length of a conversation counts all tokens drawn in it.

A request's seed follows from (run seed, step, place in the batch). A resumed step therefore samples the same tokens.
Two steps with the same task sample different ones.

If the environment is a `Dialogue` (environments/dialogue.py), a completion is only the first turn. rollout/drive.py
runs each rollout to its end, in one open session. The scorer then sees the last message.

`collect_batch` collects a step's groups until enough of them are kept (DAPO's dynamic sampling, arXiv 2503.14476):

    take `prompts` tasks
    while fewer than `prompts` groups are kept, at most `max_refills` times:
        estimate from the share kept so far how many tasks are needed for the missing groups; take them, at most
        `prompts`

The taskset's state records the tasks that a step took, so a resumed run continues after them. The last refill may give
more groups than `prompts`; all of them are trained on. With `max_refills` 0 there is no refill.

**Answers of one turn** are scored as soon as each ends. Their lengths are ragged: while the longest are still being
sampled, the others already have their scores. A group is passed to `Collecting.on_group` as soon as all its answers
have theirs. **Conversations** run in one session; their scores and length penalties are added at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from octetrl.environments.dialogue import Dialogues
from octetrl.environments.scoring import (
    BatchScorer,
    RestartingScorer,
    RewardTimes,
    Score,
    ScoringRound,
    TimedScorer,
    begin_round,
)
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
from octetrl.rollout.collected import CollectedBatch, Collecting, CollectionSettings, Generates, Tasks
from octetrl.rollout.converse import ConversationSettings, first_request, seed_of, with_score
from octetrl.rollout.drive import Drive
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.system.text import TextTooLong


def collect_batch(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    environment: BatchScorer | Dialogues,
    workers: Generates,
    collection: CollectionSettings,
    lengths: ExpectedLengths | None = None,
    on_group: Callable[[int, RolloutGroup], None] | None = None,
) -> CollectedBatch:
    """Collects at least `collection.prompts` groups that are kept, or as many as `collection.max_refills` refills
    give. `lengths`: of earlier answers; those of this step are added. `on_group`: gets each scored group early."""
    state = Collecting(ExpectedLengths() if lengths is None else lengths, on_group)
    restarts = _reward_restarts(environment)
    groups: list[RolloutGroup] = []
    kept: list[RolloutGroup] = []
    wanted, draws = collection.prompts, 0
    while wanted > 0 and draws <= collection.max_refills:
        drawn = tasks.next_batch(wanted)
        new = collect_groups(drawn, environment, workers, collection, state)
        groups += new
        kept += [group for group in new if keeps(group)]
        draws += 1
        missing = max(collection.prompts - len(kept), 0)
        wanted = min(-(-missing * len(groups) // max(len(kept), 1)), collection.prompts)
    return CollectedBatch(
        groups,
        kept,
        draws - 1,
        state.occupancy,
        reward_restarts=_reward_restarts(environment) - restarts,
        of_order=tasks.metrics,
        session=state.session,
        reward_times=reward_times(environment),
    )


def reward_times(environment: BatchScorer | Dialogues) -> dict[str, float]:
    """`time/reward`: seconds that the collection waited for rewards after sampling. `time/reward_slowest`: one call.
    Empty for scorers that use the engine's device. A collection calls it once, at its end."""
    times = times_of(environment)
    if times is None:
        return {}
    taken = times.take()
    return {"time/reward": taken.waited} | ({"time/reward_slowest": taken.slowest} if taken.slowest else {})


def times_of(environment: BatchScorer | Dialogues) -> RewardTimes | None:
    """None: its scorer does not measure them."""
    scorer = environment.scorer if isinstance(environment, Dialogues) else environment
    return scorer.times if isinstance(scorer, TimedScorer) else None


def _reward_restarts(environment: BatchScorer | Dialogues) -> int:
    """Since the run began."""
    scorer = environment.scorer if isinstance(environment, Dialogues) else environment
    return scorer.restarts if isinstance(scorer, RestartingScorer) else 0


def collect_groups(
    tasks: Sequence[Task],
    environment: BatchScorer | Dialogues,
    workers: Generates,
    collection: CollectionSettings,
    state: Collecting,
) -> list[RolloutGroup]:
    """`group_size` rollouts of each task, scored, in the order of `tasks`. `state` goes on behind them."""
    places = range(state.first_place, state.first_place + len(tasks))
    state.first_place += len(tasks)
    requests = [request_of(task, place, collection, state.lengths) for place, task in zip(places, tasks, strict=True)]
    answerable = [
        (place, task, request)
        for place, task, request in zip(places, tasks, requests, strict=True)
        if isinstance(request, GenerationRequest)
    ]
    if isinstance(environment, Dialogues):
        rollouts = collect_conversations(answerable, environment, workers, collection, state)
    else:
        rollouts = collect_answers(answerable, environment, workers, collection, state)
    siblings = range(collection.group_size)
    return [
        RolloutGroup(
            task,
            without_answers(task, request, collection)
            if isinstance(request, TooLong)
            else tuple(rollouts[place, sibling] for sibling in siblings),
        )
        for place, task, request in zip(places, tasks, requests, strict=True)
    ]


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


def collect_answers(
    requests: Sequence[tuple[int, Task, GenerationRequest]],
    scorer: BatchScorer,
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


def collect_conversations(
    requests: Sequence[tuple[int, Task, GenerationRequest]],
    dialogue: Dialogues,
    workers: Generates,
    collection: CollectionSettings,
    state: Collecting,
) -> dict[tuple[int, int], Rollout]:
    """Rollouts by (place, sibling), for (place, task, request for its siblings) of each first turn."""
    settings = ConversationSettings(collection.chat, collection.sampling, collection.context_length)
    with nullcontext() if dialogue.scorer is None else begin_round(dialogue.scorer) as scoring:
        with workers.session(state.end_session) as session:
            drive = Drive(dialogue, session, settings, state.occupancy, scoring)
            drive.run(requests, run_seed=collection.seed, step=collection.step)
        scores = {} if scoring is None else scoring.finish()
    finished = drive.finished
    _keep_lengths(finished, state.lengths)
    for key, score in scores.items():
        finished[key] = with_score(finished[key], score)
    return {key: _penalized(rollout, collection) for key, rollout in finished.items()}


def _keep_lengths(finished: Mapping[tuple[int, int], Rollout], lengths: ExpectedLengths) -> None:
    """Stores the lengths of conversations that ended normally. A failed one might have become longer."""
    drawn: dict[int, list[Rollout]] = {}
    for (place, _), rollout in sorted(finished.items(), key=lambda one: one[0]):
        if rollout.status.has_reward:
            drawn.setdefault(place, []).append(rollout)
    for rollouts in drawn.values():
        tokens = [sum(len(turn.completion.token_ids) for turn in rollout.turns) for rollout in rollouts]
        prompt = rollouts[0].turns[0].prompt_token_ids
        lengths.record(rollouts[0].task, len(prompt), sum(tokens) // len(tokens))


def _penalized(rollout: Rollout, collection: CollectionSettings) -> Rollout:
    """Adds the penalty for the rollout's longest answer, because the limit applies to each answer."""
    if collection.penalty is None or rollout.reward is None:
        return rollout
    longest = max(len(turn.completion.token_ids) for turn in rollout.turns)
    return replace(rollout, penalty=collection.penalty(longest, was_cut=rollout.status is RolloutStatus.TRUNCATED))
