"""The rollouts of a run: a file for each step, its writer and its reader.

`rollouts/step_NNNNNN.jsonl` has one line per rollout, siblings together:

    task_id prompt answer sibling status reward penalty answered detail trace policy_version finish_reason
    prompt_token_ids                 of the first turn
    text                             what the model said; of several turns a line each, without the replies
    token_ids logprobs               sampled tokens of all completions, concatenated
    advantage                        of each trained token, before shaping (a critic, KL in the reward); null: nothing
                                     of the rollout is trained on. Not in evaluations
    environment                      only in a run of several: its name
    policy_versions                  only if weights changed meanwhile: (token, version) where each version begins
    components metrics               only for environments that have them: each reward, unweighted, and their metrics
    turns                            only if the environment replied: prompt_token_ids, text, num_tokens and replies
                                     (role, text) of each turn
    calls                            only of agents, in the order of their answers: parent (the number of the call that
                                     it continues, from 0; null: none), messages (role, text) since then, and turn (its
                                     number in turns); if it is not trained on text, and discarded or constrained, its
                                     number of tokens

`evaluations/step_NNNNNN.jsonl` has the same lines for the held-out tasks, after the steps that were evaluated. A line
may have further keys. The reader knows one more: `trainer_logprobs`, the trainer's log-probs of `token_ids`.

**Writing.** Any text is read back exactly as it was written. Half of a surrogate pair, which UTF-8 cannot encode, is
written as its JSON escape (system/text.py). The file is written under another name, synced and renamed, so it is always
complete. A resumed run first removes the files after its checkpoint's step and then writes them again. The folder then
equals that of an uninterrupted run.

**Reading.** A group is selected with all its siblings if at least one of them passes the filter, because siblings help
to understand a rollout. Files may be large. The first pass finds the groups that pass, the second loads only those to
be shown. If more groups pass than were asked for, the shown ones are evenly spread.
"""

from __future__ import annotations

import errno
import json
import math
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Required

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # which pydantic asks for before Python 3.12

from octetrl.records import Completion, EarlierAnswer, FinishReason, Rollout, RolloutGroup, RolloutStatus
from octetrl.system.errors import UserError, nearest_file, runs_in
from octetrl.system.files import replaced_file
from octetrl.system.json_file import parse_json
from octetrl.system.text import ESCAPE, counted

ROLLOUTS, EVALUATIONS = "rollouts", "evaluations"  # folders of a run: of its steps, and of the held-out tasks
OWN_NAME = re.compile(r"step_(?P<step>\d{6,})\.jsonl(?P<partial>\.partial)?")  # others are the user's
MODEL = "model"

# ---------------------------------------------------------------- writing


class RolloutFiles:
    """Writes the rollouts of each step to a file in `folder`.

    resumed_step: step of the checkpoint that the run resumes from, 0 for a new run. Its files of later steps are
    removed, and those that were not written to the end.
    """

    def __init__(self, folder: Path, resumed_step: int = 0) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.iterdir():
            name = OWN_NAME.fullmatch(path.name)
            if name is not None and (name["partial"] or int(name["step"]) > resumed_step):
                path.unlink()

    def write(self, step: int, groups: Iterable[RolloutGroup], advantages: Mapping[int, float] | None = None) -> Path:
        """Write `step_NNNNNN.jsonl` and return its path. Raises UserError if it can't be written.

        advantages: by the id of the rollout, of those that are trained on. None: nothing is trained on."""
        try:
            return write_rollouts(self.folder, step, groups, advantages)
        except OSError as error:
            raise not_written(self.folder, error) from error


def write_rollouts(
    folder: Path, step: int, groups: Iterable[RolloutGroup], advantages: Mapping[int, float] | None = None
) -> Path:
    """Write `step_NNNNNN.jsonl` and return its path. Raises OSError, and then leaves the file as it was."""
    path = folder / f"step_{step:06d}.jsonl"
    with replaced_file(path, errors=ESCAPE) as file:
        for group in groups:
            for sibling, rollout in enumerate(group.rollouts):
                fields = _as_json(rollout, sibling)
                if advantages is not None:
                    fields["advantage"] = advantages.get(id(rollout))
                line = json.dumps(fields, ensure_ascii=False, allow_nan=False)
                file.write(line + "\n")
    return path


def not_written(path: Path, error: OSError) -> UserError:
    """What to say if a file of the run can't be written: the disk is full or broken, or the folder is gone."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(f"no space left to write '{path}': free some, then continue with --resume")
    return UserError(
        f"can't write '{path}' ({error.strerror}): see that the folder is there and the disk works, then continue with"
        " --resume"
    )


def _as_json(rollout: Rollout, sibling: int) -> dict[str, Any]:
    completions = [turn.completion for turn in rollout.turns]
    last = completions[-1] if completions else None
    fields: dict[str, Any] = {
        "task_id": rollout.task.id,
        "prompt": rollout.task.text,
        "answer": rollout.task.answer,
        "sibling": sibling,
        "status": rollout.status.value,
        "reward": rollout.reward,
        "penalty": rollout.penalty,
        "answered": rollout.answered,
        "detail": rollout.detail,
        "trace": rollout.trace,
        "text": rollout.text,
        "policy_version": last.policy_version if last else None,
        "finish_reason": FinishReason(last.finish_reason).value if last else None,
        "prompt_token_ids": list(rollout.turns[0].prompt_token_ids) if rollout.turns else [],
        "token_ids": [token for completion in completions for token in completion.token_ids],
        "logprobs": [logprob for completion in completions for logprob in completion.logprobs],
    }
    if rollout.task.environment:
        fields["environment"] = rollout.task.environment
    begins = _version_begins(completions)
    if len(begins) > 1:
        fields["policy_versions"] = begins
    if rollout.result is not None:
        fields["result"] = rollout.result
    for name in ("components", "metrics"):
        if getattr(rollout, name):
            fields[name] = dict(getattr(rollout, name))
    if rollout.calls:
        fields["calls"] = list(rollout.calls)
    if len(rollout.turns) > 1 or any(turn.replies for turn in rollout.turns):
        fields["turns"] = [
            {
                "prompt_token_ids": list(turn.prompt_token_ids),
                "num_tokens": len(turn.completion.token_ids),
                "text": turn.completion.text,
                "replies": [{"role": reply.role, "text": reply.text} for reply in turn.replies],
                **({"is_fork": True} if turn.is_fork else {}),
            }
            for turn in rollout.turns
        ]
    return fields


def _version_begins(completions: Iterable[Completion]) -> list[tuple[int, int]]:
    """(token, policy version) where another version begins to sample; tokens of all completions, concatenated."""
    begins: list[tuple[int, int]] = []
    first = 0
    for completion in completions:
        for token, version in ((0, completion.policy_version), *completion.updates):
            if not begins or begins[-1][1] != version:
                begins.append((first + token, version))
        first += len(completion.token_ids)
    return begins


# ---------------------------------------------------------------- reading

TokenId = Annotated[int, Field(ge=-1, lt=1 << 31)]  # -1: a server that gives no ids
STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


@with_config(STRICT)
class ReplyLine(TypedDict):
    role: str
    text: str


@with_config(STRICT)
class TurnLine(TypedDict, total=False):
    prompt_token_ids: list[TokenId]
    num_tokens: Required[int]
    text: Required[str]
    replies: list[ReplyLine]
    is_fork: bool


@with_config(STRICT)
class CallLine(TypedDict, total=False):
    parent: Required[int | None]
    messages: Required[list[ReplyLine]]
    turn: int
    text: str
    discarded: int
    constrained: int


@with_config(STRICT)
class RolloutLine(TypedDict, total=False):
    """What the reader uses of a line."""

    task_id: Required[str]
    prompt: Required[str]
    sibling: Required[int]
    status: Required[str]
    reward: Required[float | None]
    text: Required[str]
    advantage: float | None
    answer: str | None
    answered: str | None
    detail: str | None
    result: str
    trace: str | None
    prompt_token_ids: list[TokenId]
    token_ids: list[TokenId]
    logprobs: list[float]
    trainer_logprobs: list[float]
    policy_versions: list[Annotated[list[int], Field(min_length=2, max_length=2)]]
    components: dict[str, float | None]
    metrics: dict[str, float | None]
    turns: list[TurnLine]
    calls: list[CallLine]


_LINE = TypeAdapter(RolloutLine)


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval that includes both ends."""

    low: float = -math.inf
    high: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True, slots=True)
class Filter:
    """Conditions on a rollout. It passes if all of them hold."""

    steps: Interval = Interval()
    rewards: Interval | None = None  # excludes rollouts without a reward
    statuses: frozenset[RolloutStatus] = frozenset()  # empty: any
    task: str = ""  # part of the task's id
    text: str = ""  # part of the model's or the environment's text; case is ignored

    def takes(self, row: SampledRow) -> bool:
        in_rewards = self.rewards is None or (row.reward is not None and row.reward in self.rewards)
        has_status = not self.statuses or row.status in self.statuses
        said = not self.text or any(self.text.lower() in part.text.lower() for part in row.said)
        return in_rewards and has_status and self.task in row.task_id and said


class Span(NamedTuple):
    """A part of a token sequence. tokens: its number of tokens; None: not known."""

    is_trained: bool
    text: str
    tokens: int | None


def spans_of(token_ids: Sequence[int], mask: Sequence[bool]) -> list[tuple[bool, list[int]]]:
    """The tokens in runs that are trained on, or are not."""
    return [
        (trained, [token for _, token in run])
        for trained, run in groupby(zip(mask, token_ids, strict=True), key=itemgetter(0))
    ]


@dataclass(frozen=True, slots=True)
class Utterance:
    """One message of a conversation."""

    by: str  # model, or the environment's role: user, tool, environment; the number of an agent's call, at its head
    text: str
    tokens: slice  # its part of the row's `token_ids`; empty for a message of the environment
    depth: int = 0  # number of forks of an agent's calls above it
    is_call: bool = False  # the head of a call


@dataclass(frozen=True)
class SampledRow:
    """One line of the file: one rollout."""

    line: RolloutLine

    @property
    def task_id(self) -> str:
        return self.line["task_id"]

    @property
    def status(self) -> str:
        return self.line["status"]

    @property
    def reward(self) -> float | None:
        return self.line["reward"]

    @property
    def token_ids(self) -> Sequence[int]:
        return self.line.get("token_ids", ())

    @property
    def logprobs(self) -> Sequence[float]:
        """The engine's log-probs of `token_ids`; empty if the file does not have one for each token."""
        return self._one_a_token(self.line.get("logprobs", ()))

    @property
    def trainer_logprobs(self) -> Sequence[float]:
        return self._one_a_token(self.line.get("trainer_logprobs", ()))

    @property
    def versions_text(self) -> str:
        """Which policy versions sampled it from which token on. Empty if one has sampled all of it."""
        begins = self.line.get("policy_versions", [])
        later = [f"{version} from token {token}" for token, version in begins[1:]]
        return ", ".join([f"policy version {begins[0][1]}", *later]) if later else ""

    @property
    def components(self) -> Mapping[str, float | None]:
        return self.line.get("components", {})

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """Without an agent's counters that are 0."""
        given = self.line.get("metrics", {})
        return {name: value for name, value in given.items() if value != 0 or not name.startswith("agent/")}

    @property
    def said(self) -> list[Utterance]:
        """The messages after the prompt, in order; of an agent the tree of its calls."""
        if "calls" in self.line:
            return list(self._tree())
        parts = []
        for turn, tokens in self._turns():
            parts.append(Utterance(MODEL, turn["text"], tokens))
            end = slice(tokens.stop, tokens.stop)
            parts += [Utterance(reply["role"], reply["text"], end) for reply in turn.get("replies", ())]
        return parts

    @property
    def sequences(self) -> list[list[tuple[bool, list[int]]]]:
        """The token sequences that are its samples, one unless the history was changed: tokens that the model sampled
        (True), and those of prompts and replies between them."""
        sequences: list[list[tuple[bool, list[int]]]] = []
        for turn, tokens in self._turns():
            if turn.get("is_fork") or not sequences:
                sequences.append([])
            sequences[-1] += [(False, turn.get("prompt_token_ids", [])), (True, list(self.token_ids[tokens]))]
        return sequences

    @property
    def trained_text(self) -> str:
        """Its advantage, in words. Empty where the file does not have it."""
        if "advantage" not in self.line:
            return ""
        advantage = self.line["advantage"]
        return "not trained on" if advantage is None else f"advantage {advantage:+.3f}"

    @property
    def answers(self) -> Iterator[EarlierAnswer]:
        """What the model said in each turn, with the prompt that it had."""
        for turn, tokens in self._turns():
            if prompt := turn.get("prompt_token_ids"):
                yield EarlierAnswer(tuple(prompt), array("i", self.token_ids[tokens]))

    def _turns(self) -> Iterator[tuple[TurnLine, slice]]:
        """Each turn and its part of `token_ids`. A rollout without replies is one turn, or none if nothing was
        sampled."""
        line, begin = self.line, 0
        prompt, text = line.get("prompt_token_ids", []), line["text"]
        whole: TurnLine = {"prompt_token_ids": prompt, "num_tokens": len(self.token_ids), "text": text}
        for turn in line.get("turns") or ([whole] if text or self.token_ids else []):
            end = begin + turn["num_tokens"]
            yield turn, slice(begin, end)
            begin = end

    def _tree(self) -> Iterator[Utterance]:
        """Each call after the one that it continues, and what the program sent before it. A call's first continuation
        stands below it, others are indented."""
        calls, turns = self.line["calls"], dict(enumerate(self._turns()))
        following: dict[int | None, list[int]] = {}
        for number, call in enumerate(calls):
            following.setdefault(call["parent"], []).append(number)
        waiting = [(number, int(place > 0)) for place, number in enumerate(following.get(None, ()))][::-1]
        while waiting:
            number, depth = waiting.pop()
            call = calls[number]
            turn, tokens = turns.get(call.get("turn", -1), (None, slice(0, 0)))
            left_out = {"discarded": call.get("discarded"), "constrained": call.get("constrained")}
            fates = (f"{counted(size, 'token')}, {why}" for why, size in left_out.items() if size is not None)
            after = "" if call["parent"] is None else f"after call {call['parent'] + 1}, "
            trained = "" if self.line.get("advantage") is None else ", trained"
            head = after + next(fates, f"{counted(tokens.stop - tokens.start, 'token')}{trained}")
            yield Utterance(f"call {number + 1}", head, slice(0, 0), depth, is_call=True)
            for message in call["messages"]:
                yield Utterance(message["role"], message["text"], slice(0, 0), depth)
            answer = turn["text"] if turn else call.get("text", "")
            yield Utterance(MODEL if turn else "answer", answer, tokens, depth)
            next_ones = following.get(number, [])
            waiting += [(one, depth + int(place > 0)) for place, one in enumerate(next_ones)][::-1]

    def _one_a_token(self, values: Sequence[float]) -> Sequence[float]:
        return values if len(values) == len(self.token_ids) else ()


@dataclass(frozen=True)
class SampledGroup:
    """The siblings of one task in one step. `place` is the group's position in the step, from 0."""

    step: int
    place: int
    rows: tuple[SampledRow, ...]

    @cached_property
    def rewards(self) -> list[float]:
        return [row.reward for row in self.rows if row.reward is not None]


@dataclass(frozen=True)
class Selection:
    """The groups to show. `found` groups passed the filter in `steps` steps; `groups` are some or all of them."""

    groups: list[SampledGroup]
    found: int
    steps: int


def select(run: str | Path, wanted: Filter, limit: int | None) -> Selection:
    """Select at most `limit` groups (None: all) with a rollout that `wanted` accepts, in their order.

    run: a run folder, its folder `rollouts`, or one of the files.
    Raises UserError if there are no rollouts, or a line is invalid.
    """
    found = list(dict.fromkeys((step, place) for step, place, _ in matching_rows(run, wanted)))
    count = len(found) if limit is None else min(limit, len(found))
    shown = {found[number * len(found) // count] for number in range(count)}
    files, steps = _files_of_steps(run, wanted), {step for step, _ in shown}
    groups = (group for step, path in files if step in steps for group in _groups(step, path))
    return Selection([group for group in groups if (group.step, group.place) in shown], len(found), len(files))


def matching_rows(run: str | Path, wanted: Filter) -> Iterator[tuple[int, int, SampledRow]]:
    """Yield (step, position of the group in the step, row) for each rollout that `wanted` accepts.

    Raises UserError as `select` does."""
    for step, path in _files_of_steps(run, wanted):
        for group in _groups(step, path):
            yield from ((step, group.place, row) for row in group.rows if wanted.takes(row))


def _files_of_steps(run: str | Path, wanted: Filter) -> list[tuple[int, Path]]:
    """The files of the wanted steps. Raises UserError if there is none, with the steps that exist."""
    files = rollout_files(Path(run))
    found = [(step, path) for step, path in files if step in wanted.steps]
    if not found:
        steps = [step for step, _ in files]
        are_all = steps == list(range(steps[0], steps[-1] + 1))
        have = f"{steps[0]} to {steps[-1]}" if are_all and len(steps) > 2 else ", ".join(map(str, steps))
        raise UserError(f"--step: '{run}' has no rollouts of these steps; it has {have}")
    return found


def rollout_files(run: Path) -> list[tuple[int, Path]]:
    """List (step, file) in the order of steps."""
    if run.is_file():
        paths = [run]
    elif (run / "rollouts").is_dir():
        paths = list((run / "rollouts").iterdir())
    elif run.is_dir():
        paths = list(run.iterdir())
    else:
        raise UserError(f"'{run}' does not exist; give a run folder{nearest_file(run)}")
    names = [(OWN_NAME.fullmatch(path.name), path) for path in paths]
    files = sorted((int(name["step"]), path) for name, path in names if name is not None and not name["partial"])
    if not files:
        raise UserError(
            f"'{run}' has no rollouts (files step_NNNNNN.jsonl); give the folder of a run with at least one step and"
            f" logging.rollouts: true{runs_in(run)}"
        )
    return files


def _groups(step: int, path: Path) -> Iterator[SampledGroup]:
    place, rows = 0, list[SampledRow]()
    for row in _rows(path):
        if rows and (row.line["sibling"] == 0 or row.task_id != rows[0].task_id):
            yield SampledGroup(step, place, tuple(rows))
            place, rows = place + 1, []
        rows.append(row)
    if rows:
        yield SampledGroup(step, place, tuple(rows))


def _rows(path: Path) -> Iterator[SampledRow]:
    if not path.is_file():  # a pipe would be waited for
        raise UserError(f"{path}: this is no file; move it away")
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                yield SampledRow(_line(text, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); give a file of rollouts") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error


def _line(text: str, where: str) -> RolloutLine:
    line: RolloutLine = parse_json(text, where, "the file was changed or cut off after the run wrote it")
    try:
        _LINE.validate_python(line)
    except ValidationError as error:
        keys = ", ".join(dict.fromkeys(str(part["loc"][0]) if part["loc"] else "the object" for part in error.errors()))
        raise UserError(
            f"{where}: not a rollout, {keys} is missing or has a wrong value; give a folder that a run wrote"
        ) from None
    return line
