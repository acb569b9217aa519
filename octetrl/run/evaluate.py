"""Accuracy on held-out tasks: during a run, and of a run or model given by name.

Accuracy is the mean reward over completions that have one, `evaluation.samples` a task. Every status is counted beside
it, so that a broken reward shows as missing scores and not as a lower accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octetrl.config.errors import UserError
from octetrl.config.schema import Recipe
from octetrl.records import RolloutGroup, RolloutStatus
from octetrl.rollout.collect import collect_groups, count_statuses
from octetrl.run.build import Run, build_run
from octetrl.run.resume import trained_model, weights_folder


@dataclass(frozen=True, slots=True)
class EvalReport:
    """`accuracy` is None when no completion could be scored."""

    accuracy: float | None
    tasks: int
    counts: Mapping[RolloutStatus, int]
    mean_length: float
    tokens_per_second: float

    @property
    def metrics(self) -> dict[str, float]:
        numbers = {
            "eval/tasks": float(self.tasks),
            "eval/mean_length": self.mean_length,
            "eval/tokens_per_second": self.tokens_per_second,
        }
        if self.accuracy is not None:
            numbers["eval/accuracy"] = self.accuracy
        for status, count in self.counts.items():
            if status is not RolloutStatus.SCORED:
                numbers[f"eval/{status.value}"] = float(count)
        return numbers


def evaluate(run: Run) -> EvalReport:
    """The held-out tasks with the weights published now. The same seeds every time: only the policy changes."""
    config = run.config
    if not config.environment.eval_size:
        raise UserError("environment.eval_size is 0, so no task is held out to evaluate on; set it above 0")
    sampling = replace(
        run.base_collection.sampling,
        temperature=config.evaluation.temperature,
        max_new_tokens=config.evaluation.max_new_tokens or config.rollout.max_new_tokens,
    )
    collection = replace(
        run.base_collection, sampling=sampling, group_size=config.evaluation.samples, step=0, lengths={}
    )
    with run.spans("evaluate"):
        groups = collect_groups(run.taskset.held_out(), run.rewards, run.workers, collection)
    run.workers.forget_prefixes()  # so that a step is the same whether an evaluation came before it or not
    return _report(groups, run.workers.rollout_metrics()["rollout/tokens_per_second"])


def _report(groups: list[RolloutGroup], tokens_per_second: float) -> EvalReport:
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [
        len(turn.completion.token_ids) for group in groups for rollout in group.rollouts for turn in rollout.turns
    ]
    return EvalReport(
        accuracy=sum(rewards) / len(rewards) if rewards else None,
        tasks=len(groups),
        counts=count_statuses(groups),
        mean_length=sum(lengths) / len(lengths) if lengths else 0.0,
        tokens_per_second=tokens_per_second,
    )


def evaluate_checkpoint(target: str, recipe: Recipe) -> EvalReport:
    """Evaluate a run folder (its last checkpoint), a checkpoint, or a model folder by the recipe's environment."""
    trained = trained_model(weights_folder(Path(target)))
    model = recipe.model.model_copy(update={"preset": None, "init": "pretrained", **trained})
    run = build_run(recipe.model_copy(update={"model": model}), trains=False)
    try:
        if run.workers.needs_calibration:
            chat = run.base_collection.chat
            run.workers.calibrate([chat.prompt_tokens(task.prompt) for task in run.taskset.held_out()])
        return evaluate(run)
    finally:
        run.close()
