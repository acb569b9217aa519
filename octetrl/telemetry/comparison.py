"""Differences between the runs of a report, and which of them would compare different tasks.

A reward says something about one set of tasks and one way to score them. Runs whose recipes differ there are compared
in length, entropy and time only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from octetrl.config.environment import EnvironmentConfig, MixedEnvironmentConfig
from octetrl.telemetry.report_data import RunRecord, last_evaluation
from octetrl.telemetry.sample_estimates import Estimate, estimate_mean, reward_range

ENOUGH = 4  # steps, for a difference with an interval
COMPARED = ("eval/accuracy", "reward/mean", "rollout/mean_length", "entropy", "time/step")
NAMED = 3  # fields of the recipe that differ
OF_TASKS = ("eval/accuracy", "reward/mean")  # comparable only on the same tasks
OF_PAIRS = (
    "Pairs are the same held-out tasks in the last evaluations, or the same steps over the last half of the runs. The"
    " intervals are over pairs. Steps of a run depend on one another, so theirs are too narrow. None covers"
    " another seed, which may differ as much."
)
LIMITS = {  # of time, memory and number: they change neither a task nor its score
    *("train_size", "eval_size", "seed", "reward_timeout_seconds", "reward_memory_mib", "reward_workers"),
    *("load_timeout_seconds", "task_timeout_seconds", "sandbox", "max_failure_share"),
}


def differences(runs: Sequence[RunRecord], titles: Mapping[str, str]) -> Iterator[tuple[str, RunRecord, Estimate]]:
    """What was compared, the run that the first one is subtracted from, and the difference. `titles`: by metric."""
    same = [run for run in runs[1:] if not changed_tasks(runs[0], run)]
    for other in same:
        if found := held_out_difference(runs[0], other):
            yield "held-out reward, task by task", other, found
    for name in COMPARED:
        for other in same if name in OF_TASKS else runs[1:]:
            if found := paired_difference(runs[0], other, name):
                yield f"{titles[name]}, step by step", other, found


def interval_text(found: Estimate, begin: str = "") -> str:
    """The interval in words. Equal differences have none: resampling them shows no spread, however few they are."""
    if found.low == found.high:
        return f"the same in all {found.tasks} pairs"
    return f"{begin}{found.low:+.4g} to {found.high:+.4g}"


def uncompared(runs: Sequence[RunRecord]) -> Iterator[str]:
    """A line for each run whose tasks are not those of the first one."""
    for other in runs[1:]:
        if changed := changed_tasks(runs[0], other):
            fields = ", ".join(changed[:NAMED]) + (f" and {len(changed) - NAMED} more" if len(changed) > NAMED else "")
            which = f"{runs[0].name} and {other.name}: " if len(runs) > 2 else ""
            yield f"{which}the tasks differ: rewards and accuracies cannot be compared ({fields})"


def changed_tasks(first: RunRecord, second: RunRecord) -> list[str]:
    """The fields of the recipes that define tasks and score and differ. Empty if one of the recipes is unknown."""
    if not first.recipe or not second.recipe:
        return []
    mine, its = _task_fields(first.recipe), _task_fields(second.recipe)
    return sorted(name for name in {**mine, **its} if mine.get(name) != its.get(name))


def _task_fields(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """What defines tasks and score, by the field's path. What a recipe leaves out has its default."""
    evaluation = recipe.get("evaluation")
    found = {"evaluation.right_from": evaluation.get("right_from", 1.0) if isinstance(evaluation, Mapping) else 1.0}
    several = recipe.get("environments")
    if isinstance(several, Mapping) and several:
        sections = {
            f"environments.{name}": _with_defaults(one, MixedEnvironmentConfig) for name, one in several.items()
        }
    else:
        sections = {"environment": _with_defaults(recipe.get("environment") or {}, EnvironmentConfig)}
    for path, section in sections.items():
        found |= {f"{path}.{name}": value for name, value in section.items() if name not in LIMITS}
    return found


def _with_defaults(section: object, kind: type[EnvironmentConfig]) -> Mapping[str, Any]:
    """All fields of the section, also if another version wrote it, whose fields may not be ours."""
    try:
        return kind.model_validate(section).model_dump(mode="json")
    except ValidationError:
        return {**kind().model_dump(mode="json"), **(section if isinstance(section, Mapping) else {})}


def paired_difference(first: RunRecord, second: RunRecord, name: str) -> Estimate | None:
    """Mean of second − first over the last half of the steps that both measured, with its interval.

    Steps of a run depend on one another, so the interval is too narrow; it says less than several seeds do."""
    mine = {step: value for step, _, value in first.series(name)}
    both = [value - mine[step] for step, _, value in second.series(name) if step in mine]
    last = both[len(both) // 2 :]
    return estimate_mean(last, seed=0) if len(last) >= ENOUGH else None


def held_out_difference(first: RunRecord, second: RunRecord) -> Estimate | None:
    """Mean of second − first over the held-out tasks that both evaluated last, by reward, with its interval.

    It says whether these two models differ. Another seed of the same recipe may differ as much."""

    def by_task(run: RunRecord) -> dict[tuple[str, str], float]:
        tasks = ((group.rows[0], group.rewards) for group in last_evaluation(run)[1] if group.rewards)
        return {(row.task_id, str(row.line["prompt"])): sum(rewards) / len(rewards) for row, rewards in tasks}

    mine, its = by_task(first), by_task(second)
    both = [value - mine[task] for task, value in its.items() if task in mine]
    low, high = reward_range(mine.values(), its.values())
    return estimate_mean(both, seed=0, within=(low - high, high - low)) if len(both) >= ENOUGH else None
