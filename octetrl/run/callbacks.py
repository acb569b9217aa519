"""A user's own code beside the loop: it reads every step, and may end the run.

    class Notify(octetrl.Callback):
        def on_step(self, view: octetrl.RunView) -> None:
            if view.metrics["reward/mean"] > 0.95:
                view.stop("the tasks are learnt")

    octetrl.train(..., callbacks=[Notify(), octetrl.EarlyStopping(patience=3)])

In a recipe: `callbacks: ["my_callbacks:Notify"]` and `early_stopping: {patience: 3}`. Callbacks run in the run's
process, between two steps, in their order. What they see are copies, so that nothing they write there changes a step;
what they set in the process itself, such as torch's number of threads, can. A run that is stopped saves the step, and
counts as finished. A callback that raises ends the run, after the step is saved.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from octetrl.config.ranking import lower_is_better
from octetrl.config.schema import EarlyStoppingConfig, Recipe
from octetrl.config.validate import combination_problems
from octetrl.environments.calls import unchanged_process
from octetrl.environments.python_object import load_object
from octetrl.records import RolloutGroup
from octetrl.run.recipe_files import unknown_metric
from octetrl.system.errors import RunFailed, Terminated, UserError, error_line, error_trace, type_of

if TYPE_CHECKING:
    from octetrl.run.state import StepResult

HOOKS = ("on_begin", "on_step", "on_evaluation", "on_checkpoint", "on_end")
FIELD = "callbacks"


@dataclass(frozen=True, slots=True)
class RunView:
    """What a callback sees of a run: the step that has just ended, or the last one before it begins (0: none)."""

    recipe: Recipe
    folder: Path  # of the run
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the step, as in metrics.jsonl
    groups: Sequence[RolloutGroup] = ()  # all that the step, or the evaluation, sampled
    checkpoint: Path | None = None  # the one that is complete now
    past: Sequence[Mapping[str, float | None]] = field(default=(), repr=False)  # lines of metrics.jsonl, with step 0's
    stop: Callable[[str], None] = field(default=lambda reason: None, repr=False)
    """Ends the run after this step, for this reason, with a checkpoint."""


class Callback:
    """Base class: override what you need."""

    def on_begin(self, view: RunView) -> None:
        """Before the first step, also of a resumed run, whose earlier steps are `view.past`."""

    def on_step(self, view: RunView) -> None:
        """After each step, before its checkpoint is written."""

    def on_evaluation(self, view: RunView) -> None:
        """After a step with an evaluation, or before the first step (step 0); its metrics begin with `eval/`, and
        `view.groups` are those of held-out tasks."""

    def on_checkpoint(self, view: RunView) -> None:
        """When a checkpoint is complete on the disk, `view.checkpoint`: after a later step, or at the end."""

    def on_end(self, view: RunView) -> None:
        """After the last step and its checkpoint. Not after an error or Ctrl-C."""


class EarlyStopping(Callback):
    """Ends a run whose metric has not improved by more than `min_delta` in its last `patience` values.

    metric: of metrics.jsonl; steps without it do not count. mode: "max" if more is better, "min" if less; "auto"
    is "min" of a loss. A resumed run counts its earlier steps, and ends at once if they ended it."""

    def __init__(
        self, metric: str = "eval/accuracy", *, patience: int = 3, min_delta: float = 0.0, mode: str = "auto"
    ) -> None:
        try:
            given = {"metric": metric, "patience": patience, "min_delta": min_delta, "mode": mode}
            self._config = EarlyStoppingConfig.model_validate(given, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UserError(f"EarlyStopping: {first['loc'][0]}: {first['msg']}, not {first['input']!r}") from None
        is_loss = lower_is_better(metric)
        self._sign = -1.0 if mode == "min" or (mode == "auto" and is_loss) else 1.0
        self._best, self._since = -math.inf, 0

    def check(self, recipe: Recipe) -> None:
        """Raises UserError for what a recipe with these settings is refused for."""
        with_it = recipe.model_copy(update={"early_stopping": self._config})
        for problem in (*(one.text for one in combination_problems(with_it)), *unknown_metric(with_it)):
            raise UserError(problem)

    def on_begin(self, view: RunView) -> None:
        self._best, self._since = -math.inf, 0
        for metrics in view.past:
            self._count(metrics)
        self._stop_if_due(view)

    def on_step(self, view: RunView) -> None:
        if self._count(view.metrics):
            self._stop_if_due(view)

    def on_evaluation(self, view: RunView) -> None:
        if view.step == 0:  # of no step, so `on_step` has not seen it
            self._count(view.metrics)

    def _stop_if_due(self, view: RunView) -> None:
        if self._since >= self._config.patience:
            view.stop(
                f"{self._config.metric} has not improved in its last {self._since} values; the best is"
                f" {self._sign * self._best:.6g}"
            )

    def _count(self, metrics: Mapping[str, float | None]) -> bool:
        """Whether the step has the metric."""
        value = metrics.get(self._config.metric)
        if value is None or math.isnan(value):
            return False
        if self._sign * value > self._best + self._config.min_delta:
            self._best, self._since = self._sign * value, 0
        else:
            self._since += 1
        return True


class Callbacks:
    """Calls all callbacks of a run. `stopped_for`: why one of them ended it; None: none did."""

    def __init__(
        self, callbacks: Sequence[Callback], recipe: Recipe, folder: Path, given: Sequence[Callback] = ()
    ) -> None:
        self._callbacks = (*callbacks, *given)
        self.given = [type(callback).__qualname__ for callback in given]
        """Classes of those that no recipe names."""
        self._last = RunView(recipe, folder, 0, stop=self._stop)
        self.stopped_for: str | None = None
        self.warned: Callable[[int, Sequence[str]], list[str]] = lambda step, texts: list(texts)
        """Takes the warnings of a step, for `logging.notify`."""

    @classmethod
    def of(cls, recipe: Recipe, folder: Path, given: Iterable[Callback] = ()) -> Callbacks:
        """Those of the recipe, then those given in Python. Raises UserError."""
        own = list(map(checked, given))
        for callback in own:
            if isinstance(callback, EarlyStopping):  # that of a recipe has its rules
                callback.check(recipe)
        return cls(load_callbacks(recipe), recipe, folder, own)

    def begin(self, step: int, past: Iterable[Mapping[str, float | None]]) -> None:
        """`stopped_for` is set where a resumed run has ended already."""
        self.stopped_for = None
        self._last = replace(self._last, step=step)
        self._call("on_begin", replace(self._last, past=tuple(map(MappingProxyType, past))))

    def step(self, step: int, result: StepResult, written: Path | None = None) -> None:
        """After a step, and its evaluation if one was due; step 0 is only that. written: the last checkpoint that is
        complete."""
        self._last = replace(self._last, step=step, metrics=MappingProxyType(dict(result.metrics)))
        if self._callbacks and step:
            self._call("on_step", replace(self._last, groups=_copied(result.groups)))
        if self._callbacks and any(name.startswith("eval/") for name in result.metrics):
            self._call("on_evaluation", replace(self._last, groups=_copied(result.evaluated)))
        self.checkpoint(written)

    def checkpoint(self, folder: Path | None) -> None:
        """`folder` is complete; None or that of the last call: nothing is new."""
        if folder is not None and folder != self._last.checkpoint:
            self._last = replace(self._last, checkpoint=folder)
            self._call("on_checkpoint", self._last)

    def end(self) -> None:
        self._call("on_end", self._last)

    def _stop(self, reason: str) -> None:
        self.stopped_for = self.stopped_for or str(reason) or "a callback asked for it"

    def _call(self, hook: str, view: RunView) -> None:
        for callback in self._callbacks:
            try:
                with unchanged_process():
                    getattr(callback, hook)(view)
            except (UserError, Terminated):
                raise
            except (Exception, SystemExit, GeneratorExit) as error:
                name = type(callback).__qualname__
                raise RunFailed(
                    f"callbacks: {name}.{hook} failed at step {view.step}: {error_line(error)}\n{error_trace(error)}"
                ) from error


def _copied(groups: Sequence[RolloutGroup]) -> tuple[RolloutGroup, ...]:
    """The groups with copies of their tasks, which the run still uses."""
    copies = []
    for group in groups:
        task = deepcopy(group.task)
        copies.append(replace(group, task=task, rollouts=tuple(replace(one, task=task) for one in group.rollouts)))
    return tuple(copies)


def load_callbacks(recipe: Recipe) -> list[Callback]:
    """The recipe's callbacks. Raises UserError for a name that is none."""
    loaded: list[Callback] = []
    if recipe.early_stopping is not None:
        loaded.append(EarlyStopping(**recipe.early_stopping.model_dump()))
    for name in recipe.callbacks:
        with unchanged_process():
            thing = load_object(FIELD, name, recipe.environment.load_timeout_seconds)
            try:
                made = thing() if isinstance(thing, type) else thing
            except (Exception, SystemExit) as error:
                reason = error_line(error)
                raise UserError(f"{FIELD}: '{name}' can't be made ({reason}); give an object of it") from error
        loaded.append(checked(made, name))
    return loaded


def checked(callback: object, name: str | None = None) -> Callback:
    """`callback`, if it is one. name: under which a recipe has it. Raises UserError."""
    shown = type_of(callback) if name is None else f"'{name}'"
    if not isinstance(callback, Callback):
        raise UserError(f"{FIELD}: {shown} is no callback; give an object of a class that inherits octetrl.Callback")
    for hook in HOOKS:
        if inspect.iscoroutinefunction(getattr(callback, hook)):
            raise UserError(f"{FIELD}: {hook} of {shown} is async, and would never run; write a plain method")
    return callback
