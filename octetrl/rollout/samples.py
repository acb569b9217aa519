"""Turns scored groups into samples with their advantages.

Advantages are relative to the rollouts that have a reward. A rollout whose reward raised or timed out is neither in the
baseline nor trained on. A rollout that the algorithm does not train on (for example an overlong one) still counts in
the baseline. One without an advantage (None) is not trained on either. Every generated token gets the advantage;
prompts and replies are masked.

A rollout whose history was changed has several segments (`Rollout.segments`). Each is a sample; a token sampled in an
earlier segment is part of the prompt of a later one, and is trained on once. An agent's are ordered by their tokens.

**Token versions.** The policy version that sampled each token, where weights changed while an answer was sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, Protocol

from octetrl.records import Completion, Rollout, RolloutGroup, Sample, Turn


class CreditAssignment(Protocol):
    """The interface that is needed of an algorithm (`algorithms/table.py`)."""

    def advantages(self, rewards: Sequence[Sequence[float]], /) -> Sequence[Sequence[float | None]]: ...

    def trains(self, rollout: Rollout, /) -> bool: ...


class TrainedRollout(NamedTuple):
    """A rollout with its advantage and the number of its group."""

    rollout: Rollout
    advantage: float
    group: int


def to_samples(groups: Sequence[RolloutGroup], algorithm: CreditAssignment, temperature: float = 1.0) -> list[Sample]:
    """A sample for each segment of each rollout of `groups`, all of one step, that has a reward and is trained on, in
    their order. temperature: of tasks that have none of their own."""
    return samples_of(trained_rollouts(groups, algorithm), temperature)


def samples_of(trained: Sequence[TrainedRollout], temperature: float = 1.0) -> list[Sample]:
    """The samples of the rollouts, a sample for each segment. temperature: of tasks that have none of their own."""
    samples = []
    differ = any(rollout.task.temperature is not None for rollout, _, _ in trained)
    for number, (rollout, advantage, group) in enumerate(trained):
        segments = [_sample(turns, advantage, group, number) for turns in rollout.segments]
        if differ:
            own = temperature if rollout.task.temperature is None else rollout.task.temperature
            segments = [replace(one, temperature=own) for one in segments]
        segments[-1] = replace(segments[-1], cut_off=rollout.status.is_cut_off)
        samples += sorted(segments, key=attrgetter("token_ids", "generator_logprobs")) if rollout.calls else segments
    return samples


def trained_rollouts(groups: Sequence[RolloutGroup], algorithm: CreditAssignment) -> list[TrainedRollout]:
    """The rollouts of a step that are trained on. It calls the objective's code, so a step calls it once."""
    advantages = algorithm.advantages([group.penalized_rewards for group in groups])
    return [
        TrainedRollout(rollout, advantage, number)
        for number, (group, of_group) in enumerate(zip(groups, advantages, strict=True))
        for rollout, advantage in zip(group.scored, of_group, strict=True)
        if advantage is not None and rollout.turns and algorithm.trains(rollout)
    ]


def _sample(turns: Sequence[Turn], advantage: float, group: int, rollout: int) -> Sample:
    loss_mask: list[bool] = []
    logprobs: list[float] = []
    for turn in turns:
        loss_mask += [False] * len(turn.prompt_token_ids) + [True] * len(turn.completion.token_ids)
        logprobs += [0.0] * len(turn.prompt_token_ids) + list(turn.completion.logprobs)
    oldest, versions = versions_of_turns(turns)
    digests = {turn.completion.precision_digest for turn in turns}
    assert len(digests) == 1, f"one rollout drawn under several precision tables: {digests}"
    token_ids = tuple(token for turn in turns for token in (*turn.prompt_token_ids, *turn.completion.token_ids))
    assert len(logprobs) == len(token_ids), f"{len(token_ids)} tokens with {len(logprobs)} log-probs"
    return Sample(
        token_ids=token_ids,
        loss_mask=tuple(loss_mask),
        generator_logprobs=tuple(logprobs),
        advantage=advantage,
        policy_version=oldest,
        precision_digest=digests.pop(),
        token_versions=versions,
        group=group,
        rollout=rollout,
    )


def versions_by_token(completion: Completion) -> list[int]:
    """The policy version that sampled each token of the completion."""
    version, start, versions = completion.policy_version, 0, []
    for begin, next_version in completion.updates:
        versions += [version] * (begin - start)
        version, start = next_version, begin
    return versions + [version] * (len(completion.token_ids) - start)


def versions_of_turns(turns: Sequence[Turn]) -> tuple[int, tuple[int, ...] | None]:
    """The oldest version that sampled a token of a conversation, and that of each of its tokens; tokens of a prompt
    have the version of the first token after them. None instead if one version sampled all."""
    versions: list[int] = []
    for turn in turns:
        versions += [turn.completion.policy_version] * len(turn.prompt_token_ids)
        versions += versions_by_token(turn.completion)
    oldest = min(versions)
    return oldest, None if oldest == max(versions) else tuple(versions)


def versions_of(sample: Sample) -> Sequence[int]:
    """The policy version of each token of a sample that an engine sampled."""
    assert sample.policy_version is not None, "no engine sampled it"
    return sample.token_versions or (sample.policy_version,) * len(sample.token_ids)
