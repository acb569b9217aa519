"""Show a step's metrics elsewhere: in TensorBoard, and in experiment trackers by their own clients.

`logging.report_to` names the trackers: Weights & Biases, MLflow, trackio, SwanLab. Each is an optional dependency that
only this module imports. Their environment variables choose the server, the key and the offline mode. Each tracker has
a thread of its own, so neither a slow server nor a full disk can hold up a step.

A resumed run continues its run there. W&B and SwanLab know it by the id of run.json, MLflow by a tag with this id,
trackio by its name.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Protocol

from octetrl.system.errors import UserError
from octetrl.system.text import counted, escaped

if TYPE_CHECKING:
    from octetrl.config.schema import LoggingConfig

STARTING, CLOSING = 30.0, 60.0  # seconds that a run waits for a tracker at its start and at its end
RUN_TAG = "octetrl_run"  # in MLflow
_REFUSALS = (Exception, SystemExit)  # a client that ends the program would end its thread without a word


class Curves(Protocol):
    """Receives the metrics of each step, in ascending order of steps."""

    name: str

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def late_errors(self) -> Sequence[BaseException]:
        """Errors of earlier calls of `write`, each once."""
        ...

    def close(self, *, failed: bool) -> None:
        """failed: an error ended the run."""
        ...


class TensorBoard:
    """Writes scalars, the recipe and some rollouts as text, as TensorBoard events in the run's folder. A resumed run
    hides the events it will write again.

    The mismatch of each tenth of the answers is left out while it says that the log-probs are equal: twenty constant
    curves would hide the others."""

    name = "TensorBoard"

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

    def late_errors(self) -> Sequence[BaseException]:
        return ()

    def close(self, *, failed: bool = False) -> None:
        self._writer.close()


# ---------------------------------------------------------------- experiment trackers


@dataclass(frozen=True)
class TrackedRun:
    """The name, project and settings under which a tracker files a run."""

    id: str
    folder: Path
    recipe: Mapping[str, Any]
    project: str
    name: str
    group: str | None
    tags: tuple[str, ...]


class Client(Protocol):
    """A tracker's client with one run open. All calls come from one thread."""

    def __init__(self, run: TrackedRun) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def finish(self, *, failed: bool) -> None: ...


class Wandb:
    def __init__(self, run: TrackedRun) -> None:
        self._run = import_module("wandb").init(
            project=run.project,
            name=run.name,
            group=run.group,
            tags=list(run.tags),
            id=run.id,
            dir=str(run.folder),
            config=dict(run.recipe),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        self._mlflow = import_module("mlflow")
        experiment = self._mlflow.set_experiment(run.project).experiment_id
        same = f"tags.{RUN_TAG} = '{run.id}'"
        earlier = self._mlflow.search_runs([experiment], filter_string=same, max_results=1, output_format="list")
        if earlier:
            self._id = earlier[0].info.run_id
            self._mlflow.start_run(run_id=self._id)
            return
        tags = {RUN_TAG: run.id, **({"group": run.group} if run.group else {}), **dict.fromkeys(run.tags, "true")}
        self._id = self._mlflow.start_run(run_name=run.name, tags=tags).info.run_id
        self._mlflow.log_params(dict(_flat(run.recipe)), run_id=self._id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}
        self._mlflow.log_metrics(numbers, step=step, run_id=self._id)

    def finish(self, *, failed: bool) -> None:
        self._mlflow.end_run("FAILED" if failed else "FINISHED")


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        config = {**run.recipe, "tags": list(run.tags)}
        self._run = import_module("trackio").init(
            project=run.project, name=run.name, group=run.group, config=config, resume="allow", embed=False
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish()


class SwanLab:
    def __init__(self, run: TrackedRun) -> None:
        self._run = import_module("swanlab").init(
            project=run.project,
            name=run.name,
            group=run.group,
            tags=list(run.tags),
            id=run.id,
            log_dir=str(run.folder / "swanlog"),
            config=dict(run.recipe),
            resume="allow",
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(state="crashed" if failed else "success", error="see run.json" if failed else None)


CLIENTS: Mapping[str, type[Client]] = {"wandb": Wandb, "mlflow": MLflow, "trackio": Trackio, "swanlab": SwanLab}


def _flat(recipe: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a recipe by their dotted names, without those that are not set."""
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif value is not None:
            yield before + name, value


class Tracker:
    """Calls a client in a thread of its own. A client that is still starting after `STARTING` seconds gets its steps
    when it is ready."""

    def __init__(self, name: str, start: Callable[[], Client]) -> None:
        self.name = name
        self._steps: SimpleQueue[tuple[int, dict[str, float]] | None] = SimpleQueue()
        self._errors: SimpleQueue[BaseException] = SimpleQueue()
        self.answered, self._failed = Event(), False
        self._thread = Thread(target=self._work, args=(start,), name=f"octetrl-{name}", daemon=True)
        self._thread.start()
        self.answered.wait(STARTING)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._steps.put((step, dict(metrics)))

    def late_errors(self) -> Sequence[BaseException]:
        errors = []
        while True:
            try:
                errors.append(self._errors.get_nowait())
            except Empty:
                return errors

    def close(self, *, failed: bool) -> None:
        self._failed = failed
        self._steps.put(None)
        self._thread.join(CLOSING)
        if self._thread.is_alive():
            left = counted(max(0, self._steps.qsize() - 1), "step")
            raise TimeoutError(f"not done after {CLOSING:.0f} s, {left} not sent")

    def _work(self, start: Callable[[], Client]) -> None:
        try:
            client = start()
        except _REFUSALS as error:  # passed on: the run warns
            self._errors.put(error)
            return
        finally:
            self.answered.set()
        while (item := self._steps.get()) is not None:
            try:
                client.log(*item)
            except _REFUSALS as error:  # passed on: the run warns
                self._errors.put(error)
        try:
            client.finish(failed=self._failed)
        except _REFUSALS as error:  # passed on: the run warns
            self._errors.put(error)


# ---------------------------------------------------------------- what a recipe asks for


def tracker_projects(config: LoggingConfig) -> dict[str, str]:
    """The trackers that a recipe asks for, each with its project."""
    asked: dict[str, str] = dict.fromkeys(config.report_to, config.project)
    return asked if config.wandb_project is None else {**asked, "wandb": config.wandb_project}


def missing_clients(config: LoggingConfig) -> Iterator[str]:
    """A problem for each tracker of the recipe whose client is not installed. Imports nothing."""
    for name in tracker_projects(config):
        if (sys.modules[name] if name in sys.modules else find_spec(name)) is None:
            listed = name in config.report_to
            field, without = ("report_to", "take it out there") if listed else ("wandb_project", "set it to null")
            yield f"logging.{field}: {name} is not installed; pip install 'octetrl[{name}]', or {without}"


def open_curves(
    folder: Path,
    config: LoggingConfig,
    recipe: Mapping[str, Any],
    resumed_step: int,
    run_id: str | None,
    warn: Callable[[str], None],
) -> list[Curves]:
    """Open what `logging` asks for. What can't be opened is a warning, and the run does without it. Raises UserError if
    a client is not installed; `refuse_early` says it before."""
    for problem in missing_clients(config):
        raise UserError(problem)
    curves: list[Curves] = []
    name = config.run_name or folder.resolve().name
    for client, project in tracker_projects(config).items():
        run = TrackedRun(run_id or name, folder, recipe, project, name, config.group, config.tags)
        tracker = Tracker(client, partial(CLIENTS[client], run))
        if errors := tracker.late_errors():
            warn(f"{client} can't be started ({short_reason(errors[0])}); the run goes on without it")
            continue
        if not tracker.answered.is_set():
            warn(f"{client} has not started in {STARTING:.0f} s; the run goes on, and sends it the steps when it has")
        curves.append(tracker)
    if config.tensorboard:
        try:
            curves.append(TensorBoard(folder, resumed_step, recipe))
        except OSError as error:
            warn(f"{TensorBoard.name} can't be started ({short_reason(error)}); the run goes on without it")
    return curves


def short_reason(error: BaseException) -> str:
    """An error of a client on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
