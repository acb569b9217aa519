"""An evaluation on held-out tasks: during a run, and of runs or models given by name.

The result is an `EvalReport` (telemetry/eval_report.py). Completions are sampled with the same seeds every time. So
only the policy changes from one evaluation to the next, and compared models use the same random numbers.

During a run it does not affect training. Requests have their own seeds, the order of tasks does not advance, and the
engine forgets the prompts. The global random generators, which a user's environment may use, are restored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.environments.python_object import Given
from octetrl.records import Task
from octetrl.rollout.collect import collect_groups, times_of
from octetrl.rollout.collected import Collecting
from octetrl.run.build import build_run
from octetrl.run.device import generators_put_back
from octetrl.run.environment import NOTHING_GIVEN
from octetrl.run.plain_tasks import with_plain_tasks
from octetrl.run.state import Run
from octetrl.run.trained_model import checkpoint_step, read_model, refuse_pruned, trained_model, weights_folder
from octetrl.system.errors import UserError
from octetrl.telemetry.eval_report import EvalReport, Scoring


def evaluate(run: Run, tasks: Sequence[Task] | None = None) -> EvalReport:
    """Evaluates `tasks` (None: the held-out ones) with the published weights."""
    config = run.config
    if tasks is None:
        with generators_put_back():  # a user's task may draw when its prompt is read
            tasks = run.taskset.held_out()
    if not tasks:
        raise UserError("environment.eval_size is 0, so no task is held out to evaluate on; set it above 0")
    sampling = replace(
        run.collection.sampling,
        temperature=config.evaluation.temperature,
        max_new_tokens=config.evaluation.max_new_tokens or config.rollout.max_new_tokens,
    )
    collection = replace(run.collection, sampling=sampling, group_size=config.evaluation.samples, step=0)
    state = Collecting()
    with run.console.phase("evaluate"), generators_put_back():
        groups = with_plain_tasks(collect_groups(tasks, run.rewards, run.workers, collection, state))
        run.workers.forget_prefixes()  # so that a step is the same whether an evaluation came before it or not
    times = times_of(run.rewards)
    if times is not None:
        times.forget()
    scoring = Scoring(config.evaluation.k, config.evaluation.right_from, config.seed)
    sampled = {} if state.session is None else state.session.named()
    return EvalReport(groups, scoring, sampled.get("rollout/tokens_per_second", 0.0))


def evaluate_checkpoint(
    target: str, recipe: Recipe, *, all_tasks: bool = False, given: Given = NOTHING_GIVEN
) -> EvalReport:
    """Evaluate a run folder (its last checkpoint), a checkpoint, or a model folder by the recipe's environment.

    all_tasks: every task of the environment, not only those held out. given: as of `build_run`.
    """

    def build(folder: Path) -> tuple[Run, int]:
        model = recipe.model.model_copy(update={"preset": None, "init": "pretrained", **trained_model(folder)})
        run = build_run(recipe.model_copy(update={"model": model}), trains=False, given=given)
        try:
            refuse_pruned(folder)
        except UserError:
            run.close()
            raise
        return run, checkpoint_step(folder)

    run, step = read_model(target, build)
    try:
        tasks = run.taskset.all_tasks() if all_tasks else run.taskset.held_out()
        if run.workers.needs_calibration:
            chat, longest = run.collection.chat, recipe.model.context_length
            run.workers.calibrate([chat.of(task).first_prompt_tokens(task.prompt, longest) for task in tasks])
        return replace(evaluate(run, tasks), step=step)
    finally:
        run.close()


def evaluate_targets(targets: Sequence[str], recipe: Recipe, *, all_tasks: bool = False) -> dict[str, EvalReport]:
    """Calls `evaluate_checkpoint` for each target in turn, after checking that all exist."""
    for target in targets:
        weights_folder(Path(target))
    return {target: evaluate_checkpoint(target, recipe, all_tasks=all_tasks) for target in targets}
