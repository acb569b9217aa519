"""Read the rollouts that a run wrote, filtered and by group (telemetry/rollouts.py describes the file).

A group is selected with all its siblings if at least one of them passes the filter, because siblings help to understand
a rollout. Files may be large. The first pass finds the groups that pass, the second loads only those to be shown. If
more groups pass than were asked for, the shown ones are evenly spread.

A line may have further keys; `line` keeps them. These are optional: `components` (rewards by name), `metrics`, and
`trainer_logprobs` (the trainer's log-probs of `token_ids`).
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from octetrl.records import EarlierAnswer, RolloutStatus
from octetrl.system.errors import UserError, nearest_file, runs_in
from octetrl.system.json_file import parse_json

_FILE = re.compile(r"step_(\d+)\.jsonl")
MODEL = "model"
_REQUIRED = ("task_id", "prompt", "sibling", "status", "reward", "text")


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
        return in_rewards and has_status and self.task in row.task_id and self._is_said_in(row)

    def _is_said_in(self, row: SampledRow) -> bool:
        return not self.text or any(self.text.lower() in part.text.lower() for part in row.said)


@dataclass(frozen=True, slots=True)
class Utterance:
    """One message of a conversation."""

    by: str  # model, or the environment's role: user, tool, environment
    text: str
    tokens: slice  # its part of the row's `token_ids`; empty for a message of the environment


@dataclass(frozen=True)
class SampledRow:
    """One line of the file: one rollout."""

    line: Mapping[str, Any]

    @property
    def task_id(self) -> str:
        return str(self.line["task_id"])

    @property
    def text(self) -> str:
        return str(self.line["text"])

    @property
    def status(self) -> str:
        return str(self.line["status"])

    @property
    def reward(self) -> float | None:
        reward: float | None = self.line["reward"]
        return reward

    @property
    def token_ids(self) -> Sequence[int]:
        return self.line.get("token_ids") or ()

    @property
    def logprobs(self) -> Sequence[float]:
        """The engine's log-probs of `token_ids`; empty if the file does not have one for each token."""
        return self._one_a_token("logprobs")

    @property
    def trainer_logprobs(self) -> Sequence[float]:
        return self._one_a_token("trainer_logprobs")

    @property
    def versions_text(self) -> str:
        """Which policy versions sampled it from which token on. Empty if one has sampled all of it."""
        begins: Sequence[tuple[int, int]] = self.line.get("policy_versions") or ()
        later = [f"{version} from token {token}" for token, version in begins[1:]]
        return ", ".join([f"policy version {begins[0][1]}", *later]) if later else ""

    @property
    def components(self) -> Mapping[str, float]:
        return self.line.get("components") or {}

    @property
    def metrics(self) -> Mapping[str, float]:
        return self.line.get("metrics") or {}

    @property
    def said(self) -> list[Utterance]:
        """The messages after the prompt, in order."""
        turns = self.line.get("turns")
        if not turns:
            return [Utterance(MODEL, self.text, slice(0, len(self.token_ids)))] if self.text or self.token_ids else []
        parts, begin = [], 0
        for turn in turns:
            end = begin + turn["num_tokens"]
            parts.append(Utterance(MODEL, turn["text"], slice(begin, end)))
            parts += [Utterance(reply["role"], reply["text"], slice(end, end)) for reply in turn.get("replies") or ()]
            begin = end
        return parts

    @property
    def answers(self) -> Iterator[EarlierAnswer]:
        """What the model said in each turn, with the prompt that it had."""
        begin = 0
        for turn in self.line.get("turns") or ({**self.line, "num_tokens": len(self.token_ids)},):
            end = begin + turn["num_tokens"]
            if prompt := turn.get("prompt_token_ids"):
                yield EarlierAnswer(tuple(prompt), array("i", self.token_ids[begin:end]))
            begin = end

    def _one_a_token(self, key: str) -> Sequence[float]:
        values = self.line.get(key) or ()
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
    files = _files_of_steps(run, wanted)
    places = [
        (step, path, place)
        for step, path in files
        for place, group in enumerate(_groups(step, path))
        if any(wanted.takes(row) for row in group.rows)
    ]
    found = len(places)
    if limit is not None and found > limit:
        places = [places[number * found // limit] for number in range(limit)]
    groups = []
    for step, path in files:
        picked = {place for _, of, place in places if of == path}
        if picked:
            groups += [group for group in _groups(step, path) if group.place in picked]
    return Selection(groups, found, len(files))


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
    files = sorted((int(match[1]), path) for path in paths if (match := _FILE.fullmatch(path.name)))
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
    if not path.is_file():
        raise UserError(f"{path}: this is no file; move it away")
    try:
        with path.open(encoding="utf-8") as file:
            for number, text in enumerate(file, start=1):
                yield SampledRow(_line(text, f"{path}, line {number}"))
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text (byte {error.start}); give a file of rollouts") from error
    except OSError as error:
        raise UserError(f"{path}: can't be read ({error.strerror})") from error


def _line(text: str, where: str) -> dict[str, Any]:
    line = parse_json(text, where, "the file was changed or cut off after the run wrote it")
    missing = [key for key in _REQUIRED if not isinstance(line, dict) or key not in line]
    if missing:
        raise UserError(f"{where}: not a rollout, {', '.join(missing)} is missing; give a folder that a run wrote")
    found: dict[str, Any] = line
    for key, is_sound in _SOUND.items():
        if not is_sound(found.get(key)):
            raise UserError(f"{where}: '{key}' has a wrong value; the file was changed after the run wrote it")
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e308


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and -1 <= value < 1 << 31  # -1: a server that gives no ids


def _is_turn(turn: Any) -> bool:
    """Whether a turn has the keys that `SampledRow.said` reads."""
    return (
        isinstance(turn, dict)
        and isinstance(turn.get("num_tokens"), int)
        and isinstance(turn.get("text"), str)
        and isinstance(turn.get("reply"), str | None)
        and _each(_is_token)(turn.get("prompt_token_ids"))
        and _each(lambda one: isinstance(one, dict) and _texts(one, "role", "text"))(turn.get("replies", []))
    )


def _texts(value: Mapping[str, Any], *keys: str) -> bool:
    return all(isinstance(value.get(key), str) for key in keys)


def _each(is_sound: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return a check for lists: every item must pass `is_sound`. null counts as an empty list."""
    return lambda values: values is None or (isinstance(values, list) and all(map(is_sound, values)))


def _is_measured(values: Any) -> bool:
    """Whether the values are numbers or null, by name."""
    return values is None or (
        isinstance(values, dict) and all(one is None or _is_number(one) for one in values.values())
    )


_SOUND: Mapping[str, Callable[[Any], bool]] = {
    "sibling": _is_number,
    "status": lambda value: isinstance(value, str),
    "text": lambda value: isinstance(value, str),
    "reward": lambda value: value is None or _is_number(value),
    "prompt_token_ids": _each(_is_token),
    "token_ids": _each(_is_token),
    "logprobs": _each(_is_number),
    "trainer_logprobs": _each(_is_number),
    "policy_versions": _each(lambda one: isinstance(one, list) and len(one) == 2 and all(map(_is_number, one))),
    "components": _is_measured,
    "metrics": _is_measured,
    "turns": _each(_is_turn),
}
