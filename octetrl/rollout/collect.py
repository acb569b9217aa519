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
more groups than `prompts`; all of them are trained on. With `max_refills` 0 there is no refill. `overdraw` draws more
tasks and leaves out the slowest groups instead (overdraw.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from octetrl.environments.scoring_round import RestartingScorer, ScoresAll
from octetrl.environments.turns.dialogue import Dialogues
from octetrl.records import GenerationRequest, RolloutGroup, Task
from octetrl.rollout.collect_answers import collect_answers
from octetrl.rollout.collect_conversations import collect_conversations
from octetrl.rollout.collected import CollectedBatch as CollectedBatch
from octetrl.rollout.collection_settings import CollectionSettings, Generates, Tasks
from octetrl.rollout.drive import Occupancy
from octetrl.rollout.first_requests import TooLong, request_of, without_answers
from octetrl.rollout.overdraw import collect_overdrawn


def collect_batch(
    tasks: Tasks,
    keeps: Callable[[RolloutGroup], bool],
    environment: ScoresAll | Dialogues,
    workers: Generates,
    collection: CollectionSettings,
) -> CollectedBatch:
    """Collects at least `collection.prompts` groups that are kept, or as many as `collection.max_refills` refills
    give."""
    if collection.overdraw > 1.0:
        assert not isinstance(environment, Dialogues), "`refuse_for_turns` comes first"
        before = _reward_restarts(environment)
        batch = collect_overdrawn(tasks, keeps, environment, workers, collection)
        return replace(batch, reward_restarts=_reward_restarts(environment) - before)
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
    return CollectedBatch(groups, kept, draws - 1, occupancy, _reward_restarts(environment) - restarts, tasks.metrics)


def _reward_restarts(environment: ScoresAll | Dialogues) -> int:
    """Since the run began."""
    scorer = environment.scorer if isinstance(environment, Dialogues) else environment
    return scorer.restarts if isinstance(scorer, RestartingScorer) else 0


def collect_groups(
    tasks: Sequence[Task], environment: ScoresAll | Dialogues, workers: Generates, collection: CollectionSettings
) -> list[RolloutGroup]:
    """`group_size` rollouts of each task, scored, in the order of `tasks`."""
    places = range(collection.first_place, collection.first_place + len(tasks))
    requests = [request_of(task, place, collection) for place, task in zip(places, tasks, strict=True)]
    answerable = [
        (place, task, request)
        for place, task, request in zip(places, tasks, requests, strict=True)
        if isinstance(request, GenerationRequest)
    ]
    if isinstance(environment, Dialogues):
        rollouts = collect_conversations(answerable, environment, workers, collection)
    else:
        rollouts = collect_answers(answerable, environment, workers, collection)
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
