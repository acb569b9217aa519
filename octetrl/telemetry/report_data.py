"""What a report says about a run, read from its folder: recipe, metrics by step, hours, and what to look at.

**Sound values.** What a report can use of the files in a run's folder. Damaged values are left out, and counted or
named.

The run itself writes numbers that are not finite as null. So a NaN, an infinity or an integer of 400 digits was not
written by a run.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from octetrl.config.cluster import ROLE_FIELDS, ClusterConfig
from octetrl.config.limits import MISMATCH_LIMIT
from octetrl.config.ranking import best_steps
from octetrl.config.recipe_yaml import parse_yaml
from octetrl.system.errors import UserError, nearest_file, runs_in
from octetrl.system.text import counted
from octetrl.telemetry.ending import FAILED, Ending, read_ending
from octetrl.telemetry.look_limits import EQUAL_REWARDS_LIMIT, TRUNCATED_LIMIT
from octetrl.telemetry.metrics import BETWEEN_STEPS, MISMATCH
from octetrl.telemetry.rollout_reader import Filter, Interval, SampledGroup, rollout_files, select
from octetrl.telemetry.rollouts import EVALUATIONS
from octetrl.telemetry.run_changes import HISTORY_FILE, changed_settings, read_objects
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE
from octetrl.telemetry.staleness import lower_staleness
from octetrl.telemetry.step_lines import WARNINGS

_OF_STEP = re.compile(r"^step \d+: ")
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?%?")
_SETTINGS = (
    ("model", "model.path"), ("model", "model.preset"), ("algorithm", "algorithm.name"),
    ("learning rate", "trainer.optimizer.lr"),
    ("tasks", "environment.kind"), ("dataset", "environment.dataset"), ("reward", "environment.reward"),
    ("prompts a step", "rollout.prompts_per_step"), ("answers a prompt", "rollout.group_size"),
    ("answer limit", "rollout.max_new_tokens"), ("temperature", "rollout.temperature"), ("seed", "seed"),
)  # fmt: skip


_OF_ROLLOUTS = ("tasks", "dataset", "reward", "prompts a step", "answers a prompt", "answer limit", "temperature")


@dataclass(frozen=True)
class RunRecord:
    """One run. `rows`: its metrics by name, one mapping a step, in the order of steps. `unread`: damaged lines.
    `damaged`: values and `lost`: fields of the recipe that are left out. `warnings`: what its console warned of, with
    the step. `where`: of its run.json."""

    folder: Path
    recipe: Mapping[str, Any]
    rows: Sequence[Mapping[str, float | None]]
    unread: int = 0
    warnings: Sequence[tuple[int, str]] = ()
    where: Mapping[str, Any] = field(default_factory=dict)
    damaged: int = 0
    lost: Sequence[str] = ()

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def ending(self) -> Ending | None:
        """How it ended. None: it is live, or its process was killed."""
        return read_ending(self.where)

    @property
    def left_out(self) -> list[str]:
        """Remarks about the metrics and settings that can't be shown."""
        found = []
        if self.unread:
            lines = counted(self.unread, "line")
            found.append(f"{lines} of {METRICS_FILE} can't be read; their steps are missing here")
        if self.damaged:
            values = counted(self.damaged, "value")
            why = "not a finite number, or a negative time or count"
            found.append(f"{values} of {METRICS_FILE} can't be used ({why}); left out here")
        if not self.recipe and not self.lost and (self.folder / "config.yaml").is_file():
            found.append("config.yaml can't be read; its settings are left out here")
        if self.lost:
            found.append(f"config.yaml has damaged fields, which are left out here: {', '.join(self.lost)}")
        remark = unordered_steps([int(row["step"] or 0) for row in self.rows])
        return [*found, *([f"{METRICS_FILE}: {remark}"] if remark else [])]

    @cached_property
    def hours(self) -> list[float]:
        """Hours of work until the end of each step, evaluations and checkpoints included."""
        found, total = [], 0.0
        for row in self.rows:
            total += sum(row.get(name) or 0.0 for name in ("time/step", *BETWEEN_STEPS))
            found.append(total / 3600)
        return found

    def series(self, name: str) -> list[tuple[int, float, float]]:
        """(step, hours, value) of each step that measured it with a finite value."""
        return [
            (int(row["step"] or 0), hours, value)
            for row, hours in zip(self.rows, self.hours, strict=True)
            if (value := row.get(name)) is not None and math.isfinite(value)
        ]

    def values(self, name: str) -> list[float]:
        return [value for _, _, value in self.series(name)]

    @property
    def environments(self) -> Mapping[str, Mapping[str, Any]]:
        """The sections of several environments, by name. Empty for a run of one."""
        found = self.recipe.get("environments")
        return {str(k): v for k, v in found.items() if isinstance(v, Mapping)} if isinstance(found, Mapping) else {}

    @property
    def mismatch_limit(self) -> float:
        """Its `mismatch.warn_above`."""
        given = _at(self.recipe, "mismatch.warn_above")
        return float(given) if isinstance(given, int | float) else MISMATCH_LIMIT

    @property
    def has_stale_tokens(self) -> bool:
        """Whether earlier weights sampled some of its trained tokens, so that its mismatch has the policy's change."""
        return any(share < 1 for share in self.values("rollout/on_policy_share"))

    @property
    def max_staleness(self) -> int:
        given = _at(self.recipe, "cluster.max_staleness")
        return given if isinstance(given, int) else 1

    @property
    def settings(self) -> list[tuple[str, str]]:
        """The recipe in a few lines."""
        found = [(label, _at(self.recipe, path)) for label, path in _SETTINGS]
        if (rows := _at(self.recipe, "algorithm.batch_size")) is not None:  # it learns from files, not from rollouts
            found = [(label, value) for label, value in found if label not in _OF_ROLLOUTS]
            found += [("data", ", ".join(_files(self.recipe)) or None), ("rows a step", rows)]
        if several := self.environments:
            found = [(label, value) for label, value in found if label not in ("tasks", "dataset", "reward")]
            found += [(f"environment {name}", _environment_text(section)) for name, section in several.items()]
        shown = [(label, str(value)) for label, value in found if value is not None]
        fp8 = _at(self.recipe, "fp8") or {}
        sides = [name for name, key in (("rollout", "rollout"), ("training", "train")) if fp8.get(key)]
        cache = fp8.get("kv_cache", "none")
        dtype = "float32" if _at(self.recipe, "model.dtype") == "float32" else "BF16"
        linears = f"linears of {' and '.join(sides)} in FP8" if sides else f"linears in {dtype}"
        exceptions = {key: fp8.get(key) for key in ("bf16_first_layers", "bf16_last_layers", "ignore") if fp8.get(key)}
        kept = "".join(f", {key} {value}" for key, value in exceptions.items())
        stored = {"none": dtype, "int8": "8-bit integers"}.get(cache, f"FP8, {cache}")
        if (alone := fp8.get("kv_cache_tensors", "both")) != "both":
            stored += f", {alone.upper()} alone"
        shown.append(("precision", f"{linears}, KV cache in {stored}{kept}"))
        layers = [f"{where}: {formats}" for where, formats in _pairs(self.where.get("linears"))]
        shown += [("linears by layer", "; ".join([*layers, f"embedding, norms, lm_head: {dtype}"]))] * bool(layers)
        if "parity" in self.where:
            shown.append(("parity", str(self.where["parity"])))
        shown += _workers(_at(self.recipe, "cluster"))
        if "weights_in_flight" in self.where:
            shown.append(("weights in flight", str(self.where["weights_in_flight"])))
        shown.append(("steps", f"{len(self.rows)} of {self.recipe.get('steps', '?')}"))
        changed = changed_settings(read_objects(self.folder / HISTORY_FILE))
        shown += [("changed", "; ".join(changed))] * bool(changed)
        versions = self.where.get("versions")
        known = versions.items() if isinstance(versions, Mapping) else ()
        shown += [(label, str(self.where[label])) for label in ("machine", "commit") if label in self.where]
        return shown + [("versions", ", ".join(f"{package} {number}" for package, number in known))] * bool(known)


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
    rows, unread, damaged = [], 0, 0
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict) and is_step(row.get("step")):
            row, lost_values = sound_row(row)
            rows.append(row)
            damaged += lost_values
        elif line.endswith("\n"):  # without it, a run in progress is writing the line
            unread += 1
    if not rows:
        raise UserError(f"report: '{path}' has no finished step yet; wait for the first one")
    raised = [
        (line["step"], line["text"])
        for line in read_objects(folder / WARNINGS)
        if is_step(line.get("step")) and isinstance(line.get("text"), str)
    ]
    recipe, lost = sound_recipe(read_recipe(folder))
    return RunRecord(folder, recipe, rows, unread, raised, read_where(folder), damaged, lost)


def read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run's folder; empty if it is missing or damaged."""
    recipe = folder / "config.yaml"
    try:
        known = parse_yaml(recipe.read_text(encoding="utf-8"), str(recipe)) if recipe.is_file() else {}
    except (UserError, UnicodeDecodeError):
        known = {}
    return known if isinstance(known, dict) else {}


def read_where(folder: Path) -> dict[str, Any]:
    """The run.json of a run's folder; empty if it is missing or damaged."""
    return next(read_objects(folder / RUN_FILE), {})


def _pairs(value: object) -> list[tuple[str, str]]:
    """The pairs of texts that a list has; what is damaged is left out."""
    pairs = value if isinstance(value, list) else []
    return [(str(one[0]), str(one[1])) for one in pairs if isinstance(one, list) and len(one) == 2]


OF_THE_END = ("rollout/truncated_share", "reward/zero_variance_fraction")  # of no interest once they are low


def findings(run: RunRecord) -> list[str]:
    """What a person should look at, with a remedy, from the metrics of all steps."""
    ended = run.ending
    found = [f"the run {ended.text}"] if ended is not None and ended.how == FAILED else []
    found += run.left_out

    def steps_with(name: str, above: float) -> list[int]:
        return [step for step, _, value in run.series(name) if value > above]

    checks = (
        (
            "mismatch/unequal_tokens",
            0.0,
            "log-probs of engine and trainer differ; `octetrl doctor RECIPE` finds the op",
        ),
        (MISMATCH, run.mismatch_limit, _disagreement(run)),
        (
            "fp8/kv_saturation",
            _at(run.recipe, "fp8.saturation_warn") or 0.0,
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
        steps = steps_with(name, limit)
        if name in OF_THE_END and run.values(name)[-1:] and run.values(name)[-1] <= limit:
            continue  # the model has learnt it since
        if steps:
            where = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, first in step {steps[0]}"
            most = f", at most {max(run.values(name)):.2g}" if name == "fp8/kv_saturation" else ""
            found.append(f"{says} ({name}, {where}{most})")
    return [*found, *filter(None, [idle_tail(run)])]


def _disagreement(run: RunRecord) -> str:
    """What a large mismatch means: with stale tokens it contains the change of the policy."""
    limit = f"{100 * (run.mismatch_limit - 1):.3g}%"
    if run.has_stale_tokens:
        return (
            f"engine and trainer differ by more than {limit}, which contains the change of the policy, because earlier"
            f" weights sampled some of the tokens; {lower_staleness(run.max_staleness)}. Or raise mismatch.warn_above"
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
    found: dict[str, list[tuple[int, str]]] = {}
    for step, text in run.warnings:
        text = _OF_STEP.sub("", text)
        found.setdefault(_NUMBER.sub("#", text), []).append((step, text))
    return [
        f"{same[0][1]} (after step {same[0][0]}{f', {len(same)} times until step {same[-1][0]}' * (len(same) > 1)})"
        for same in found.values()
    ]


def results(run: RunRecord) -> Iterator[tuple[str, str]]:
    """What came out: the best and the last evaluation, and reward or loss of the first and the last step."""
    metric = _at(run.recipe, "checkpoint.best_metric")
    metric = metric if isinstance(metric, str) and run.values(metric) else "eval/accuracy"
    evaluations = {step: value for step, _, value in run.series(metric)}
    if evaluations:
        best, last = best_steps(evaluations.items())[0], max(evaluations)
        name = "held-out accuracy" if metric == "eval/accuracy" else metric
        text = f"; the last: {evaluations[last]:.3f} at step {last}" if best != last else ""
        if metric == "eval/accuracy" and not evaluations[best]:
            yield name, f"0 in {counted(len(evaluations), 'evaluation')}"
        else:
            yield "best", f"{name} {evaluations[best]:.3f} at step {best}{text}"
    for name, label in (("reward/mean", "mean reward"), ("preference/accuracy", "pairs right"), ("loss", "loss")):
        values = run.values(name)
        if values:
            yield label, f"{values[0]:.3f} in the first step, {values[-1]:.3f} in the last"
            return


def idle_tail(run: RunRecord) -> str | None:
    """Says so if a run with `rollout.learn_beside_tail` never learnt beside a tail."""
    shares = run.values("train/beside_tail_share")
    if not _at(run.recipe, "rollout.learn_beside_tail") or not shares or any(shares):
        return None
    return (
        "rollout.learn_beside_tail: no token was trained on before the last answer ended:"
        " no group was complete and scored in time, or too many answers ran until the end; give fewer tokens a"
        " micro-batch, a faster reward, or a larger engine.max_batch"
    )


def last_evaluation(run: RunRecord) -> tuple[int, list[SampledGroup]]:
    """The step of the run's last evaluation and its held-out tasks. Step 0 and no tasks if there was none."""
    folder = run.folder / EVALUATIONS
    try:
        last = rollout_files(folder)[-1][0] if folder.is_dir() else 0
        return last, select(folder, Filter(steps=Interval(last, last)), None).groups if last else []
    except UserError:
        return 0, []


def _workers(section: object) -> Iterator[tuple[str, str]]:
    """How many workers a run has, which of them train or generate, and how far these may be apart."""
    try:
        cluster = ClusterConfig.model_validate(section or {})
    except ValidationError:  # of another version
        return
    if cluster.on_cpus:
        yield "workers", f"{cluster.num_workers} CPU process{'es' * (cluster.num_workers != 1)}"
    elif cluster.num_workers > 1:
        yield "workers", f"{cluster.num_workers} on {counted(cluster.num_gpus, 'GPU')}"
    else:
        yield "workers", "1"
    given = {name.partition(".")[2]: _at({"cluster": section}, name) for name in ROLE_FIELDS}
    if cluster.roles is not None:
        yield "roles", ", ".join(f"{name} {count}" for name, count in given.items() if count is not None)
        yield "max_staleness", str(cluster.max_staleness)


def _environment_text(section: Mapping[str, Any]) -> str:
    """One of several environments in a few words."""
    reward = f", reward {section['reward']}" if section.get("reward") else ""
    return f"{section.get('kind', '')} {section.get('dataset', '')}{reward}, weight {section.get('weight', 1):g}"


def _files(recipe: Mapping[str, Any]) -> list[str]:
    """The files that a run without rollouts learns from."""
    one, sources = _at(recipe, "algorithm.conversations"), _at(recipe, "data.sources") or {}
    several = [section.get("path") for section in sources.values() if isinstance(section, Mapping)]
    return [str(path) for path in (one, *several) if path is not None]


def _at(recipe: Mapping[str, Any], path: str) -> Any:
    value: Any = recipe
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


LARGEST = 1e100  # of a metric: its square is still a float
LONGEST = 1e10  # seconds
MOST_STEPS = 10**12
_COUNT = re.compile(r"mismatch/(age_\d+/tokens|tokens|unequal_tokens)")
_SECTIONS = (
    *("model", "fp8", "algorithm", "trainer", "trainer.optimizer", "environment", "environments", "rollout"),
    *("cluster", "mismatch", "evaluation", "data", "data.sources"),
)
_NUMBERS = ("fp8.saturation_warn", "mismatch.warn_above", "steps")
_TEXTS = ("fp8.kv_cache", "fp8.kv_cache_tensors")


def is_step(value: object) -> bool:
    """Whether it can be the number of a step."""
    return type(value) is int and 0 <= value < MOST_STEPS


def is_number(value: object) -> bool:
    """Whether it is a number that can be squared, summed and drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -LARGEST < value < LARGEST


def sound_row(row: Mapping[str, Any]) -> tuple[dict[str, float | None], int]:
    """The metrics of a step, and how many of its values were left out. null stays: it was measured and not finite."""
    kept = {name: value for name, value in row.items() if value is None or _is_sound(name, value)}
    return kept, len(row) - len(kept)


def _is_sound(name: str, value: object) -> bool:
    if not is_number(value) or (_COUNT.fullmatch(name) and value < 0):  # type: ignore[operator]
        return False
    return not name.startswith("time/") or 0 <= value <= LONGEST  # type: ignore[operator]


def sound_recipe(recipe: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe without what has another type than the report expects, and the names of these fields."""
    kept, lost = dict(recipe), []
    for path in _SECTIONS:
        if not isinstance(_found(kept, path), Mapping | None):
            lost.append(path)
            kept = _without(kept, path)
    for name, section in (kept.get("environments") or {}).items():
        if not isinstance(section, Mapping):
            lost.append(f"environments.{name}")
        elif not is_number(section.get("weight", 1)):
            lost.append(f"environments.{name}.weight")
    for path in lost:
        kept = _without(kept, path)
    for path, is_sound in _fields():
        if (value := _found(kept, path)) is not None and not is_sound(value):
            lost.append(path)
            kept = _without(kept, path)
    return kept, lost


def _fields() -> Iterator[tuple[str, Any]]:
    yield from ((path, is_number) for path in _NUMBERS)
    yield from ((path, lambda value: isinstance(value, str)) for path in _TEXTS)


def _found(recipe: Any, path: str) -> Any:
    for name in path.split("."):
        recipe = recipe.get(name) if isinstance(recipe, Mapping) else None
    return recipe


def _without(recipe: Mapping[str, Any], path: str) -> dict[str, Any]:
    name, _, rest = path.partition(".")
    section = recipe.get(name)
    if rest and isinstance(section, Mapping):
        return {**recipe, name: _without(section, rest)}
    return {key: value for key, value in recipe.items() if key != name}


def unordered_steps(steps: list[int]) -> str | None:
    """A remark if a step is there twice or comes before an earlier one."""
    wrong = [(one, after) for one, after in pairwise(steps) if after <= one]
    if not wrong:
        return None
    first, after = wrong[0]
    what = "repeats" if first == after else f"comes after step {first}"
    return f"steps are repeated or out of order (first: step {after} {what}); they are shown as they are written"
