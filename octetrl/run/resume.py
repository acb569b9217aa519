"""What a run's checkpoint holds: the state that a resumed run needs to equal an uninterrupted one.

    model-*.safetensors, config.json, tokenizer ...   the weights as a Hugging Face folder, as eval and export read it;
                                                      with LoRA adapter_config.json, adapter_model.safetensors instead
    optimizer.safetensors                             float32 masters and moments, or moments alone
    critic.safetensors, critic_optimizer.safetensors  PPO: the value model and its optimizer
    state-00001-of-00004.safetensors, .json ...       several workers, in place of weights and optimizer: the rows of
                                                      each worker; critic-00001-of-00004... likewise
    reference.safetensors                             a reference that is updated, and an adaptive KL's coefficient
    kv_scales.safetensors                             the scales for the next rollout's cache
    earlier_kv_scales.safetensors                     those of the versions before, where batches are generated ahead
    batches_ahead.json                                these batches, with `checkpoint.batches_ahead: saved`
    cursor.json                                       step, policy version, data order, answers' lengths, state of every
                                                      random generator

Everything else (request seeds, stochastic rounding, held-out tasks) follows from these and the recipe. Drafts
(`engine.speculation`) are made from answers of earlier steps, which are read from the run's `rollouts/` and
`evaluations/`.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from octetrl.models.row_shards import STEM
from octetrl.records import (
    Completion,
    EarlierAnswer,
    FinishReason,
    Reply,
    Rollout,
    RolloutGroup,
    RolloutStatus,
    Task,
    Turn,
)
from octetrl.run.state import BufferedBatch, DataPlace, Run
from octetrl.run.trained_model import weights_folder
from octetrl.system.errors import UserError
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS, Filter, matching_rows
from octetrl.trainer import checkpoint
from octetrl.workers.model_shape import model_spec

CURSOR = "cursor.json"
BATCHES = "batches_ahead.json"
OF_THE_RUN = (  # not the model's: what their names begin with
    checkpoint.OPTIMIZER,
    f"{STEM}-",  # of several workers: weights, too
    "reference.safetensors",
    "critic",
    "kv_scales.safetensors",
    "earlier_kv_scales.safetensors",
    BATCHES,
    CURSOR,
    checkpoint.MANIFEST,
)
NOT_OF_A_BRANCH = ("kv_scales.safetensors", "earlier_kv_scales.safetensors", "reference.safetensors")
SHOWN_STEPS = 3  # in the line about missing rollouts


@dataclass(frozen=True, slots=True)
class Cursor:
    """The state of a run after a whole step, without its tensors."""

    step: int
    policy_version: int
    taskset: Mapping[str, Any]
    conversations: Mapping[str, Any] | None
    lengths: Mapping[str, Any]
    random: Mapping[str, Any]

    @classmethod
    def of(cls, run: Run, step: int) -> Cursor:
        place = run.method.place(run)
        return cls(
            step=step,
            policy_version=run.workers.policy_version,
            taskset=place.taskset,
            conversations=None if run.conversations is None else run.conversations.state(),
            lengths=place.lengths,
            random=place.random,
        )

    def put_into(self, run: Run, *, has_changed: bool) -> None:
        if run.conversations is not None and self.conversations is not None:
            run.conversations.restore(self.conversations, has_changed=has_changed)
        DataPlace(self.taskset, self.lengths, self.random).put_into(run.taskset, run.lengths, has_changed=has_changed)

    def as_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def restore(run: Run, path: Path, *, has_changed: bool = False, resamples: bool = False) -> None:
    """Verifies and loads the checkpoint in `path`. Raises UserError for a damaged one.

    has_changed: whether the user allowed other contents than the run had then (contents.py). resamples: whether batches
    ahead are left out and drawn again; the trainer divides their logits by the temperature of now."""
    saved = checkpoint.load(path)
    cursor = Cursor(**saved.json(CURSOR))
    run.workers.load(saved, cursor.policy_version)
    cursor.put_into(run, has_changed=has_changed)
    if BATCHES in saved.files and not resamples:
        run.method.put_back(run, batches_from_json(saved.json(BATCHES)), cursor.step)


def branch(run: Run, source: str) -> str:
    """Loads weights, optimizer and critic of another run, for the first step of this one. Returns a note.

    Schedule, order of data and counts start from the beginning. A calibrated cache is calibrated again, and a reference
    has these weights."""
    saved = checkpoint.load(weights_folder(Path(source)))
    taken = tuple(name for name in saved.files if name not in NOT_OF_A_BRANCH)
    run.workers.load(replace(saved, files=taken), 0)
    return f"begins with weights and optimizer of {saved.folder}"


# ---------------------------------------------------------------- batches that were generated ahead


def batches_to_bytes(batches: Iterable[BufferedBatch]) -> bytes:
    """JSON in ASCII: an object for each batch, in the order of the steps; `kept` has places in `groups`. Read back, a
    batch equals the one that was written: Python writes and reads each float without rounding. Only tuples and sets in
    a task's metadata become lists.

    Raises UserError if a task's metadata has a value that JSON cannot hold."""
    try:
        return json.dumps([_batch(batch) for batch in batches], separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise UserError(
            f"checkpoint.batches_ahead: saved needs tasks whose metadata can be written as JSON, and one has a value"
            f" that cannot ({error}); use drawn_again, or give the tasks plain metadata"
        ) from error


def batches_from_json(content: Sequence[Mapping[str, Any]]) -> list[BufferedBatch]:
    """The inverse of `batches_to_bytes`, after parsing."""
    batches = []
    for batch in content:
        groups = tuple(_read_group(group) for group in batch["groups"])
        kept = tuple(groups[place] for place in batch["kept"])
        batches.append(BufferedBatch(groups, kept, batch["counts"], batch["metrics"], DataPlace(**batch["place"])))
    return batches


def _batch(batch: BufferedBatch) -> dict[str, Any]:
    places = {id(group): place for place, group in enumerate(batch.groups)}
    return {
        "groups": [_fields(group, task=_fields(group.task), rollouts=_rollouts(group)) for group in batch.groups],
        "kept": [places[id(group)] for group in batch.kept],
        "counts": dict(batch.counts),
        "metrics": dict(batch.metrics),
        "place": _fields(batch.place),
    }


def _rollouts(group: RolloutGroup) -> list[dict[str, Any]]:
    return [
        _fields(rollout, task=None, turns=[_turn(turn) for turn in rollout.turns], status=rollout.status.value)
        for rollout in group.rollouts
    ]


def _turn(turn: Turn) -> dict[str, Any]:
    completion = _fields(turn.completion, finish_reason=turn.completion.finish_reason.value)
    return _fields(turn, completion=completion, replies=[_fields(reply) for reply in turn.replies])


def _fields(record: Any, **changed: Any) -> dict[str, Any]:
    """The fields of a record by name, with `changed` in place of some."""
    plain = {one.name: getattr(record, one.name) for one in fields(record) if one.name not in changed}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in plain.items()} | changed


def _read_group(group: Mapping[str, Any]) -> RolloutGroup:
    task = Task(**group["task"]).plain()  # JSON has lists
    return RolloutGroup(task, tuple(_read_rollout(task, rollout) for rollout in group["rollouts"]))


def _read_rollout(task: Task, rollout: Mapping[str, Any]) -> Rollout:
    turns = tuple(_read_turn(turn) for turn in rollout["turns"])
    calls = tuple(rollout.get("calls", ()))
    return Rollout(
        **{**rollout, "task": task, "turns": turns, "calls": calls, "status": RolloutStatus(rollout["status"])}
    )


def _read_turn(turn: Mapping[str, Any]) -> Turn:
    read = dict(turn["completion"])
    read["finish_reason"] = FinishReason(read["finish_reason"])
    for name in ("token_ids", "logprobs"):
        read[name] = tuple(read[name])
    read["updates"] = tuple((begin, version) for begin, version in read["updates"])
    replies = tuple(Reply(**reply) for reply in turn["replies"])
    return Turn(tuple(turn["prompt_token_ids"]), Completion(**read), replies, turn.get("is_fork", False))


# ---------------------------------------------------------------- answers of earlier steps, for drafts


def remember_answers(run: Run, folder: Path, step: int) -> None:
    """Gives the workers the answers up to `step` of the run in `folder`. A run without drafts reads nothing.

    Batches that the checkpoint has from steps ahead are newer than all files. Files are read from the newest on, until
    `memory_tokens` are found. What cannot be read, or has a token that the model does not have, is named and left out:
    without drafts a rollout takes longer, and its tokens are the same."""
    speculation = run.config.engine.speculation
    if speculation.name == "none" or run.conversations is not None or not speculation.memory_tokens:
        return
    room, missing = speculation.memory_tokens, list[int]()
    newest: list[list[EarlierAnswer]] = []
    prompts = set[tuple[int, ...]]()  # the memory holds each once
    for answers in _newest_first(run, folder, step, missing):
        newest.append(answers)
        for answer in answers:
            room -= len(answer.token_ids) + (0 if answer.prompt_token_ids in prompts else len(answer.prompt_token_ids))
            prompts.add(answer.prompt_token_ids)
        if room <= 0:
            break
    if missing:
        shown = ", ".join(map(str, missing[:SHOWN_STEPS])) + (" and others" if len(missing) > SHOWN_STEPS else "")
        run.console.warn(f"{folder / ROLLOUTS} has no rollouts of step {shown}: no drafts are made from their answers")
    run.workers.remember([answer for answers in reversed(newest) for answer in answers])


def _newest_first(run: Run, folder: Path, step: int, missing: list[int]) -> Iterator[list[EarlierAnswer]]:
    """The answers of each batch of the checkpoint, then of each file. Adds the steps without rollouts to `missing`."""
    for batch in reversed(run.method.batches_after(step, waits=False)):
        turns = (turn for group in batch.groups for rollout in group.rollouts for turn in rollout.turns)
        yield [EarlierAnswer(turn.prompt_token_ids, array("i", turn.completion.token_ids)) for turn in turns]
    vocab_size = model_spec(run.config).vocab_size
    for number in range(step, 0, -1):
        paths = [folder / of / f"step_{number:06d}.jsonl" for of in (EVALUATIONS, ROLLOUTS)]  # the evaluation is newer
        if not paths[1].is_file():
            missing.append(number)
        for path in filter(Path.is_file, paths):
            yield _answers(run, path, vocab_size)


def _answers(run: Run, path: Path, vocab_size: int) -> list[EarlierAnswer]:
    try:
        answers = [answer for *_, row in matching_rows(path, Filter()) for answer in row.answers]
    except UserError as error:
        run.console.warn(f"{error}; no drafts are made from its answers")
        return []
    tokens = {token for answer in answers for token in (*answer.prompt_token_ids, *answer.token_ids)}
    unknown = [token for token in tokens if not 0 <= token < vocab_size]
    if not unknown:
        return answers
    known = f"the model's tokens are 0 to {vocab_size - 1}"
    run.console.warn(f"{path} has the token {max(unknown)}, and {known}; no drafts are made from its answers")
    return []
