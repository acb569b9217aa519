"""Write a step's metrics: always to `metrics.jsonl`, and to TensorBoard and wandb if the recipe asks for it. Write
warnings to `warnings.jsonl`.

`metrics.jsonl` has one JSON object per step, `{"step": 3, "loss": ..., ...}`, with sorted names. Floats are written so
that reading gives the same bits. Values that are not finite are written as null. A line is on the disk when `write`
returns, so write a step's line before its checkpoint. `warnings.jsonl` has what the console warned of,
`{"step": 3, "text": "..."}`, for the report. A run without warnings has no such file.

On resume, lines after the checkpoint's step and an incomplete last line are removed, and those steps run again. The
files then equal those of an uninterrupted run, except for times. The remaining lines of `metrics.jsonl` must have every
step from the first.

wandb is an optional dependency. Only this module imports it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octetrl.records import Rollout, RolloutGroup
from octetrl.system.errors import UserError
from octetrl.system.files import replaced_file
from octetrl.system.text import ESCAPE, counted, escaped
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


def steps_until(path: Path, last: int) -> list[dict[str, Any]]:
    """Read the lines of steps 1 to `last`. Later lines are ignored, and the file is not changed.

    Raises UserError that names an invalid line, a missing step, or the step at which the file ends too early."""
    if not path.exists() and last:
        raise UserError(f"--resume: '{path}' is missing, but the run was at step {last}; restore the file")
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines()[:last] if last else [], start=1):
        step = _step_of(line)
        if step is None:
            raise UserError(
                f"{path}, line {number}: not one step's JSON object; restore the file to resume, put two steps that"
                f" share a line on lines of their own, or remove the checkpoints after step {len(steps)} to resume"
                " before them"
            )
        if step != number:
            raise UserError(
                f"{path}, line {number}: step {step} instead of step {number}; restore the missing lines to"
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
    lines = path.read_bytes().splitlines(keepends=True)[:resumed_step]
    with path.open("r+b") as file:
        file.truncate(sum(map(len, lines)))
        if lines and not lines[-1].endswith(b"\n"):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------- curves


class Curves(Protocol):
    """Receives the metrics of each step, in ascending order of steps."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Writes scalars, the recipe and some rollouts as text, as TensorBoard events in the run's folder. A resumed run
    hides the events it will write again.

    The mismatch of each tenth of the answers is left out while it says that the log-probs are equal: twenty constant
    curves would hide the others."""

    def __init__(self, folder: Path, resumed_step: int = 0, recipe: Mapping[str, Any] | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # this import takes a second, so only runs load it

        begun = resumed_step > 0 or any(folder.glob("events.out.tfevents.*"))  # by a run without a checkpoint, too
        self._writer = SummaryWriter(str(folder), purge_step=resumed_step + 1 if begun else None)
        if recipe is not None and not begun:
            text = escaped(json.dumps(recipe, indent=2, default=str))
            self._writer.add_text("recipe", "".join(f"    {line}\n" for line in text.splitlines()), global_step=0)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            if not (name.startswith("mismatch/decile_") and value in (0.0, 1.0)):
                self._writer.add_scalar(escaped(name), value, global_step=step)

    def write_text(self, step: int, name: str, markdown: str) -> None:
        self._writer.add_text(name, markdown, global_step=step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Writes scalars to Weights & Biases. The run's id is its folder's name, so a resumed run continues its curves."""

    def __init__(self, project: str, folder: Path, recipe: Mapping[str, Any], *, begun: bool = False) -> None:
        import wandb

        self._run = wandb.init(
            project=project,
            name=folder.name,
            id=folder.resolve().name,
            dir=str(folder),
            config=dict(recipe),
            resume="allow" if begun else "never",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def missing_wandb(config: LoggingConfig) -> Iterator[str]:
    """The problem that the recipe asks for wandb and it is not installed. Imports nothing."""
    known = sys.modules["wandb"] if "wandb" in sys.modules else find_spec("wandb")
    if config.wandb_project and known is None:
        yield (
            f"logging.wandb_project: '{config.wandb_project}' needs wandb, which is not installed; pip install"
            " 'octetrl[wandb]', or leave it out: logging.wandb_project=null"
        )


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

    def _try(self, curves: Curves, call: Callable[[], None]) -> None:
        name = type(curves).__name__
        try:
            call()
        except Exception as error:  # a library's, of a disk or a network
            if not self._failures[name]:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._warn(f"{name} can't be written ({reason}); the run goes on without, and tries again each step")
            self._failures[name] += 1

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        for curves in self._curves:
            self._try(curves, curves.close)
        for name, count in self._failures.items():
            self._warn(f"{name}: {counted(count, 'write')} failed; metrics.jsonl has all steps")


def open_sinks(
    folder: Path,
    config: LoggingConfig,
    recipe: Mapping[str, Any],
    resumed_step: int = 0,
    warn: Callable[[str], None] = print,
) -> Sinks:
    """Open the sinks that `logging` asks for, in the run's folder. `recipe` is the resolved recipe as a dict.

    Raises UserError before anything is written if wandb is needed and not installed; `refuse_early` says it before."""
    for problem in missing_wandb(config):
        raise UserError(problem)
    curves: list[Curves] = []
    if config.wandb_project:
        curves.append(Wandb(config.wandb_project, folder, recipe, begun=(folder / METRICS_FILE).exists()))
    if config.tensorboard:
        curves.append(TensorBoard(folder, resumed_step, recipe))
    return Sinks(folder, resumed_step, curves, warn)


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
