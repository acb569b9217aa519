"""Callbacks of a run: what they see and when, how they end it, what their errors do, and early stopping."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import octetrl
from octetrl.run.callbacks import Callbacks, EarlyStopping, load_callbacks
from octetrl.run.loop import train
from octetrl.run.state import StepResult
from octetrl.system.errors import RunFailed, UserError
from octetrl.telemetry.ending import read_ending, read_where
from octetrl.trainer.checkpoint import check_complete, step_of
from tests.e2e.tiny_run import tiny_recipe

pytestmark = pytest.mark.usefixtures("rewards_here")

CHANGES = {"steps": 9, "checkpoint.every": 2, "evaluation.every": 3, "logging.console": "quiet"}


class Seen(octetrl.Callback):
    """Writes down every call, and stops the run after a step."""

    def __init__(self, stop_after: int = 0, fail_after: int = 0) -> None:
        self.calls: list[tuple[str, int]] = []
        self.views: dict[tuple[str, int], octetrl.RunView] = {}
        self._stop_after, self._fail_after = stop_after, fail_after

    def _see(self, hook: str, view: octetrl.RunView) -> None:
        self.calls.append((hook, view.step))
        self.views[hook, view.step] = view
        if hook == "checkpoint":
            assert view.checkpoint is not None and check_complete(view.checkpoint)

    def on_begin(self, view: octetrl.RunView) -> None:
        self._see("begin", view)

    def on_step(self, view: octetrl.RunView) -> None:
        self._see("step", view)
        if view.step == self._fail_after:
            raise ValueError("no luck")
        if view.step == self._stop_after:
            view.stop("it is enough")

    def on_evaluation(self, view: octetrl.RunView) -> None:
        self._see("evaluation", view)

    def on_checkpoint(self, view: octetrl.RunView) -> None:
        self._see("checkpoint", view)

    def on_end(self, view: octetrl.RunView) -> None:
        self._see("end", view)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_callback_sees_every_step_ends_the_run_and_changes_no_bit(model: Path, tmp_path: Path) -> None:
    seen, again = Seen(stop_after=5), Seen()
    recipe = tiny_recipe(model, tmp_path / "run", CHANGES)
    train(recipe, callbacks=[seen])
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    without_checkpoints = [call for call in seen.calls if call[0] != "checkpoint"]
    steps = [("step", step) for step in range(1, 6)]
    assert without_checkpoints == [("begin", 0), *steps[:3], ("evaluation", 3), *steps[3:], ("end", 5)]
    saved = [seen.views[call].checkpoint for call in seen.calls if call[0] == "checkpoint"]
    assert [step_of(folder) for folder in saved if folder is not None][-1] == 5
    view = seen.views["step", 3]
    assert view.metrics["loss"] == lines[2]["loss"] and len(view.groups) == 2
    assert len(seen.views["evaluation", 3].groups) == 4 and view.folder == tmp_path / "run"
    with pytest.raises(TypeError):
        view.metrics["loss"] = 0.0  # type: ignore[index]
    ending = read_ending(read_where(tmp_path / "run"))
    assert ending is not None and ending.how == "finished" and "it is enough" in ending.why

    train(recipe, resume=True, callbacks=[again])
    assert again.calls[0] == ("begin", 5) and [past["step"] for past in again.views["begin", 5].past] == [1, 2, 3, 4, 5]
    assert [call for call in again.calls if call[0] == "step"] == [("step", step) for step in range(6, 10)]
    train(tiny_recipe(model, tmp_path / "plain", CHANGES))
    losses = [[line["loss"] for line in lines_of(tmp_path / name)] for name in ("run", "plain")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()])
def test_a_callback_that_ends_the_process_loses_no_step(error: BaseException, model: Path, tmp_path: Path) -> None:
    class Exits(octetrl.Callback):
        def on_step(self, view: octetrl.RunView) -> None:
            view.groups[0].task.metadata["changed"] = True  # type: ignore[index]  # of a copy
            if view.step == 2:
                raise error

    with pytest.raises((RunFailed, KeyboardInterrupt)):
        train(tiny_recipe(model, tmp_path / "run", CHANGES | {"checkpoint.every": 0}), callbacks=[Exits()])
    assert step_of(max((tmp_path / "run" / "checkpoints").glob("step_*"))) == 2


def test_a_callback_that_fails_ends_the_run_with_its_step_saved(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"Seen.on_step.*step 3: ValueError: no luck"):
        train(tiny_recipe(model, tmp_path / "run", CHANGES), callbacks=[Seen(fail_after=3)])
    assert step_of(max((tmp_path / "run" / "checkpoints").glob("step_*"))) == 3
    assert len(lines_of(tmp_path / "run")) >= 2


@pytest.mark.parametrize(
    ("values", "options", "stops_after"),
    [
        ([0.1, 0.2, 0.2, 0.15], {"patience": 2}, 4),
        ([0.1, 0.2, None, 0.2, None, 0.3, 0.3, 0.3], {"patience": 2}, 8),
        ([0.1, 0.2, 0.25, 0.28, 0.31], {"patience": 3, "min_delta": 0.1}, None),
        ([0.1, 0.21, 0.25, 0.28, 0.3], {"patience": 3, "min_delta": 0.1}, 5),
        ([3.0, 2.0, math.nan, 2.5, 1.0, 1.5, 1.2], {"patience": 2, "mode": "min"}, 7),
    ],
)
@pytest.mark.parametrize("resumed_after", [0, 1, 3])
def test_early_stopping_counts_values_without_improvement(
    values: list[float | None],
    options: Mapping[str, Any],
    stops_after: int | None,
    resumed_after: int,
    model: Path,
    tmp_path: Path,
) -> None:
    """The same whether or not the run was resumed in between."""
    steps = [{} if value is None else {"eval/accuracy": value} for value in values]
    callbacks = Callbacks([EarlyStopping(**options)], tiny_recipe(model, tmp_path), tmp_path)
    callbacks.begin(resumed_after, steps[:resumed_after])
    stopped = None
    for number, metrics in enumerate(steps[resumed_after:], resumed_after + 1):
        callbacks.step(number, StepResult(metrics))
        if callbacks.stopped_for is not None:
            stopped = number
            break
    assert stopped == stops_after
    if stopped is not None:
        callbacks.begin(stopped, steps[:stopped])
        assert callbacks.stopped_for is not None, "it has ended already"
        callbacks.begin(stopped - 1, steps[: stopped - 1])
        assert callbacks.stopped_for is None


@pytest.mark.parametrize("resumed", [False, True])
def test_early_stopping_counts_the_evaluation_before_the_first_step(resumed: bool, model: Path, tmp_path: Path) -> None:
    callbacks = Callbacks([EarlyStopping(patience=1)], tiny_recipe(model, tmp_path), tmp_path)
    first = {"eval/accuracy": 0.9}
    callbacks.begin(0, [first] if resumed else [])
    if not resumed:
        callbacks.step(0, StepResult(first))
    callbacks.step(1, StepResult({"eval/accuracy": 0.8}))
    assert callbacks.stopped_for is not None


def test_a_run_that_early_stopping_ended_is_not_continued(model: Path, tmp_path: Path) -> None:
    """Entropy hardly moves, so no value is better by one."""
    stopping = {"early_stopping": {"metric": "entropy", "patience": 2, "min_delta": 1.0}, "evaluation.every": 0}
    recipe = tiny_recipe(model, tmp_path / "run", CHANGES | stopping)
    train(recipe)
    assert [line["step"] for line in lines_of(tmp_path / "run")] == [1, 2, 3]
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    train(recipe, resume=True)
    ending = read_ending(read_where(tmp_path / "run"))
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    assert ending is not None and ending.how == "finished" and "entropy" in ending.why


def test_a_recipes_callbacks_are_loaded_and_what_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    stopping = {"early_stopping": {"patience": 2, "metric": "reward/mean"}}
    recipe = tiny_recipe(model, tmp_path, {**stopping, "callbacks": [f"{__name__}:Seen", f"{__name__}:SEEN"]})
    first, second, third = load_callbacks(recipe)
    assert isinstance(first, EarlyStopping) and isinstance(second, Seen) and third is SEEN
    for name in ("lines_of", "Nobody", "NeedsMore"):
        with pytest.raises(UserError, match=name):
            load_callbacks(tiny_recipe(model, tmp_path, {"callbacks": [f"{__name__}:{name}"]}))
    never = [EarlyStopping(), EarlyStopping("reward/maen"), Async(), Seen]  # no evaluation, no metric, the class
    for callback in never:
        with pytest.raises(UserError):
            train(tiny_recipe(model, tmp_path / "run"), callbacks=[callback])  # type: ignore[list-item]
    for wrong in ({"patience": "3"}, {"patience": True}, {"min_delta": "a"}, {"mode": "most"}, {"metric": 3}):
        with pytest.raises(UserError):
            EarlyStopping(**wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


class Async(octetrl.Callback):
    async def on_step(self, view: octetrl.RunView) -> None:  # type: ignore[override]
        raise AssertionError


class NeedsMore(Seen):
    def __init__(self, more: int) -> None:
        super().__init__(more)


SEEN = Seen()
