"""Write a step's metrics: always to `metrics.jsonl`, and to the curves that the recipe asks for (curves.py). Write
warnings to `warnings.jsonl`.

`metrics.jsonl` has one JSON object per step, `{"step": 3, "loss": ..., ...}`, with sorted names. Floats are written so
that reading gives the same bits. Values that are not finite are written as null. A line is on the disk when `write`
returns, so write a step's line before its checkpoint. `warnings.jsonl` has what the console warned of,
`{"step": 3, "text": "..."}`, for the report. A run without warnings has no such file.

On resume, lines after the checkpoint's step and an incomplete last line are removed, and those steps run again. The
files then equal those of an uninterrupted run, except for times. The remaining lines of `metrics.jsonl` must have every
step from the first. An evaluation before the first step is a line of step 0.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from octetrl.records import Rollout, RolloutGroup
from octetrl.system.errors import UserError
from octetrl.system.files import replaced_file
from octetrl.system.text import ESCAPE, counted, escaped
from octetrl.telemetry.curves import Curves, TensorBoard, open_curves, short_reason
from octetrl.telemetry.rollouts import not_written

if TYPE_CHECKING:
    from octetrl.config.schema import LoggingConfig

METRICS_FILE, WARNINGS = "metrics.jsonl", "warnings.jsonl"
RUN_FILE = "run.json"  # which run the folder belongs to, where it ran, and how it ended
HISTORY_FILE = (
    "history.jsonl"  # fields that a resumed run changed: {"step": 32, "field": "steps", "old": 30, "new": 40}
)


# ---------------------------------------------------------------- files with a JSON object a line


class MetricsFile:
    """Writes `metrics.jsonl`. `resumed_step` is the step of the checkpoint that a run resumes from; 0: a new file."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        if path.exists() or resumed_step:
            _truncate_after(path, resumed_step)
        path.touch()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step and sync it to the disk. Raises UserError if it can't be written."""
        numbers = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        _append(self.path, json.dumps({"step": step, **numbers}, allow_nan=False))


def complete_line(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add the line of a checkpoint's step where it is missing because the disk was full when it was to be written."""
    if metrics and path.exists() and last_step(path) == step - 1:
        MetricsFile(path, step - 1).write(step, metrics)


def _of_start(lines: Sequence[bytes]) -> int:
    """1 if the first line is that of an evaluation before the first step, step 0; otherwise 0."""
    return int(bool(lines) and _step_of(lines[0]) == 0)


def start_of(path: Path) -> list[dict[str, Any]]:
    """The line of an evaluation before the first step, if the file has one."""
    lines = path.read_bytes().splitlines() if path.is_file() else []
    return [json.loads(lines[0])] if _of_start(lines) else []


def steps_until(path: Path, last: int) -> list[dict[str, Any]]:
    """Read the lines of steps 1 to `last`. Later lines are ignored, and the file is not changed.

    Raises UserError that names an invalid line, a missing step, or the step at which the file ends too early."""
    if not path.exists() and last:
        raise UserError(f"--resume: '{path}' is missing, but the run was at step {last}; restore the file")
    steps: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines() if last else []
    first = _of_start(lines)
    for number, line in enumerate(lines[first : first + last], start=1):
        step = _step_of(line)
        if step is None:
            raise UserError(
                f"{path}, line {first + number}: not one step's JSON object; restore the file to resume, put two steps"
                f" that share a line on lines of their own, or remove the checkpoints after step {len(steps)} to resume"
                " before them"
            )
        if step != number:
            raise UserError(
                f"{path}, line {first + number}: step {step} instead of step {number}; restore the missing lines to"
                f" resume, or start again in another output_dir"
            )
        steps.append(json.loads(line))
    if len(steps) != last:
        raise UserError(
            f"--resume: '{path}' ends at step {len(steps)}, but the checkpoint is of step {last}; restore the file,"
            f" or remove the checkpoints after step {len(steps)} to resume before them"
        )
    return steps


def last_step(path: Path) -> int:
    """Return the highest step with a complete line in the file. 0: there is none."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    return max((_step_of(line) or 0 for line in lines), default=0)


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that has one a line. Lines that are not one are left out."""
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):  # the latter: thousands of brackets
            continue
        if isinstance(value, dict):
            yield value


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return step if type(step) is int else None


def _append(path: Path, line: str) -> None:
    """Append a line and sync it to the disk. Raises UserError if it can't be written."""
    try:
        with path.open("a", encoding="utf-8", errors=ESCAPE) as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise not_written(path, error) from error


def _truncate_after(path: Path, resumed_step: int) -> None:
    """Cut the file after the line of `resumed_step`, and add that line's newline if it is missing."""
    steps_until(path, resumed_step)
    lines = path.read_bytes().splitlines(keepends=True)
    lines = lines[: resumed_step + _of_start(lines)] if resumed_step else []
    with path.open("r+b") as file:
        file.truncate(sum(map(len, lines)))
        if lines and not lines[-1].endswith(b"\n"):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- all of a run


class Sinks:
    """All sinks of a run in `folder`. A context manager, which closes them.

    `metrics.jsonl` is the run's record: without it the run ends. Curves that can't be written are a warning, the first
    time and at the end with their number. warn: shows one."""

    def __init__(
        self, folder: Path, resumed_step: int = 0, curves: Sequence[Curves] = (), warn: Callable[[str], None] = print
    ) -> None:
        self._metrics, self._warnings = MetricsFile(folder / METRICS_FILE, resumed_step), folder / WARNINGS
        self._curves, self._warn = curves, warn
        self._failures: Counter[str] = Counter()  # by the name of the curves
        if self._warnings.is_file():
            kept = [line for line in read_objects(self._warnings) if line.get("step", math.inf) <= resumed_step]
            with replaced_file(self._warnings, errors=ESCAPE) as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises UserError if `metrics.jsonl` can't be written."""
        self._metrics.write(step, metrics)
        for curves in self._curves:
            self._try(curves, partial(curves.write, step, metrics))

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Only TensorBoard shows texts."""
        for curves in self._curves:
            if isinstance(curves, TensorBoard) and markdown:
                self._try(curves, partial(curves.write_text, step, name, markdown))

    def write_warnings(self, step: int, texts: Iterable[str]) -> None:
        """What the console warned of until the end of this step, for the report."""
        for text in texts:
            _append(self._warnings, json.dumps({"step": step, "text": text}, ensure_ascii=False))

    def _try(self, curves: Curves, call: Callable[[], None], is_last: bool = False) -> None:
        errors = list[BaseException]()
        try:
            call()
        except Exception as raised:  # a library's, of a disk or a network
            errors.append(raised)
        for error in (*errors, *curves.late_errors()):
            if not self._failures[curves.name]:
                goes_on = "" if is_last else "; the run goes on without, and tries again each step"
                self._warn(f"{curves.name} can't be written ({short_reason(error)}){goes_on}")
            self._failures[curves.name] += 1

    def __enter__(self) -> Sinks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for curves in self._curves:
            self._try(curves, partial(curves.close, failed=error is not None), is_last=True)
        for name, count in self._failures.items():
            self._warn(f"{name}: {counted(count, 'write')} failed; metrics.jsonl has all steps")


def open_sinks(
    folder: Path,
    config: LoggingConfig,
    recipe: Mapping[str, Any],
    resumed_step: int = 0,
    warn: Callable[[str], None] = print,
    run_id: str | None = None,
) -> Sinks:
    """Open the sinks that `logging` asks for, in the run's folder. `recipe` is the resolved recipe as a dict, `run_id`
    the id of the run, by which trackers know it again.

    Raises UserError before anything is written if a tracker's client is not installed."""
    return Sinks(folder, resumed_step, open_curves(folder, config, recipe, resumed_step, run_id, warn), warn)


# ---------------------------------------------------------------- rollouts as text, for TensorBoard

LETTERS = 2_000  # most of a prompt or an answer; the middle of a longer one is left out


def sample_texts(groups: Sequence[RolloutGroup]) -> str:
    """The answers with the lowest, the middle and the highest reward, as Markdown with all texts as code. Empty if no
    rollout has a reward."""
    scored = [rollout for group in groups for rollout in group.scored]
    scored.sort(key=lambda rollout: rollout.reward or 0.0)
    if not scored:
        return ""
    places = dict.fromkeys((len(scored) - 1, len(scored) // 2, 0))  # each once
    return "\n\n".join(_shown(scored[place]) for place in places)


def _shown(rollout: Rollout) -> str:
    size = counted(rollout.num_tokens, "token")
    title = f"**reward {rollout.reward:.3f}**, {rollout.status.value}, {size}, task {rollout.task.id}"
    said = "\n\n".join(f"{by}:\n\n{as_code(text)}" for by, text in said_in(rollout))
    reference = "" if rollout.task.answer is None else f"\n\nreference answer:\n\n{as_code(rollout.task.answer)}"
    return f"{title}\n\n{as_code(rollout.task.text)}\n\n{said}{reference}\n\n---"


def said_in(rollout: Rollout) -> list[tuple[str, str]]:
    """What was said after the prompt, in order: who (`answer`, or the role of a reply) and the text."""
    said: list[tuple[str, str]] = []
    for turn in rollout.turns:
        said += [("answer", turn.completion.text), *((reply.role, reply.text) for reply in turn.replies)]
    return said


def as_code(text: str) -> str:
    """Indented, so that nothing of it is read as Markdown."""
    if len(text) > LETTERS:
        half = LETTERS // 2
        text = f"{text[:half]}\n[... {len(text) - LETTERS:,} letters ...]\n{text[-half:]}"
    return "\n".join(f"    {line}" for line in escaped(text).splitlines() or [""])
