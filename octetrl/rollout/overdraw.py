"""Over-drawing (`rollout.overdraw`): a step draws more groups than it needs and leaves out the slowest.

    draw        `prompts` x overdraw tasks, those put back by the step before first
    keep        all that were put back before, and of the others those whose longest answer is shortest
    put back    the rest: the next step draws them first, with new seeds, and keeps them

With `overdraw_return: long_step` the tasks that were put back wait until they fill a step. That step draws them alone,
keeps all, and has long answers; the steps between draw new tasks only (RollPacker, arXiv 2509.21009).

A step waits for its slowest group, so the step gets shorter. Its batch is no longer a fair sample: it prefers tasks and
answers that are short (docs/algorithms.md explains the bias). Every task is trained on once an epoch nevertheless,
because nothing is put back twice.

A group's time is counted in decode forwards: the tokens of its longest answer. So the groups that are kept follow from
the answers alone, whatever the speed of the machine, the batch, the number of workers or speculation. The same seed
keeps the same groups. While they are drawn, `prompts` complete groups give a bound on the last one's time. A group
with an unfinished answer of that many tokens is cancelled, because it can no longer be kept. A prompt that is too long
has no answer. It comes last, so that it takes no group's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from octetrl.environments.score import Score
from octetrl.environments.scoring_round import ScoresAll, begin_round
from octetrl.records import Completion, GenerationRequest, RolloutGroup, Task
from octetrl.rollout.backend import ForgetsAnswers, KnowsLengths, RolloutSession
from octetrl.rollout.collect_answers import rollout_of
from octetrl.rollout.collected import CollectedBatch, Collecting
from octetrl.rollout.collection_settings import CollectionSettings, Generates, Tasks
from octetrl.rollout.first_requests import TooLong, request_of, without_answers
from octetrl.system.errors import UserError

WAIT_SECONDS = 0.1  # for events of sessions elsewhere, between two looks at the lengths
SCORING_SECONDS = 0.005  # the same while answers wait for their scores
Answers = dict[int, Completion]  # by sibling


@runtime_checkable
class TakesTasksBack(Protocol):
    """A source of tasks that draws some again: `Taskset` (environments/base.py)."""

    @property
    def num_put_back(self) -> int: ...

    def put_back(self, tasks: Sequence[Task], /) -> None: ...

    def next_new_batch(self, n: int, /) -> list[Task]: ...


class Race:
    """Finds the `wanted` groups with the shortest longest answers, of those at `places`."""

    def __init__(self, places: Sequence[int], wanted: int) -> None:
        assert 0 < wanted < len(places), f"{wanted} of {len(places)} groups"
        self._wanted = wanted
        self._times: dict[int, float] = dict.fromkeys(places, math.inf)
        self.bound = math.inf  # tokens of a kept group's longest answer, at most; infinite while too few have ended

    def end(self, place: int, tokens: int) -> None:
        """The group's longest answer has so many tokens. A place that does not race is ignored."""
        if place in self._times:
            self._times[place] = tokens
            self.bound = sorted(self._times.values())[self._wanted - 1]

    def is_lost(self, place: int, tokens: int) -> bool:
        """Whether a group with an unfinished answer of so many tokens can't be kept any more."""
        return place in self._times and tokens >= self.bound

    @property
    def losers(self) -> list[int]:
        """The places that are not kept. Of equal groups the later ones."""
        in_order = sorted(self._times, key=lambda place: (self._times[place], place))
        return sorted(in_order[self._wanted :])

    @property
    def longest_kept(self) -> float:
        """Tokens of the longest answer of the groups that are kept; 0 if none of them has one."""
        kept = sorted(self._times.values())[: self._wanted]
        return max((tokens for tokens in kept if math.isfinite(tokens)), default=0.0)


def collect_overdrawn(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    scorer: ScoresAll,
    workers: Generates,
    collection: CollectionSettings,
    state: Collecting,
) -> CollectedBatch:
    """The groups of one step. The slowest are put back into `tasks`."""
    assert isinstance(tasks, TakesTasksBack), "over-drawing needs tasks that can be put back"
    prompts, again = collection.prompts, tasks.num_put_back
    if again >= prompts:
        drawn = tasks.next_batch(prompts)
    elif collection.long_steps:
        again, drawn = 0, tasks.next_new_batch(collection.drawn_prompts)
    else:
        drawn = tasks.next_batch(collection.drawn_prompts)
    asked = {place: (task, request_of(task, place, collection, state.lengths)) for place, task in enumerate(drawn)}
    race = None if again >= prompts else Race(range(again, len(drawn)), prompts - again)
    answers, scores = _draw(asked, scorer, workers, race, state)
    lost = [] if race is None else race.losers
    groups = []
    for place, (task, request) in asked.items():
        if place in lost:
            assert race is not None
            if isinstance(request, GenerationRequest):
                state.lengths.expect_at_least(task, round(race.bound))
        elif isinstance(request, TooLong):
            groups.append(RolloutGroup(task, without_answers(task, request, collection)))
        else:
            siblings = [completion for _, completion in sorted(answers[place].items())]
            mean = sum(len(one.token_ids) for one in siblings) // len(siblings)
            state.lengths.record(task, len(request.prompt_token_ids), mean)
            rollouts = (
                rollout_of(task, request, one, scores[place, number], collection) for number, one in enumerate(siblings)
            )
            groups.append(RolloutGroup(task, tuple(rollouts)))
    put_back = tuple(drawn[place] for place in lost)
    tasks.put_back(put_back)
    kept = [group for group in groups if keeps(group)]
    counted = {"rollout/put_back_groups": float(len(lost)), "rollout/drawn_again_groups": float(min(again, prompts))}
    if race is not None:
        counted["rollout/longest_kept_answer"] = race.longest_kept
    return CollectedBatch(
        groups, kept, 0, of_order=tasks.metrics, put_back=put_back, of_overdraw=counted, session=state.session
    )


def _draw(
    asked: Mapping[int, tuple[Task, GenerationRequest | TooLong]],
    scorer: ScoresAll,
    workers: Generates,
    race: Race | None,
    state: Collecting,
) -> tuple[dict[int, Answers], dict[tuple[int, int], Score]]:
    """Answers of every group that is kept, and of some that are not, by place; and their scores."""
    requests = {place: one for place, (_, one) in asked.items() if isinstance(one, GenerationRequest)}
    place_of = {request.id: place for place, request in requests.items()}
    answers: dict[int, Answers] = {place: {} for place in requests}
    with begin_round(scorer) as scoring:
        with workers.session(state.end_session) as session:
            for request in requests.values():
                session.submit(request)
            while session.has_work:
                for event in session.events(WAIT_SECONDS if scoring.is_done else SCORING_SECONDS):
                    if event.completion is None:
                        continue
                    place = place_of[event.request_id]
                    answers[place][event.sibling] = event.completion
                    scoring.submit((place, event.sibling), asked[place][0], event.completion.text)
                    if race is not None and len(answers[place]) == requests[place].num_siblings:
                        race.end(place, max(len(one.token_ids) for one in answers[place].values()))
                scoring.advance()
                for place in [] if race is None else _lost(session, race, place_of, answers):
                    session.cancel(requests[place].id)
            if race is not None and isinstance(session, ForgetsAnswers):
                for place in race.losers:  # no file has their answers, so a resumed run makes no drafts from them
                    if place in requests:
                        session.forget(requests[place])
        return answers, scoring.finish()


def _lost(
    session: RolloutSession, race: Race, place_of: Mapping[str, int], answers: Mapping[int, Answers]
) -> Iterator[int]:
    """The places of unfinished groups that can't be kept any more."""
    if math.isinf(race.bound):
        return
    if not isinstance(session, KnowsLengths):
        raise UserError("rollout.overdraw: this engine does not say how long unfinished answers are; set it to 1")
    for name, tokens in session.answer_lengths().items():
        place = place_of[name]
        ended = max((len(one.token_ids) - 1 for one in answers[place].values()), default=0)
        if race.is_lost(place, max(tokens, ended)):
            yield place
