"""What a report says about a run, read from its folder: settings, metrics by step, times, findings, and differences
from other runs. The page, the terminal and a run's last screen have it from here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from octetrl.config.cluster import ROLE_FIELDS, ClusterConfig
from octetrl.config.limits import MISMATCH_LIMIT
from octetrl.config.ranking import best_steps
from octetrl.config.recipe_yaml import parse_yaml
from octetrl.records import RolloutStatus
from octetrl.system.errors import UserError, nearest_file, runs_in
from octetrl.system.text import counted, printable
from octetrl.telemetry.ending import FAILED, Ending, read_ending, read_where
from octetrl.telemetry.metrics import (
    BETWEEN_STEPS,
    EQUAL_REWARDS_LIMIT,
    MISMATCH,
    TRUNCATED_LIMIT,
    lower_staleness,
)
from octetrl.telemetry.rollouts import EVALUATIONS, Filter, Interval, SampledGroup, rollout_files, select
from octetrl.telemetry.sample_estimates import Estimate, estimate_mean, reward_range
from octetrl.telemetry.sinks import HISTORY_FILE, METRICS_FILE, WARNINGS, read_objects
from octetrl.telemetry.step_line import duration

Row = Mapping[str, Any]  # the metrics of a step; None: measured and not finite
_SETTINGS = {
    "model": ("model.path", "model.preset"),
    "algorithm": ("algorithm.name",),
    "learning rate": ("trainer.optimizer.lr",),
    "tasks": ("environment.kind",),
    "dataset": ("environment.dataset",),
    "reward": ("environment.reward",),
    "prompts a step": ("rollout.prompts_per_step",),
    "answers a prompt": ("rollout.group_size",),
    "answer limit": ("rollout.max_new_tokens",),
    "temperature": ("rollout.temperature",),
    "seed": ("seed",),
}
_OF_TASKS = ("tasks", "dataset", "reward")
_OF_ROLLOUTS = (*_OF_TASKS, "prompts a step", "answers a prompt", "answer limit", "temperature")


@dataclass(frozen=True)
class RunRecord:
    """One run.

    rows: one mapping a step, in the order of steps. unread: lines of metrics.jsonl that are none. warnings: what its
    console warned of, with the step. where: its run.json."""

    folder: Path
    recipe: Mapping[str, Any]
    rows: Sequence[Row]
    unread: int = 0
    warnings: Sequence[tuple[int, str]] = ()
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def ending(self) -> Ending | None:
        """How it ended. None: it is live, or its process was killed."""
        return read_ending(self.where)

    @property
    def left_out(self) -> list[str]:
        """A remark about steps that can't be shown."""
        lines = f"{counted(self.unread, 'line')} of {METRICS_FILE} can't be read; their steps are missing here"
        return [lines] if self.unread else []

    @property
    def num_steps(self) -> int:
        """Steps that are finished. An evaluation before the first one is a row, and no step."""
        return sum(row["step"] > 0 for row in self.rows)

    @cached_property
    def hours(self) -> list[float]:
        """Hours of work until the end of each step, evaluations and checkpoints included."""
        ends, total = [], 0.0
        for row in self.rows:
            total += sum(row.get(name) or 0.0 for name in ("time/step", *BETWEEN_STEPS))
            ends.append(total / 3600)
        return ends

    def series(self, name: str) -> list[tuple[int, float, float]]:
        """(step, hours, value) of each step that measured it with a finite value."""
        rows = zip(self.rows, self.hours, strict=True)
        return [(row["step"], hours, value) for row, hours in rows if (value := row.get(name)) is not None]

    def values(self, name: str) -> list[float]:
        return [value for _, _, value in self.series(name)]

    def setting(self, path: str) -> Any:
        """A field of the recipe. None: the recipe has no such field, or its value is null."""
        value: Any = self.recipe
        for name in path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return value

    @property
    def environments(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections of several environments, by name. Empty for a run of one."""
        return self.recipe.get("environments") or {}

    @property
    def cluster(self) -> ClusterConfig:
        try:
            return ClusterConfig.model_validate(self.recipe.get("cluster") or {})
        except ValidationError:  # of another version
            return ClusterConfig()

    @property
    def mismatch_limit(self) -> float:
        return float(self.setting("mismatch.warn_above") or MISMATCH_LIMIT)

    @property
    def has_stale_tokens(self) -> bool:
        """Whether earlier weights sampled some of its trained tokens, so that its mismatch has the policy's change."""
        return any(share < 1 for share in self.values("rollout/on_policy_share"))

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The recipe and the machine in a few lines."""
        rows: list[tuple[str, Any]] = []
        rows_a_step = self.setting("algorithm.batch_size")
        for label, paths in _SETTINGS.items():
            # A run that has a batch size learns from files, not from rollouts.
            hidden = _OF_ROLLOUTS if rows_a_step is not None else _OF_TASKS if self.environments else ()
            rows += [(label, _setting_text(self.setting(path))) for path in paths if label not in hidden]
        if rows_a_step is not None:
            rows += [("data", ", ".join(self._files()) or None), ("rows a step", rows_a_step)]
        rows += [(f"environment {name}", _environment_text(section)) for name, section in self.environments.items()]
        dtype = "float32" if self.setting("model.dtype") == "float32" else "BF16"
        rows.append(("precision", self._precision(dtype)))
        if layers := "; ".join(f"{where}: {formats}" for where, formats in self.where.get("linears") or ()):
            rows.append(("linears by layer", f"{layers}; embedding, norms, lm_head: {dtype}"))
        rows += [("parity", self.where.get("parity")), *self._workers()]
        rows.append(("weights in flight", self.where.get("weights_in_flight")))
        rows.append(("steps", f"{self.num_steps} of {self.recipe.get('steps', '?')}"))
        rows.append(("changed", "; ".join(map(_change_text, read_objects(self.folder / HISTORY_FILE))) or None))
        rows += [(label, self.where.get(label)) for label in ("machine", "commit")]
        versions = (self.where.get("versions") or {}).items()
        rows.append(("versions", ", ".join(f"{package} {number}" for package, number in versions) or None))
        return [(label, str(value)) for label, value in rows if value is not None]

    def _files(self) -> list[str]:
        """The files that a run without rollouts learns from."""
        sources = (self.setting("data.sources") or {}).values()
        paths = [self.setting("algorithm.conversations"), *(section.get("path") for section in sources)]
        return [str(path) for path in paths if path is not None]

    def _precision(self, dtype: str) -> str:
        fp8 = self.recipe.get("fp8") or {}
        sides = [name for name, key in (("rollout", "rollout"), ("training", "train")) if fp8.get(key)]
        codes = "MXFP8" if fp8.get("format") == "mxfp8" else "FP8"
        linears = f"linears of {' and '.join(sides)} in {codes}" if sides else f"linears in {dtype}"
        cache = fp8.get("kv_cache", "none")
        stored = {"none": dtype, "int8": "8-bit integers"}.get(cache, f"FP8, {cache}")
        if (alone := fp8.get("kv_cache_tensors", "both")) != "both":
            stored += f", {alone.upper()} alone"
        exceptions = ("bf16_first_layers", "bf16_last_layers", "ignore")
        kept = "".join(f", {name} {fp8[name]}" for name in exceptions if fp8.get(name))
        return f"{linears}, KV cache in {stored}{kept}"

    def _workers(self) -> Iterator[tuple[str, str]]:
        """How many workers it has, which of them train or generate, and how far these may be apart."""
        cluster = self.cluster
        if cluster.on_cpus:
            yield "workers", f"{cluster.num_workers} CPU process{'es' * (cluster.num_workers != 1)}"
        elif cluster.num_workers > 1:
            yield "workers", f"{cluster.num_workers} on {counted(cluster.num_gpus, 'GPU')}"
        else:
            yield "workers", "1"
        if cluster.roles is not None:
            given = {name.partition(".")[2]: self.setting(name) for name in ROLE_FIELDS}
            yield "roles", ", ".join(f"{name} {count}" for name, count in given.items() if count is not None)
            yield "max_staleness", str(cluster.max_staleness)


def _setting_text(value: Any) -> Any:
    """Several reward functions as a weighted sum; another value as it is."""
    if not isinstance(value, Mapping):
        return value
    terms = ((f"{one.get('weight', 1):g} x {name}", one.get("only")) for name, one in value.items())
    return " + ".join(f"{term} (in {only} only)" if only else term for term, only in terms)


def _environment_text(section: Mapping[str, Any]) -> str:
    """One of several environments in a few words."""
    reward = f", reward {_setting_text(section['reward'])}" if section.get("reward") else ""
    labels = {"temperature": "temperature", "group_size": "answers a prompt"}
    own = "".join(f", {label} {section[key]:g}" for key, label in labels.items() if section.get(key) is not None)
    return f"{section.get('kind', '')} {section.get('dataset', '')}{reward}, weight {section.get('weight', 1):g}{own}"


def _change_text(line: Mapping[str, Any]) -> str:
    """A field that a resumed run changed, from a line of history.jsonl. Of files: the beginning of their digests."""
    old, new = (
        ", ".join(f"{part} {digest[:8]}" for part, digest in value.items()) if isinstance(value, dict) else value
        for value in (line["old"], line["new"])
    )
    return printable(f"{line['field']}: {old} until step {line['step']}, then {new}")


def read_run(folder: Path) -> RunRecord:
    """Read a run's folder. Raises UserError if it has no metrics."""
    path = folder / METRICS_FILE
    if folder.is_file():
        inside = f", such as '{folder.parent}'" if (folder.parent / METRICS_FILE).is_file() else ""
        raise UserError(f"report: '{folder}' is a file; give the folder of a run{inside}")
    if not path.is_file():
        missing = f"has no {METRICS_FILE}" if folder.is_dir() else "does not exist"
        hint = runs_in(folder) if folder.is_dir() else nearest_file(folder)
        raise UserError(f"report: '{folder}' {missing}; give the folder of a run{hint}")
    rows = [row for row in read_objects(path) if type(row.get("step")) is int]
    if not rows:
        raise UserError(f"report: '{path}' has no finished step yet; wait for the first one")
    lines = path.read_bytes().count(b"\n")  # a run in progress is writing what follows the last one
    warnings = [(line["step"], line["text"]) for line in read_objects(folder / WARNINGS)]
    return RunRecord(folder, read_recipe(folder), rows, max(0, lines - len(rows)), warnings, read_where(folder))


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run's folder; empty if it has none. Raises UserError if it is not YAML."""
    path = folder / "config.yaml"
    return parse_yaml(path.read_text(encoding="utf-8"), str(path)) or {} if path.is_file() else {}


# ---------------------------------------------------------------- findings


def findings(run: RunRecord) -> list[str]:
    """What a person should look at, with a remedy, from the metrics of all steps."""
    ended = run.ending
    lines = [f"the run {ended.text}"] if ended is not None and ended.how == FAILED else []
    lines += run.left_out
    checks = (
        (
            "mismatch/unequal_tokens",
            0.0,
            "log-probs of engine and trainer differ; `octetrl doctor RECIPE` finds the op",
        ),
        (MISMATCH, run.mismatch_limit, _disagreement(run)),
        (
            "fp8/kv_saturation",
            run.setting("fp8.saturation_warn") or 0.0,
            "more K and V values than fp8.saturation_warn were clamped; raise fp8.calibration_margin",
        ),
        ("rollout/non_finite_tokens", 0.0, "activations were not finite in the rollout"),
        ("train/non_finite_tokens", 0.0, "activations were not finite in training"),
        ("train/skipped", 0.0, "no update, because no group had a learning signal"),
        ("rollout/failure_share", 0.0, "rollouts without a reward; the failed ones below say why"),
        (
            "rollout/truncated_share",
            TRUNCATED_LIMIT,
            f"more than {TRUNCATED_LIMIT:.0%} of the answers reach rollout.max_new_tokens; raise it if good answers"
            " need more tokens, leave it if they should be as long as they can",
        ),
        ("rollout/preemptions", 0.0, "sequences were prefilled twice; a larger KV cache is faster"),
        (
            "reward/zero_variance_fraction",
            EQUAL_REWARDS_LIMIT,
            "in most groups all rewards are equal, so they teach nothing; if the mean reward is high, the tasks are"
            " learnt and the run can end; if it is low, choose easier tasks",
        ),
    )
    for name, limit, says in checks:
        values = run.values(name)
        steps = [step for step, _, value in run.series(name) if value > limit]
        has_learnt = name in ("rollout/truncated_share", "reward/zero_variance_fraction") and values[-1:] <= [limit]
        if steps and not has_learnt:
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first in step {steps[0]}"
            most = f", at most {max(values):.2g}" if name == "fp8/kv_saturation" else ""
            lines.append(f"{says} ({name}, {where}{most})")
    return [*lines, *filter(None, [idle_tail(run)])]


def _disagreement(run: RunRecord) -> str:
    """What a large mismatch means: with stale tokens it contains the change of the policy."""
    limit = f"{100 * (run.mismatch_limit - 1):.3g}%"
    if run.has_stale_tokens:
        remedy = lower_staleness(run.setting("cluster.max_staleness") or 1)
        return (
            f"engine and trainer differ by more than {limit}, which contains the change of the policy, because earlier"
            f" weights sampled some of the tokens; {remedy}. Or raise mismatch.warn_above"
        )
    return f"engine and trainer disagree by more than {limit}; see docs/fp8.md"


def steps_above(run: RunRecord) -> str | None:
    """In how many steps the mismatch was above its limit, of which the console warned only once."""
    measured = run.series(MISMATCH)
    above = [(value, step) for step, _, value in measured if value > run.mismatch_limit]
    if not above:
        return None
    most, step = max(above)
    share = f"{len(above)} of {counted(len(measured), 'step')}"
    return f"{MISMATCH} above mismatch.warn_above={run.mismatch_limit:g} in {share}, at most {most:.4f} in step {step}"


def raised_warnings(run: RunRecord) -> list[str]:
    """What the run warned of. Warnings that differ in numbers only are one, with the text of the first."""
    similar: dict[str, list[tuple[int, str]]] = {}
    for step, text in run.warnings:
        text = re.sub(r"^step \d+: ", "", text)
        similar.setdefault(re.sub(r"[-+]?\d[\d.,]*(e[-+]?\d+)?%?", "#", text), []).append((step, text))
    return [
        f"{same[0][1]} (after step {same[0][0]}{f', {len(same)} times until step {same[-1][0]}' * (len(same) > 1)})"
        for same in similar.values()
    ]


def idle_tail(run: RunRecord) -> str | None:
    """Says so if a run with `rollout.learn_beside_tail` never learnt beside a tail."""
    shares = run.values("train/beside_tail_share")
    if not run.setting("rollout.learn_beside_tail") or not shares or any(shares):
        return None
    return (
        "rollout.learn_beside_tail: no token was trained on before the last answer ended:"
        " no group was complete and scored in time, or too many answers ran until the end; give fewer tokens a"
        " micro-batch, a faster reward, or a larger engine.max_batch"
    )


# ---------------------------------------------------------------- results


def results(run: RunRecord) -> Iterator[tuple[str, str]]:
    """What came out: the best and the last evaluation, and reward or loss of the first and the last step, and how
    rollouts ended that were not all scored."""
    metric = run.setting("checkpoint.best_metric") or ""
    metric = metric if run.values(metric) else "eval/loss" if run.values("eval/loss") else "eval/accuracy"
    evaluations = {step: value for step, _, value in run.series(metric)}
    if evaluations:
        best, last = next(iter(best_steps(evaluations.items(), metric)), min(evaluations)), max(evaluations)
        name = {"eval/accuracy": "held-out accuracy", "eval/loss": "held-out loss"}.get(metric, metric)
        text = f"; the last: {evaluations[last]:.3f} at step {last}" if best != last else ""
        if metric == "eval/accuracy" and not evaluations[best]:
            yield name, f"0 in {counted(len(evaluations), 'evaluation')}"
        else:
            yield "best", f"{name} {evaluations[best]:.3f} at step {best}{text}"
    for name, label in (("reward/mean", "mean reward"), ("preference/accuracy", "pairs right"), ("loss", "loss")):
        if values := run.values(name):
            yield label, f"{values[0]:.3f} in the first step, {values[-1]:.3f} in the last"
            break
    counts = {status.value: sum(run.values(f"rollout/{status.value}")) for status in RolloutStatus}
    total, others = sum(run.values("rollout/count")), {name: count for name, count in counts.items() if count}
    if others:
        shares = {"scored": total - sum(others.values()), **others}
        yield "rollouts", ", ".join(f"{count / total:.1%} {name}" for name, count in shares.items())


def last_evaluation(run: RunRecord) -> tuple[int, list[SampledGroup]]:
    """The step of the run's last evaluation and its held-out tasks. Step 0 and no tasks if there was none."""
    folder = run.folder / EVALUATIONS
    try:
        last = rollout_files(folder)[-1][0] if folder.is_dir() else 0
        return last, select(folder, Filter(steps=Interval(last, last)), None).groups if last else []
    except UserError:
        return 0, []


# ---------------------------------------------------------------- times
#
# A step that generates and then learns is the sum of its phases. With `cluster.max_staleness` above 0 other workers
# generate the next batches while a step learns. The parts are then what the step did and what it waited for. The time
# of generating is not one of them, because it overlaps with them.

LEARNING = ("time/train", "time/calibrate", "time/publish", "time/send_weights")
PHASES = ("time/rollout", "time/reward", *LEARNING)
PHASES_AHEAD = ("time/wait_for_batch", *LEARNING)
OTHER = "other"
_BESIDE = {
    "time/rollout": "generating",
    "time/reward": "rewards",
    "time/wait_for_weights": "waiting for new weights",
}
_WORDS = {
    "time/wait_for_batch": "waiting for the batch",
    "time/send_weights": "sending weights",
    "time/wait_to_evaluate": "waiting to evaluate",
}


def is_ahead(rows: Sequence[Row]) -> bool:
    """Whether batches were generated while steps learnt."""
    return any("time/wait_for_batch" in row for row in rows)


def seconds_by_part(rows: Sequence[Row], *, ahead: bool) -> dict[str, float]:
    """Seconds of each part by its label, over all rows. `other`: the rest of the steps."""
    phases = PHASES_AHEAD if ahead else PHASES
    rest = _sum(rows, "time/step") - sum(_sum(rows, name) for name in phases)
    parts = {_WORDS.get(name, name.removeprefix("time/")): _sum(rows, name) for name in (*phases, *BETWEEN_STEPS)}
    return {**parts, OTHER: max(0.0, rest)}


def longest_first(rows: Sequence[Row]) -> dict[str, float]:
    """The parts that took any time."""
    parts = seconds_by_part(rows, ahead=is_ahead(rows))
    return {name: seconds for name, seconds in sorted(parts.items(), key=lambda part: -part[1]) if seconds > 0}


def overlap(rows: Sequence[Row]) -> str:
    """Says that generating and training overlap, with the seconds of generating. Empty if they do not."""
    if is_ahead(rows):
        sums = {word: _sum(rows, name) for name, word in _BESIDE.items()}
        times = ", ".join(f"{word} {duration(seconds)}" for word, seconds in sums.items() if seconds >= 0.05)
        return f"generating and training overlap; beside these steps: {times}" if times else ""
    if sum(_sum(rows, name) for name in PHASES) > 1.02 * _sum(rows, "time/step") > 0:  # by more than rounding
        return "some phases overlap: together they took longer than the steps"
    return ""


def _sum(rows: Sequence[Row], name: str) -> float:
    return sum(row.get(name) or 0.0 for row in rows)


# ---------------------------------------------------------------- differences between runs
#
# A reward says something about one set of tasks and one way to score them. Runs whose recipes differ there are compared
# in length, entropy and time only.

ENOUGH = 4  # steps, for a difference with an interval
COMPARED = {
    "eval/accuracy": "held-out accuracy",
    "reward/mean": "reward",
    "rollout/mean_length": "answer length",
    "entropy": "entropy",
    "time/step": "seconds of a step",
}
NAMED = 3  # fields of the recipe that differ
ONLY_OF_SAME_TASKS = ("eval/accuracy", "reward/mean")
OF_PAIRS = (
    "Pairs are the same held-out tasks in the last evaluations, or the same steps over the last half of the runs. The"
    " intervals are over pairs. Steps of a run depend on one another, so theirs are too narrow. None covers"
    " another seed, which may differ as much."
)
LIMITS = {  # time, memory and number: they change neither a task nor its score
    *("train_size", "eval_size", "seed", "reward_timeout_seconds", "reward_memory_mib", "reward_workers"),
    *("load_timeout_seconds", "task_timeout_seconds", "sandbox", "max_failure_share"),
}


def differences(runs: Sequence[RunRecord]) -> Iterator[tuple[str, RunRecord, Estimate]]:
    """What was compared, the run that the first one is subtracted from, and the difference."""
    same = [run for run in runs[1:] if not changed_tasks(runs[0], run)]
    for other in same:
        if found := held_out_difference(runs[0], other):
            yield "held-out reward, task by task", other, found
    for name, title in COMPARED.items():
        for other in same if name in ONLY_OF_SAME_TASKS else runs[1:]:
            if found := paired_difference(runs[0], other, name):
                yield f"{title}, step by step", other, found


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
    """The fields of the recipes that define tasks and score and differ. Empty if one of the recipes is missing."""
    if not first.recipe or not second.recipe:
        return []
    mine, its = _task_fields(first), _task_fields(second)
    return sorted(name for name in {**mine, **its} if mine.get(name) != its.get(name))


def _task_fields(run: RunRecord) -> dict[str, Any]:
    """What defines tasks and score, by the field's path."""
    sections = {f"environments.{name}": section for name, section in run.environments.items()}
    sections = sections or {"environment": run.recipe.get("environment") or {}}
    fields = {"evaluation.right_from": run.setting("evaluation.right_from") or 1.0}
    for path, section in sections.items():
        fields |= {f"{path}.{name}": value for name, value in section.items() if name not in LIMITS}
    return fields


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
        return {(row.task_id, row.line["prompt"]): sum(rewards) / len(rewards) for row, rewards in tasks}

    mine, its = by_task(first), by_task(second)
    both = [value - mine[task] for task, value in its.items() if task in mine]
    low, high = reward_range(mine.values(), its.values())
    return estimate_mean(both, seed=0, within=(low - high, high - low)) if len(both) >= ENOUGH else None
