"""The loop around the step: set-up, timing, evaluation, limits, logging, checkpoints, and saving an interrupted run.

The order within a step is: run it, evaluate if due, copy its state if a checkpoint is due, write its metrics, begin to
write the checkpoint, and then check the limits that may end the run. The run folder therefore records why a run ended.
The checkpoint is written while the next step runs (checkpoints.py). After Ctrl-C the step ends and the run is saved. If
a step is interrupted (an exception, a second Ctrl-C), the run is saved as the last whole step left it, unless the
weights were being changed at that moment. Numbers that are not finite end the run without saving; the error names the
last checkpoint from before.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.environments.python_object import Given, folders_of
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.records import RolloutGroup, joined
from octetrl.run.build import build_run
from octetrl.run.callbacks import Callback, Callbacks
from octetrl.run.checkpoints import Checkpoints
from octetrl.run.environment import NOTHING_GIVEN
from octetrl.run.evaluate import calibrate, evaluate, evaluate_rows
from octetrl.run.folder.journal import NO_FILES, Journal, check_failures
from octetrl.run.folder.layout import CHECKPOINTS, RECIPE_FILE
from octetrl.run.folder.output_folder import OutputFolder
from octetrl.run.health import EmptySteps, SlowRewards, SoundCheckpoints
from octetrl.run.recipe_files import Resume, has_run, module_names, with_found_model
from octetrl.run.report import banner, in_force, last_screen, leave_report
from octetrl.run.resume import Cursor, branch, remember_answers, restore
from octetrl.run.state import Run, StepResult
from octetrl.system.errors import UserError
from octetrl.system.process import StopRequest, terminable
from octetrl.telemetry.console import Console, keeps_writing
from octetrl.telemetry.ending import CALLBACKS, MODULES, ending_of, reopen, write_ending
from octetrl.telemetry.metrics import slowest_workers
from octetrl.telemetry.mismatch import MismatchGate, kv_saturation_warning
from octetrl.telemetry.notify import notifying
from octetrl.telemetry.sinks import (
    METRICS_FILE,
    Sinks,
    complete_line,
    last_step,
    open_sinks,
    sample_texts,
    start_of,
    steps_until,
)
from octetrl.trainer.checkpoint import check_complete, latest_of, step_of
from octetrl.workers.kernel_paths import FallbackWatch
from octetrl.workers.team import WorkerLost

SHOWN_SAMPLES = 20  # steps whose rollouts TensorBoard shows


def train(
    recipe: Recipe,
    resume: Resume = False,
    given: Given = NOTHING_GIVEN,
    *,
    allowed: Collection[str] = (),
    optimizer_of: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> None:
    """Run a recipe to its last step. Raises UserError for bad input, RunFailed when the run fails.

    resume: "auto" starts where the folder has no run, and does nothing where the run has finished. given: what the
    recipe names as `given:NAME` (environments/python_object.py). allowed: fields that differ from those
    of the run that is resumed (allowed_changes.py). optimizer_of: a run, RUN@STEP or checkpoint; a new run begins with
    its weights and optimizer. callbacks: after the recipe's (callbacks.py).
    """
    recipe = with_found_model(recipe)
    callers = Callbacks.of(recipe, Path(recipe.output_dir), callbacks)
    is_auto, resume = resume == "auto", has_run(Path(recipe.output_dir)) if resume == "auto" else bool(resume)
    with terminable(), OutputFolder(recipe, resume=resume, allowed=allowed) as folder, keeps_writing(folder.path):
        console = Console(recipe.logging.console, recipe.steps)
        if is_auto and (ending := folder.finished()) is not None:
            return console.note(f"nothing is left to do: the run in {recipe.output_dir} has finished{ending}")
        if lacking := [name for name in folder.given_callbacks() if name not in callers.given]:
            console.note(f"callbacks: the run goes on without {', '.join(lacking)}, which it began with in Python")
        restarts = recipe.cluster.max_restarts
        with notifying(recipe.logging.notify, folder.path, console.warn) as callers.warned:
            while True:
                try:
                    return _train(recipe, folder, given, callers, resume=resume, optimizer_of=optimizer_of)
                except WorkerLost as lost:
                    if not restarts:
                        raise WorkerLost(f"{lost}\n  {after_loss(folder.path, folder.run_id)}") from lost
                    restarts, resume = restarts - 1, True
                    with suppress(OSError):
                        reopen(folder.path)
                    console.warn(f"{lost}\n  building all workers again")
                    callers.warned(last_step(folder.path / METRICS_FILE), [str(lost)])
                except BaseException as error:  # also while the workers are built again
                    _leave_ending(folder.path, error)
                    raise


def after_loss(folder: Path, run_id: str | None) -> str:
    """What a run that lost a worker leaves, and how it continues."""
    if not (folder / RECIPE_FILE).exists():
        return "the run had not begun; start it again"
    last = latest_of(folder / CHECKPOINTS, run_id)
    how = "continue with --resume, or give cluster.max_restarts"
    if last is None:
        return f"no checkpoint is there yet: {how}, and the run begins again at step 1"
    return f"the last checkpoint is step {step_of(last)}, in {folder / CHECKPOINTS}: {how}"


def _train(
    recipe: Recipe,
    folder: OutputFolder,
    given: Given,
    callbacks: Callbacks,
    *,
    resume: bool,
    optimizer_of: str | None = None,
) -> None:
    """The steps after the last checkpoint, with everything built for them."""
    checkpoints = Checkpoints(folder.path / CHECKPOINTS, recipe.checkpoint, folder.run_id)
    last = checkpoints.latest() if resume else None
    start = 0 if last is None else step_of(last)
    if recipe.epochs is None:
        _refuse_fewer_steps(recipe, start)
    if last is not None:
        manifest = check_complete(last)  # refused before anything is built
        complete_line(folder.path / METRICS_FILE, start, manifest["metrics"])
    past = steps_until(folder.path / METRICS_FILE, start)  # refused before anything is cut off
    checkpoints.take_store(start)
    run = build_run(recipe, given=given, check_contents=folder.check_contents)
    recipe = run.config  # with the steps of its epochs
    try:
        _refuse_fewer_steps(recipe, start)
        if last is not None:
            restore(run, last, has_changed=folder.has_changed_contents(start), resamples=folder.resamples(start))
            rest = "; no step is left to do" if start == recipe.steps else ""
            run.console.note(f"resumed after step {start} from {checkpoints.folder}{rest}")
            remember_answers(run, folder.path, start)
        elif resume:
            run.console.note("no checkpoint is there yet: the run begins again at step 1")
        if last is None and optimizer_of is not None:
            run.console.note(branch(run, optimizer_of))
        found = {CALLBACKS: callbacks.given, MODULES: folders_of(module_names(recipe))}
        folder.keep({**in_force(recipe), **found}, recipe)
        if start == recipe.steps:
            _leave_ending(folder.path, None)  # no later error makes it a run that was stopped
        run.console.rows(*banner(run))
        journal = Journal.of(recipe, folder.path if recipe.logging.rollouts else None, start)
        as_json = recipe.model_dump(mode="json")
        sinks = open_sinks(folder.path, recipe.logging, as_json, start, run.console.warn, folder.run_id)
        with sinks, run.console.steps(start, past):
            callbacks.begin(start, [*(start_of(folder.path / METRICS_FILE) if start else ()), *past])
            if recipe.evaluation.on_start and not start:
                _evaluate_first(run, journal, sinks, callbacks)
            if 0 < start < recipe.steps and callbacks.stopped_for is not None:
                how = "to go on, change what stopped it, such as early_stopping=null"
                run.console.note(f"no step is left to do: it ended after step {start}, {callbacks.stopped_for}; {how}")
            _run_steps(run, start, journal, sinks, checkpoints, past, callbacks)
            callbacks.checkpoint(checkpoints.written())
            callbacks.end()
        _leave_ending(folder.path, None, callbacks.stopped_for)
        run.console.rows(*last_screen(folder.path, recipe))
    except BaseException as error:
        _leave_ending(folder.path, error)
        raise
    finally:
        run.close()
        leave_report(folder.path, run.console)
        checkpoints.close()


def _refuse_fewer_steps(recipe: Recipe, start: int) -> None:
    if start > recipe.steps:
        raise UserError(f"steps: {recipe.steps}, but the run has {start} steps already; give a larger number")


def _leave_ending(folder: Path, error: BaseException | None, stopped_for: str | None = None) -> None:
    """In the run folder, for `octetrl status` and the report. An earlier ending stays, so a finished run stays
    finished. A full disk does not replace the run's own error."""
    with suppress(OSError, RecursionError):
        write_ending(folder, ending_of(error, stopped_for))


def _run_steps(
    run: Run,
    start: int,
    journal: Journal,
    sinks: Sinks,
    checkpoints: Checkpoints,
    past: Iterable[Mapping[str, float | None]],
    callbacks: Callbacks,
) -> None:
    recipe, fallbacks = run.config, FallbackWatch()
    gate = MismatchGate(recipe.mismatch, recipe.cluster.max_staleness)
    empty, slow = EmptySteps(recipe, past), SlowRewards(run.rewards)
    sound = SoundCheckpoints(checkpoints, recipe, past)
    with StopRequest(run.console.warn) as stop, checkpoints.open(run, start):
        for step in () if start and callbacks.stopped_for is not None else range(start + 1, recipe.steps + 1):
            with _saved_if_cut_off(run, step, checkpoints, sound):
                result = one_step(run, step, journal)
            metrics = result.metrics
            with checkpoints.saved_if_failed(run, step, metrics):
                callbacks.step(step, result, checkpoints.written())
            asked = stop.asked  # a signal after this line ends the next step: this one may be written already
            is_last = asked or callbacks.stopped_for is not None or step == recipe.steps
            stop.saving = step if is_last else 0
            if is_last or (recipe.checkpoint.every and step % recipe.checkpoint.every == 0):
                with run.console.phase("checkpoint"):
                    stopped_for = checkpoints.stage(run, step, metrics, is_last=is_last)
                metrics = joined(metrics, stopped_for)
                draws_now = run.conversations is None and not run.method.draws_ahead
                if draws_now and recipe.engine.prefix_cache == "keep":
                    run.workers.forget_prefixes()  # a checkpoint has no pages, so a resumed run has none
            metrics = joined(metrics, checkpoints.figures())
            with checkpoints.saved_if_failed(run, step, metrics):
                sinks.write(step, metrics)
            is_due = is_last or step == start + 1 or step % recipe.logging.console_every == 0
            _write_samples(run, step, result, sinks)
            run.console.step(step, metrics, is_due=is_due)
            with run.console.phase("checkpoint"):
                checkpoints.write()
            stop.saving = 0
            collapse = sound.look(step, metrics)
            sound.prune()
            health = (
                sound.warning(collapse),
                gate.check(step, metrics),
                kv_saturation_warning(metrics, recipe.fp8),
                empty.warning(step, metrics),
                slow.warning(step, metrics, result.reward_times),
                fallbacks.warning(metrics),
            )
            for warning in filter(None, health):
                run.console.warn(warning)
            with checkpoints.saved_if_failed(run, step, metrics):
                sinks.write_warnings(step, callbacks.warned(step, run.console.take_warnings()))
                result.check_failures(recipe, step)
                empty.check(step, metrics)
            if asked and step < recipe.steps:
                raise stop.error
            if callbacks.stopped_for is not None:
                run.console.note(f"stopped after step {step}: {callbacks.stopped_for}")
                return


def _write_samples(run: Run, step: int, result: StepResult, sinks: Sinks) -> None:
    """Some rollouts as text, of a few steps, and of each evaluation."""
    of_step = step == 1 or step % max(1, run.config.steps // SHOWN_SAMPLES) == 0
    shown = {"rollouts": result.groups if of_step else (), "evaluation": result.evaluated}
    for name, groups in shown.items():
        if groups:
            sinks.write_text(step, name, sample_texts(groups))


def one_step(run: Run, step: int, journal: Journal = NO_FILES) -> StepResult:
    """Runs the step with its clock, and the evaluation if one is due after it."""
    began = time.perf_counter()
    calibrated = {} if run.conversations is not None else _calibrate_first(run)
    result = run.method.step(run, step, journal)
    metrics = joined(calibrated, result.metrics, {"time/step": time.perf_counter() - began})
    metrics = joined(metrics, slowest_workers(metrics))
    every, is_end = run.config.evaluation.every, run.config.holds_out_rows and step == run.config.steps
    if not is_end and (not every or step % every):
        return replace(result, metrics=metrics)
    measured, evaluated = _evaluate_after(run, step, journal)
    return replace(result, metrics=joined(metrics, measured), evaluated=evaluated)


def _evaluate_after(run: Run, step: int, journal: Journal) -> tuple[Mapping[str, float], Sequence[RolloutGroup]]:
    """The metrics and the groups of an evaluation after the step."""
    with run.method.paused() as waited:
        began = time.perf_counter()
        groups: Sequence[RolloutGroup] = ()
        if run.config.holds_out_rows:
            measured: Mapping[str, float] = evaluate_rows(run)
        else:
            report = evaluate(run)
            measured, groups = report.metrics, report.groups
            journal.record_evaluation(step, groups)
        took = {"time/evaluate": time.perf_counter() - began}
    return joined(waited, measured, took), groups


def _evaluate_first(run: Run, journal: Journal, sinks: Sinks, callbacks: Callbacks) -> None:
    """The evaluation before the first step."""
    calibrated = {} if run.conversations is not None else _calibrate_first(run)
    metrics, groups = _evaluate_after(run, 0, journal)
    metrics = joined(calibrated, metrics)
    sinks.write(0, metrics)
    run.console.step(0, metrics, is_due=False)
    check_failures(run.config, groups, "evaluation before step 1")
    callbacks.step(0, StepResult(metrics, evaluated=groups))


def _calibrate_first(run: Run) -> Mapping[str, float]:
    """Calibrates an FP8 cache before the first rollout, on the prompts of that rollout. Returns what it took."""
    if not run.workers.needs_calibration:
        return {}
    place = run.taskset.state()
    tasks = run.taskset.next_batch(run.config.rollout.prompts_per_step)
    run.taskset.restore(place)
    return calibrate(run, tasks, run.config.rollout.max_prompt_tokens)


@contextmanager
def _saved_if_cut_off(run: Run, step: int, checkpoints: Checkpoints, sound: SoundCheckpoints) -> Iterator[None]:
    """If the step is interrupted, saves the run as the step before left it, unless its weights may be the cause."""
    before = Cursor.of(run, step - 1)
    try:
        yield
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step}: {error}; {sound.last_sound(step)}") from error
    except WorkerLost as error:  # nobody is left to save
        raise WorkerLost(f"step {step}: {error}") from error
    except BaseException:
        saved = checkpoints.save_interrupted(run, before)
        run.console.warn(saved)
        raise
