"""Write a step's metrics: always to `metrics.jsonl`, and to TensorBoard and wandb if the recipe asks for it. Write
warnings to `warnings.jsonl`.

`metrics.jsonl` has one JSON object per step, `{"step": 3, "loss": ..., ...}`, with sorted names. Floats are written so
that reading gives the same bits. Values that are not finite are written as null. A line is on the disk when `write`
returns, so write a step's line before its checkpoint.

On resume, lines after the checkpoint's step and an incomplete last line are removed, and those steps run again. The
file then equals that of an uninterrupted run, except for times. The remaining lines must have every step from the
first.

wandb is an optional dependency. Only this module imports it.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octetrl.system.errors import UserError
from octetrl.system.text import counted, escaped
from octetrl.telemetry.rollouts import not_written
from octetrl.telemetry.step_lines import WARNINGS, StepLines

if TYPE_CHECKING:
    from octetrl.config.schema import LoggingConfig

METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"  # which run the folder belongs to, and where it ran


class Sink(Protocol):
    """Receives the metrics of each step, in ascending order of steps."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class MetricsFile:
    """Writes `metrics.jsonl`. `resumed_step` is the step of the checkpoint that a run resumes from; 0: a new file."""

    def __init__(self, path: Path, resumed_step: int = 0) -> None:
        self.path = path
        if path.exists() or resumed_step:
            _truncate_after(path, resumed_step)
        self._file = path.open("ab")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Append one step and sync it to the disk. Raises UserError if it can't be written."""
        numbers = {name: value if math.isfinite(value) else None for name, value in sorted(metrics.items())}
        line = json.dumps({"step": step, **numbers}, allow_nan=False).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise not_written(self.path, error) from error

    def close(self) -> None:
        with suppress(OSError):  # of a line that could not be written, of which `write` told
            self._file.close()


def complete_line(path: Path, step: int, metrics: Mapping[str, float]) -> None:
    """Add the line of a checkpoint's step where it is missing because the disk was full when it was to be written."""
    if metrics and path.exists() and last_step(path) == step - 1:
        file = MetricsFile(path, step - 1)
        file.write(step, metrics)
        file.close()


def steps_until(path: Path, last: int) -> list[dict[str, Any]]:
    """Read the lines of steps 1 to `last`. Later lines are ignored, and the file is not changed.

    Raises UserError that names an invalid line, a missing step, or the step at which the file ends too early."""
    if not path.exists() and last:
        raise UserError(f"--resume: '{path}' is missing, but the run was at step {last}; restore the file")
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().splitlines() if last else [], start=1):
        if len(steps) == last:
            break
        step = _step_of(line)
        if step is None:
            raise UserError(
                f"{path}, line {number}: not one step's JSON object; restore the file to resume, put two steps that"
                f" share a line on lines of their own, or remove the checkpoints after step {len(steps)} to resume"
                " before them"
            )
        if step != len(steps) + 1:
            raise UserError(
                f"{path}, line {number}: step {step} instead of step {len(steps) + 1}; restore the missing lines to"
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


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, TypeError, KeyError, RecursionError):  # the last: of thousands of brackets
        return None
    return step if type(step) is int else None


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


class Sinks:
    """All sinks of a run, written and closed together. Use it as a context manager.

    `metrics.jsonl` is the run's record: without it the run ends. Other sinks that fail are a warning, the first time
    and at the end with their number. warn: shows one."""

    def __init__(self, warnings: StepLines, *sinks: Sink, warn: Callable[[str], None] = print) -> None:
        self._warnings, self._sinks, self._warn = warnings, sinks, warn
        self._failures: Counter[str] = Counter()  # by the sink's name

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises UserError if `metrics.jsonl` can't be written."""
        for sink in self._sinks:
            if isinstance(sink, MetricsFile):
                sink.write(step, metrics)
            else:
                self._try(sink, partial(sink.write, step, metrics))

    def write_text(self, step: int, name: str, markdown: str) -> None:
        """Only TensorBoard shows texts."""
        for sink in self._sinks:
            if isinstance(sink, TensorBoard) and markdown:
                self._try(sink, partial(sink.write_text, step, name, markdown))

    def _try(self, sink: Sink, call: Callable[[], None]) -> None:
        name = type(sink).__name__
        try:
            call()
        except Exception as error:  # a library's, of a disk or a network
            if not self._failures[name]:
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                self._warn(f"{name} can't be written ({reason}); the run goes on without, and tries again each step")
            self._failures[name] += 1

    def write_warnings(self, step: int, texts: Iterable[str]) -> None:
        """What the console warned of until the end of this step, for the report."""
        for text in texts:
            self._warnings.write(step, text=text)

    def close(self) -> None:
        for sink in self._sinks:
            self._try(sink, sink.close)
        for name, count in self._failures.items():
            self._warn(f"{name}: {counted(count, 'write')} failed; metrics.jsonl has all steps")

    def __enter__(self) -> Sinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def missing_wandb(config: LoggingConfig) -> Iterator[str]:
    """Whether curves are asked for that need wandb, and it is not installed. Imports nothing."""
    if config.wandb_project and not _has_wandb():
        yield (
            f"logging.wandb_project: '{config.wandb_project}' needs wandb, which is not installed; pip install"
            " 'octetrl[wandb]', or leave it out: logging.wandb_project=null"
        )


def _has_wandb() -> bool:
    return sys.modules["wandb"] is not None if "wandb" in sys.modules else find_spec("wandb") is not None


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
    begun = (folder / METRICS_FILE).exists()
    wandb = Wandb(config.wandb_project, folder, recipe, begun=begun) if config.wandb_project else None
    sinks: list[Sink] = [MetricsFile(folder / METRICS_FILE, resumed_step)]
    if config.tensorboard:
        sinks.append(TensorBoard(folder, resumed_step, recipe))
    return Sinks(StepLines(folder / WARNINGS, resumed_step), *sinks, *([wandb] if wandb else []), warn=warn)
