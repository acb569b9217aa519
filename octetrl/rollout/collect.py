"""From tasks to scored groups: prompts out, completions in, rewards on.

    tasks -> prompt tokens -> one GenerationRequest a task (its siblings share the prompt)
          -> one call of `generate` for the whole step, so that the engine can batch it all
          -> each completion is scored as it ends -> RolloutGroup, in the order of the tasks

Nothing fails silently, and no rollout gets a 0 that it did not earn. A prompt that is too long gets no answer. An
answer truncated at the limit is scored and marked. A reward that raised or hung is None. The rollout's status says so.

`collect_batch` collects a step's groups until enough of them are kept (DAPO's dynamic sampling, arXiv 2503.14476):

    take `prompts` tasks
    while fewer than `prompts` groups are kept, at most `max_refills` times:
        estimate from the share kept so far how many tasks are needed for the missing groups; take them, at most
        `prompts`

The taskset's state records the tasks that a step took, so a resumed run continues after them. The last refill may give
more groups than `prompts`; all of them are trained on.

**Answers of one turn** are scored as soon as each ends. Their lengths are ragged: while the longest are still being
sampled, the others already have their scores. A group is passed to `Collecting.on_group` as soon as all its answers
have theirs. **Conversations** (environments/dialogue.py) run in one open session, each to its end (drive.py). The
scorer sees their last messages; scores and length penalties are added at the end.

A request's seed follows from (run seed, step, place in the batch). A resumed step therefore samples the same tokens.
Two steps with the same task sample different ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from octetrl.config.schema import RolloutConfig
from octetrl.environments.dialogue import Dialogues
from octetrl.environments.scoring import (
    BatchScorer,
    RestartingScorer,
    RewardTimes,
    Score,
    ScoringRound,
    begin_round,
)
from octetrl.records import (
    Completion,
    FinishReason,
    GenerationRequest,
    OnCompletions,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    SamplingParams,
    Task,
    Turn,
)
from octetrl.rollout.backend import OnSession, RolloutSession, SessionRecord, first_request, not_asked, seed_of
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.converse import ConversationSettings, sampling_of, with_score
from octetrl.rollout.drive import Drive, Occupancy
from octetrl.rollout.history import History
from octetrl.system.errors import RunFailed, UserError
from octetrl.system.text import TextTooLong

MEMORY = 64  # groups; the mean length of a class forgets earlier ones
Rollouts = dict[tuple[int, int], Rollout]  # by place of the task and sibling
Requests = Sequence[tuple[int, Task, GenerationRequest]]  # place, task, and the request for all siblings


class Tasks(Protocol):
    """A source of tasks: `Taskset` (environments/tasks.py)."""

    def next_batch(self, n: int, /) -> list[Task]: ...

    def record(self, groups: Sequence[RolloutGroup], /) -> None: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class Generator(Protocol):
    """The generating part of a worker: a backend's first verbs (rollout/backend.py), with progress shown."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
        /,
    ) -> list[list[Completion]]: ...

    def session(self, on_end: OnSession = not_asked, /) -> AbstractContextManager[RolloutSession]: ...


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
    prompts: int = 1  # groups that a step wants (`collect_batch`)
    max_refills: int = 0  # further draws to get them
    penalty: LengthPenalty | None = None  # added to the reward for its length; None: none
    context_length: int = 1 << 30  # tokens that a conversation may have
    history: History = "recorded"  # of a conversation: how the prompts of later turns are made
    own_group_sizes: bool = True  # a task's own replaces `group_size`
    own_temperatures: bool = True  # a task's own replaces that of `sampling`
    answer_limits: Callable[[Task], tuple[int, ...]] | None = None  # of each sibling, for a bench; else as `sampling`

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
        prompts = config.prompts_per_step
        history = config.history
        return cls(chat, sampling, config.group_size, config.max_prompt_tokens, seed, prompts=prompts, history=history)

    def siblings(self, task: Task) -> range:
        """The places in the task's group."""
        own = task.group_size if self.own_group_sizes else None
        return range(self.group_size if own is None else own)

    def at_step(self, step: int) -> CollectionSettings:
        return replace(self, step=step)


@dataclass(slots=True)
class ExpectedLengths:
    """Estimates how many tokens a rollout of a task will take. The engine starts the longest first, so an estimate
    decides the order of requests, never their tokens.

    A task that came before: the mean of its group, the last time. A new task: the running mean of its class, which is
    the part of the task's id before its last slash, and the prompt's length in powers of two. If the class is new, too,
    the mean of all tasks with that beginning.

    `of_task`: mean tokens by id. `of_class`: by class, the mean and its number of groups, at most `MEMORY`.
    """

    of_task: dict[str, int] = field(default_factory=dict)
    of_class: dict[str, tuple[float, int]] = field(default_factory=dict)

    def estimate(self, task: Task, prompt_tokens: int) -> int | None:
        """Expected tokens of one rollout, or None."""
        if task.id in self.of_task:
            return self.of_task[task.id]
        narrow, wide = _classes(task, prompt_tokens)
        known = self.of_class.get(narrow) or self.of_class.get(wide)
        return None if known is None else round(known[0])

    def record(self, task: Task, prompt_tokens: int, mean_tokens: int) -> None:
        """Adds the mean length of a group of rollouts."""
        self.of_task[task.id] = mean_tokens
        for name in _classes(task, prompt_tokens):
            mean, groups = self.of_class.get(name, (0.0, 0))
            groups = min(groups + 1, MEMORY)
            self.of_class[name] = (mean + (mean_tokens - mean) / groups, groups)

    def state(self) -> dict[str, Any]:
        return {"of_task": dict(self.of_task), "of_class": {name: list(known) for name, known in self.of_class.items()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.of_task = dict(state["of_task"])
        self.of_class = {name: (float(mean), int(groups)) for name, (mean, groups) in state["of_class"].items()}


def _classes(task: Task, prompt_tokens: int) -> tuple[str, str]:
    """The task's class, and the wider class of any prompt length."""
    beginning = task.id.rpartition("/")[0]
    return f"{beginning}|{prompt_tokens.bit_length()}", f"{beginning}|"


@dataclass(slots=True)
class Collecting:
    """The state of one collection: of a step with all its refills, or of an evaluation."""

    lengths: ExpectedLengths = field(default_factory=ExpectedLengths)
    on_group: Callable[[int, RolloutGroup], None] | None = None  # gets each scored group and its place, early
    check: Callable[[], None] | None = None  # called while answers are sampled; what it raises ends the collection
    first_place: int = 0  # in the step, of the next task: seeds follow from it
    occupancy: Occupancy | None = None  # of the engine, where an environment has several turns
    session: SessionRecord | None = None  # of all sessions so far, as one
    reward_times: RewardTimes | None = None  # of all rounds of scoring so far

    def end_round(self, scoring: ScoringRound) -> None:
        if scoring.times is not None:
            self.reward_times = (self.reward_times or RewardTimes()).followed_by(scoring.times)

    def end_session(self, record: SessionRecord) -> None:
        self.session = record if self.session is None else self.session.followed_by(record)


@dataclass(frozen=True, slots=True)
class CollectedBatch:
    """The groups that a step collected."""

    groups: list[RolloutGroup]  # all of them, in the order drawn
    kept: list[RolloutGroup]
    counts: Mapping[str, float]  # metrics of the groups
    measured: Mapping[str, float]  # metrics of the engines and the clock
    session: SessionRecord | None  # None: nothing could be sampled
    reward_times: RewardTimes | None  # None: the scorer uses the engine's device, or there is none

    @property
    def metrics(self) -> Mapping[str, float]:
        return {**self.counts, **self.measured}


def collect_batch(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    environment: BatchScorer | Dialogues,
    workers: Generator,
    collection: CollectionSettings,
    lengths: ExpectedLengths,
    *,
    on_group: Callable[[int, RolloutGroup], None] | None = None,
    check: Callable[[], None] | None = None,
) -> CollectedBatch:
    """Collects at least `collection.prompts` groups that are kept, or as many as `collection.max_refills` refills
    give. `lengths`: of earlier answers; those of this step are added. `on_group`, `check`: as in `Collecting`."""
    state = Collecting(lengths, on_group, check)
    restarts = _reward_restarts(environment)
    groups: list[RolloutGroup] = []
    kept: list[RolloutGroup] = []
    wanted, draws = collection.prompts, 0
    while wanted > 0 and draws <= collection.max_refills:
        new = collect_groups(tasks.next_batch(wanted), environment, workers, collection, state)
        tasks.record(new)
        groups += new
        kept += [group for group in new if keeps(group)]
        draws += 1
        missing = max(collection.prompts - len(kept), 0)
        wanted = min(-(-missing * len(groups) // max(len(kept), 1)), collection.prompts)
    counts = {
        "rollout/groups": float(len(groups)),
        "rollout/kept_groups": float(len(kept)),
        "rollout/refills": float(draws - 1),
        "rollout/reward_restarts": float(_reward_restarts(environment) - restarts),
        **({} if state.occupancy is None else state.occupancy.metrics),
        **tasks.metrics,
    }
    sampled = {} if state.session is None else state.session.named()
    times = {} if state.reward_times is None else state.reward_times.metrics
    return CollectedBatch(groups, kept, counts, {**sampled, **times}, state.session, state.reward_times)


def _reward_restarts(environment: BatchScorer | Dialogues) -> int:
    """Reward processes that were replaced since the run began."""
    scorer = environment.scorer if isinstance(environment, Dialogues) else environment
    return scorer.restarts if isinstance(scorer, RestartingScorer) else 0


def collect_groups(
    tasks: Sequence[Task],
    environment: BatchScorer | Dialogues,
    workers: Generator,
    collection: CollectionSettings,
    state: Collecting,
) -> list[RolloutGroup]:
    """A group of rollouts of each task, scored, in the order of `tasks`. `state` continues after them.

    The groups have plain `Task` records, whatever class the environment's tasks have."""
    places = range(state.first_place, state.first_place + len(tasks))
    state.first_place += len(tasks)
    requests: list[tuple[int, Task, GenerationRequest]] = []
    rollouts: Rollouts = {}
    for place, task in zip(places, tasks, strict=True):
        has_agent = isinstance(environment, Dialogues) and environment.of(task).agent is not None
        request = _request(task, place, collection, state.lengths, has_agent=has_agent)
        if isinstance(request, GenerationRequest):
            requests.append((place, task, request))
        else:
            rollouts |= {(place, sibling): request for sibling in collection.siblings(task)}
    if isinstance(environment, Dialogues):
        rollouts |= _collect_conversations(requests, environment, workers, collection, state)
    else:
        rollouts |= _collect_answers(requests, environment, workers, collection, state)
    groups = []
    for place, task in zip(places, tasks, strict=True):
        plain = task.plain()  # the fields of a user's own class are read here for the last time
        siblings = (replace(rollouts[place, sibling], task=plain) for sibling in collection.siblings(task))
        groups.append(RolloutGroup(plain, tuple(siblings)))
    return groups


def _request(
    task: Task, place: int, collection: CollectionSettings, lengths: ExpectedLengths, *, has_agent: bool
) -> GenerationRequest | Rollout:
    """The request for all siblings of the task at this place of the step; if its prompt is too long, their rollout. An
    agent writes its prompts itself."""
    limit = collection.max_prompt_tokens
    try:
        prompt = () if has_agent else collection.chat.of(task).prompt_tokens(task.prompt, limit)
        problem = f"{len(prompt)} tokens, rollout.max_prompt_tokens is {limit}" if len(prompt) > limit else None
    except TextTooLong as error:
        problem = f"{error} (rollout.max_prompt_tokens)"
    except UserError as error:
        raise RunFailed(f"task '{task.id}': {error}") from error
    if problem is not None:
        return Rollout(task, (), RolloutStatus.PROMPT_TOO_LONG, reward=None, detail=f"the prompt has {problem}")
    return GenerationRequest(
        id=first_request(place, task),
        prompt_token_ids=prompt,
        sampling=sampling_of(task, collection.sampling) if collection.own_temperatures else collection.sampling,
        num_siblings=len(collection.siblings(task)),
        seed=seed_of(collection.seed, collection.step, place),
        expected_tokens=lengths.estimate(task, len(prompt)),
        answer_limits=() if collection.answer_limits is None else collection.answer_limits(task),
    )


# ---------------------------------------------------------------- answers of one turn


def _collect_answers(
    requests: Requests, scorer: BatchScorer, workers: Generator, collection: CollectionSettings, state: Collecting
) -> Rollouts:
    early = None if state.on_group is None else _EarlyGroups(requests, collection, state.on_group)
    with begin_round(scorer) as scoring:

        def score(ended: Sequence[tuple[int, int, Completion]]) -> bool:
            if state.check is not None:
                state.check()
            for index, sibling, completion in ended:
                if completion.finish_reason is not FinishReason.FAILED:
                    place, task, _ = requests[index]
                    scoring.submit((place, sibling), task, completion.text)
            scoring.advance()
            if early is not None:
                early.add(ended, scoring)
            return not scoring.is_done

        generated = workers.generate([request for _, _, request in requests], score, state.end_session)
        scores = scoring.finish()
        state.end_round(scoring)
    for (_, task, request), completions in zip(requests, generated, strict=True):
        mean = sum(len(one.token_ids) for one in completions) // len(completions)
        state.lengths.record(task, len(request.prompt_token_ids), mean)
    return {
        (place, sibling): Rollout(task, (), RolloutStatus.GENERATION_ERROR, reward=None, detail=completion.detail)
        if completion.finish_reason is FinishReason.FAILED
        else _scored(task, request, completion, scores[place, sibling], collection)
        for (place, task, request), completions in zip(requests, generated, strict=True)
        for sibling, completion in enumerate(completions)
    }


class _EarlyGroups:
    """Passes on groups that are complete before the last answer has ended."""

    def __init__(
        self, requests: Requests, collection: CollectionSettings, on_group: Callable[[int, RolloutGroup], None]
    ) -> None:
        self._requests, self._collection, self._on_group = requests, collection, on_group
        self._answers: dict[int, dict[int, Completion]] = {index: {} for index in range(len(requests))}
        self._ended: list[int] = []  # whose answers have all ended, and perhaps not their scores

    def add(self, ended: Sequence[tuple[int, int, Completion]], scoring: ScoringRound) -> None:
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
                    _scored(task, request, one, scores[place, sibling], self._collection) for sibling, one in answers
                )
                self._on_group(place, RolloutGroup(task, tuple(rollouts)))


def _scored(
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
        components=dict(score.components),
        metrics=dict(score.metrics),
    )


# ---------------------------------------------------------------- conversations


def _collect_conversations(
    requests: Requests, dialogue: Dialogues, workers: Generator, collection: CollectionSettings, state: Collecting
) -> Rollouts:
    """`requests`: those of the first turns."""
    settings = ConversationSettings(
        collection.chat, collection.sampling, collection.context_length, collection.history, collection.own_temperatures
    )
    with nullcontext() if dialogue.scorer is None else begin_round(dialogue.scorer) as scoring:
        with workers.session(state.end_session) as session:
            state.occupancy = state.occupancy or Occupancy()
            drive = Drive(dialogue, session, settings, state.occupancy, scoring, state.check)
            drive.run(requests, run_seed=collection.seed, step=collection.step)
        scores = {} if scoring is None else scoring.finish()
        if scoring is not None:
            state.end_round(scoring)
    finished = drive.finished
    _record_lengths(finished, state.lengths)
    for key, score in scores.items():
        finished[key] = with_score(finished[key], score)
    return {key: _penalized(rollout, collection) for key, rollout in finished.items()}


def _record_lengths(finished: Rollouts, lengths: ExpectedLengths) -> None:
    """A conversation's length counts all its sampled tokens. A failed one might have become longer: it is left out."""
    groups: dict[int, list[Rollout]] = {}
    for (place, _), rollout in sorted(finished.items(), key=lambda item: item[0]):
        if rollout.status.has_reward and rollout.turns:
            groups.setdefault(place, []).append(rollout)
    for rollouts in groups.values():
        tokens = [sum(len(turn.completion.token_ids) for turn in rollout.turns) for rollout in rollouts]
        prompt = rollouts[0].turns[0].prompt_token_ids
        lengths.record(rollouts[0].task, len(prompt), sum(tokens) // len(tokens))


def _penalized(rollout: Rollout, collection: CollectionSettings) -> Rollout:
    """Adds the penalty for the rollout's longest answer, because the limit applies to each answer."""
    if collection.penalty is None or rollout.reward is None:
        return rollout
    longest = max((len(turn.completion.token_ids) for turn in rollout.turns), default=0)
    is_cut = any(turn.completion.finish_reason is FinishReason.LENGTH for turn in rollout.turns)
    was_cut = is_cut and rollout.status is not RolloutStatus.UNFINISHED
    return replace(rollout, penalty=collection.penalty(longest, was_cut=was_cut))
