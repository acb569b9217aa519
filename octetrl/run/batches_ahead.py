"""Batches that were generated ahead of training, and their JSON in a checkpoint (`checkpoint.batches_ahead: saved`).

A batch that is read back equals the one that was written: Python writes and reads each float without rounding. Only
tuples and sets inside a task's metadata become lists. The file has an object for each batch, in the order of the steps:

    groups    task, rollouts with their turns and completions
    kept      the places of the groups that are trained on
    counts    metrics of the groups; `metrics`: of the engines and the clock
    place     where the tasks, the lengths of answers and the random generators stood after it
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octetrl.environments.tasks import Taskset
from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.rollout.expected_lengths import ExpectedLengths
from octetrl.run.device import random_state, restore_random_state
from octetrl.system.errors import UserError

BATCHES = "batches_ahead.json"


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where the tasks, the lengths of answers and the global random generators stand after a batch. An environment may
    draw from the generators, so the next batch depends on them."""

    taskset: Mapping[str, Any]
    lengths: Mapping[str, Any]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, taskset: Taskset, lengths: ExpectedLengths) -> DataPlace:
        return cls(taskset.state(), lengths.state(), random_state())

    def put_into(self, taskset: Taskset, lengths: ExpectedLengths, *, has_changed: bool = False) -> None:
        """has_changed: whether the tasks may differ from those of then."""
        taskset.restore(self.taskset, has_changed=has_changed)
        lengths.restore(self.lengths)
        restore_random_state(self.random)


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """The groups of a step, sampled and scored, and what else the step needs of them."""

    groups: tuple[RolloutGroup, ...]  # all, in the order drawn, with plain tasks (plain_tasks.py)
    kept: tuple[RolloutGroup, ...]  # of these
    counts: Mapping[str, float]
    metrics: Mapping[str, float]
    place: DataPlace

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version that sampled one of its answers; None: nothing was sampled."""
        turns = (turn for group in self.groups for rollout in group.rollouts for turn in rollout.turns)
        return min((turn.completion.policy_version for turn in turns), default=None)


def batches_to_bytes(batches: Iterable[BufferedBatch]) -> bytes:
    """JSON in ASCII. Raises UserError if a task's metadata has a value that JSON cannot hold."""
    try:
        return json.dumps([_batch(one) for one in batches], separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint.batches_ahead: saved needs tasks whose metadata can be written as JSON, and one has a value"
            f" that cannot ({error}); use drawn_again, or give the tasks plain metadata"
        ) from error


def batches_from_json(found: Sequence[Mapping[str, Any]]) -> list[BufferedBatch]:
    """The inverse of `batches_to_bytes`, after parsing."""
    batches = []
    for one in found:
        groups = tuple(_read_group(group) for group in one["groups"])
        kept = tuple(groups[place] for place in one["kept"])
        batches.append(BufferedBatch(groups, kept, one["counts"], one["metrics"], DataPlace(**one["place"])))
    return batches


def _batch(one: BufferedBatch) -> dict[str, Any]:
    places = {id(group): place for place, group in enumerate(one.groups)}
    return {
        "groups": [_fields(group, task=_fields(group.task), rollouts=_rollouts(group)) for group in one.groups],
        "kept": [places[id(group)] for group in one.kept],
        "counts": dict(one.counts),
        "metrics": dict(one.metrics),
        "place": _fields(one.place),
    }


def _rollouts(group: RolloutGroup) -> list[dict[str, Any]]:
    return [
        _fields(rollout, task=None, turns=[_turn(turn) for turn in rollout.turns], status=rollout.status.value)
        for rollout in group.rollouts
    ]


def _turn(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    reason = completion.finish_reason.value
    return _fields(
        turn, completion=_fields(completion, finish_reason=reason), replies=[_fields(one) for one in turn.replies]
    )


def _fields(record: Any, **changed: Any) -> dict[str, Any]:
    """The fields of a record by name, with `changed` in place of some."""
    plain = {one.name: getattr(record, one.name) for one in fields(record) if one.name not in changed}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()} | changed


def _read_group(group: Mapping[str, Any]) -> RolloutGroup:
    task = Task(**group["task"])
    return RolloutGroup(task, tuple(_read_rollout(task, rollout) for rollout in group["rollouts"]))


def _read_rollout(task: Task, rollout: Mapping[str, Any]) -> Rollout:
    turns = tuple(_read_turn(turn) for turn in rollout["turns"])
    return Rollout(**{**rollout, "task": task, "turns": turns, "status": RolloutStatus(rollout["status"])})


def _read_turn(turn: Mapping[str, Any]) -> Turn:
    read = dict(turn["completion"])
    read["finish_reason"] = FinishReason(read["finish_reason"])
    for name in ("token_ids", "logprobs"):
        read[name] = tuple(read[name])
    read["updates"] = tuple((begin, version) for begin, version in read["updates"])
    replies = tuple(Reply(**reply) for reply in turn["replies"])
    return Turn(tuple(turn["prompt_token_ids"]), Completion(**read), replies)
