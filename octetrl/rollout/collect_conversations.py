"""Collects the rollouts of an environment with several turns, in one session, and adds scores and length penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from octetrl.environments.scoring_round import begin_round
from octetrl.environments.turns.dialogue import Dialogues
from octetrl.records import GenerationRequest, Rollout, RolloutStatus, Task
from octetrl.rollout.collected import Collecting
from octetrl.rollout.collection_settings import CollectionSettings, Generates
from octetrl.rollout.converse import ConversationSettings, with_score
from octetrl.rollout.drive import Drive
from octetrl.rollout.expected_lengths import ExpectedLengths


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
