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

from collections.abc import Callable, Sequence

from octetrl.environments.scoring_round import RestartingScorer, ScoresAll, TimedScorer
from octetrl.environments.turns.dialogue import Dialogues
from octetrl.records import GenerationRequest, RolloutGroup, Task
from octetrl.rollout.collect_answers import collect_answers
from octetrl.rollout.collect_conversations import collect_conversations
from octetrl.rollout.collected import CollectedBatch as CollectedBatch
from octetrl.rollout.collected import Collecting
from octetrl.rollout.collection_settings import CollectionSettings, Generates, Tasks
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.rollout.first_requests import TooLong, request_of, without_answers


def collect_batch(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    environment: ScoresAll | Dialogues,
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


def reward_times(environment: ScoresAll | Dialogues) -> dict[str, float]:
    """`time/reward`: seconds that the collection waited for rewards after sampling. `time/reward_slowest`: one call.
    Empty for scorers that use the engine's device. A collection calls it once, at its end."""
    scorer = environment.scorer if isinstance(environment, Dialogues) else environment
    if not isinstance(scorer, TimedScorer):
        return {}
    taken = scorer.times.take()
    return {"time/reward": taken.waited} | ({"time/reward_slowest": taken.slowest} if taken.slowest else {})


def _reward_restarts(environment: ScoresAll | Dialogues) -> int:
    """Since the run began."""
    scorer = environment.scorer if isinstance(environment, Dialogues) else environment
    return scorer.restarts if isinstance(scorer, RestartingScorer) else 0


def collect_groups(
    tasks: Sequence[Task],
    environment: ScoresAll | Dialogues,
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
