"""From tasks to scored groups: prompts out, completions in, rewards on.

    tasks -> prompt tokens -> one GenerationRequest a task (its siblings share the prompt)
          -> one call of `generate` for the whole step, so that the engine can batch it all
          -> one call of `score` for all completions -> RolloutGroup, in the order of the tasks

Nothing fails silently, and no rollout gets a 0 that it did not earn. A prompt that is too long gets no answer. An
answer truncated at the limit is scored and marked. A reward that raised or hung is None. The rollout's status says so.

The lengths of a task's answers are kept (`CollectionSettings.lengths`). When the task comes again, the engine receives
them as a hint and starts the longest first. The length of a conversation counts all tokens drawn in it.

A request's seed follows from (run seed, step, place in the batch). A resumed step therefore samples the same tokens.
Two steps with the same task sample different ones.

If the environment is a `Dialogue` (environments/turns/), a completion is only the first turn. rollout/drive.py runs
each rollout to its end, in one open session. The scorer then sees the last message.

`collect_batch` collects a step's groups until enough of them are kept (DAPO's dynamic sampling, arXiv 2503.14476):

    take `prompts` tasks
    while fewer than `prompts` groups are kept, at most `max_refills` times:
        estimate from the share kept so far how many tasks are needed for the missing groups; take them, at most
        `prompts`

The taskset's state records the tasks that a step took, so a resumed run continues after them. The last refill may give
more groups than `prompts`; all of them are trained on. With `max_refills` 0 there is no refill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from octetrl.config.schema import RolloutConfig
from octetrl.config.text import TextTooLong
from octetrl.environments.scoring import RewardWorkers, Score
from octetrl.environments.turns.dialogue import Dialogue
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    Task,
    Turn,
)
from octetrl.rollout.backend import RolloutSession
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.converse import ConversationSettings, seed_of, with_score
from octetrl.rollout.drive import Drive, Occupancy


class Tasks(Protocol):
    """A source of tasks: `Taskset` (environments/base.py)."""

    def next_batch(self, n: int, /) -> list[Task]: ...


class Scores(Protocol):
    """A scorer of completions: `RewardWorkers` (environments/scoring.py)."""

    def score(self, completions: Sequence[tuple[Task, str]], /) -> list[Score]: ...


class Generates(Protocol):
    """The generating part of a worker: a backend's first verbs (rollout/backend.py), with progress shown."""

    def generate(self, requests: Sequence[GenerationRequest], /) -> list[list[Completion]]: ...

    def session(self) -> AbstractContextManager[RolloutSession]: ...


@dataclass(frozen=True, slots=True)
class TooLong:
    """A prompt that gets no answer, and the reason."""

    detail: str


class LengthPenalty(Protocol):
    """Penalty for an answer's length, 0 or less: `soft_overlong_penalty` (algorithms/dapo.py)."""

    def __call__(self, length: int, *, was_cut: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    """Settings for the collection of groups, without the tasks."""

    chat: ChatTokens
    sampling: SamplingParams
    group_size: int
    max_prompt_tokens: int
    seed: int = 0
    step: int = 0  # new for every collection: seeds follow from it
    first_place: int = 0  # in the step, of the first task: seeds follow from it too
    prompts: int = 1  # groups that a step wants (`collect_batch`)
    max_refills: int = 0  # further draws to get them
    penalty: LengthPenalty | None = None  # added to the reward for its length; None: none
    lengths: dict[str, int] = field(default_factory=dict)  # task id -> mean tokens drawn for a rollout of it, last time
    context_length: int = 1 << 30  # tokens that a conversation may have
    occupancy: Occupancy = field(default_factory=Occupancy)  # filled where an environment has several turns

    @classmethod
    def from_config(cls, chat: ChatTokens, config: RolloutConfig, *, seed: int) -> CollectionSettings:
        """Settings from the recipe's `rollout` section."""
        sampling = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            stop=config.stop,
        )
        return cls(chat, sampling, config.group_size, config.max_prompt_tokens, seed, prompts=config.prompts_per_step)

    def at_step(self, step: int) -> CollectionSettings:
        return replace(self, step=step)


@dataclass(frozen=True, slots=True)
class CollectedBatch:
    """The groups that a step collected."""

    groups: list[RolloutGroup]  # all of them, in the order drawn
    kept: list[RolloutGroup]
    refills: int
    occupancy: Occupancy = field(default_factory=Occupancy)
    reward_restarts: int = 0  # reward processes that were replaced

    @property
    def metrics(self) -> Mapping[str, float]:
        counts = {
            "groups": len(self.groups),
            "kept_groups": len(self.kept),
            "refills": self.refills,
            "reward_restarts": self.reward_restarts,
        }
        return {f"rollout/{name}": float(count) for name, count in counts.items()} | dict(self.occupancy.metrics)


def collect_batch(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    environment: Scores | Dialogue,
    workers: Generates,
    collection: CollectionSettings,
) -> CollectedBatch:
    """Collects at least `collection.prompts` groups that are kept, or as many as `collection.max_refills` refills
    give."""
    groups: list[RolloutGroup] = []
    kept: list[RolloutGroup] = []
    wanted, draws, occupancy = collection.prompts, 0, Occupancy()
    restarts = _reward_restarts(environment)
    while wanted > 0 and draws <= collection.max_refills:
        drawn = tasks.next_batch(wanted)
        new = collect_groups(
            drawn, environment, workers, replace(collection, first_place=len(groups), occupancy=occupancy)
        )
        groups += new
        kept += [group for group in new if keeps(group)]
        draws += 1
        missing = max(collection.prompts - len(kept), 0)
        wanted = min(-(-missing * len(groups) // max(len(kept), 1)), collection.prompts)
    return CollectedBatch(groups, kept, draws - 1, occupancy, _reward_restarts(environment) - restarts)


def _reward_restarts(environment: Scores | Dialogue) -> int:
    """Since the run began."""
    scorer = environment.scorer if isinstance(environment, Dialogue) else environment
    return scorer.restarts if isinstance(scorer, RewardWorkers) else 0


def collect_groups(
    tasks: Sequence[Task], environment: Scores | Dialogue, workers: Generates, collection: CollectionSettings
) -> list[RolloutGroup]:
    """`group_size` rollouts of each task, scored, in the order of `tasks`."""
    requests = [_request(task, place, collection) for place, task in enumerate(tasks, collection.first_place)]
    if isinstance(environment, Dialogue):
        rollouts_of = _converse(tasks, requests, environment, workers, collection)
        return [RolloutGroup(task, rollouts) for task, rollouts in zip(tasks, rollouts_of, strict=True)]
    generated = iter(workers.generate([request for request in requests if isinstance(request, GenerationRequest)]))
    siblings = [next(generated) if isinstance(request, GenerationRequest) else [] for request in requests]
    for task, drawn in zip(tasks, siblings, strict=True):
        if drawn:
            collection.lengths[task.id] = sum(len(completion.token_ids) for completion in drawn) // len(drawn)
    scores = iter(
        environment.score(
            [(task, completion.text) for task, drawn in zip(tasks, siblings, strict=True) for completion in drawn]
        )
    )
    groups = []
    for task, request, drawn in zip(tasks, requests, siblings, strict=True):
        if isinstance(request, TooLong):
            rollouts = [_too_long(task, request)] * collection.group_size
        else:
            rollouts = [_rollout(task, request, completion, next(scores), collection) for completion in drawn]
        groups.append(RolloutGroup(task, tuple(rollouts)))
    return groups


def _converse(
    tasks: Sequence[Task],
    requests: Sequence[GenerationRequest | TooLong],
    dialogue: Dialogue,
    workers: Generates,
    collection: CollectionSettings,
) -> list[tuple[Rollout, ...]]:
    """The siblings of each task, in order."""
    speaking = ConversationSettings(collection.chat, collection.sampling, collection.context_length)
    places = range(collection.first_place, collection.first_place + len(tasks))
    asked = [
        (place, task, request)
        for place, task, request in zip(places, tasks, requests, strict=True)
        if isinstance(request, GenerationRequest)
    ]
    with workers.session() as session:
        drive = Drive(dialogue, session, speaking, collection.occupancy)
        drive.run(asked, run_seed=collection.seed, step=collection.step)
    finished = drive.finished
    _keep_lengths(finished, collection.lengths)
    if dialogue.scorer is not None:
        to_score = [key for key, rollout in finished.items() if rollout.status.has_reward]
        last = [(finished[key].task, finished[key].turns[-1].completion.text) for key in to_score]
        for key, score in zip(to_score, dialogue.scorer.score(last), strict=True):
            finished[key] = with_score(finished[key], score)
    siblings = range(collection.group_size)
    return [
        (_too_long(task, request),) * collection.group_size
        if isinstance(request, TooLong)
        else tuple(_penalized(finished[place, sibling], collection) for sibling in siblings)
        for place, task, request in zip(places, tasks, requests, strict=True)
    ]


def _keep_lengths(finished: Mapping[tuple[int, int], Rollout], lengths: dict[str, int]) -> None:
    """Stores the lengths of conversations that ended normally. A failed one might have become longer."""
    drawn: dict[str, list[int]] = {}
    for rollout in finished.values():
        if rollout.status.has_reward:
            drawn.setdefault(rollout.task.id, []).append(sum(len(turn.completion.token_ids) for turn in rollout.turns))
    lengths.update({task: sum(tokens) // len(tokens) for task, tokens in drawn.items()})


def _penalized(rollout: Rollout, collection: CollectionSettings) -> Rollout:
    """Adds the penalty for the rollout's longest answer, because the limit applies to each answer."""
    if collection.penalty is None or rollout.reward is None:
        return rollout
    longest = max(len(turn.completion.token_ids) for turn in rollout.turns)
    return replace(rollout, penalty=collection.penalty(longest, was_cut=rollout.status is RolloutStatus.OVERLONG))


def count_statuses(groups: Sequence[RolloutGroup]) -> dict[RolloutStatus, int]:
    """Number of rollouts with each status, zeros included."""
    counts = dict.fromkeys(RolloutStatus, 0)
    for group in groups:
        for rollout in group.rollouts:
            counts[rollout.status] += 1
    return counts


def _request(task: Task, place: int, collection: CollectionSettings) -> GenerationRequest | TooLong:
    limit = collection.max_prompt_tokens
    try:
        prompt_token_ids = collection.chat.prompt_tokens(task.prompt, limit)
    except TextTooLong as error:
        return TooLong(f"the prompt has {error} (rollout.max_prompt_tokens)")
    if len(prompt_token_ids) > limit:
        return TooLong(f"the prompt has {len(prompt_token_ids)} tokens, rollout.max_prompt_tokens is {limit}")
    return GenerationRequest(
        id=f"{place}:{task.id}",
        prompt_token_ids=prompt_token_ids,
        sampling=collection.sampling,
        num_siblings=collection.group_size,
        seed=seed_of(collection.seed, collection.step, place),
        expected_tokens=collection.lengths.get(task.id),
    )


def _rollout(
    task: Task, request: GenerationRequest, completion: Completion, score: Score, collection: CollectionSettings
) -> Rollout:
    was_cut = score.status is RolloutStatus.SCORED and completion.finish_reason is FinishReason.LENGTH
    penalty = collection.penalty
    return Rollout(
        task=task,
        turns=(Turn(request.prompt_token_ids, completion),),
        status=RolloutStatus.OVERLONG if was_cut else score.status,
        reward=score.reward,
        detail=score.detail,
        penalty=0.0 if penalty is None else penalty(len(completion.token_ids), was_cut=was_cut),
        trace=score.trace,
        answered=score.answered,
    )


def _too_long(task: Task, prompt: TooLong) -> Rollout:
    return Rollout(task=task, turns=(), status=RolloutStatus.PROMPT_TOO_LONG, reward=None, detail=prompt.detail)
