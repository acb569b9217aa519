"""`octetrl eval`: evaluates one or several runs and models on a recipe's tasks.

The table has a row for each number and a column for each model. Means have 95% intervals. With several models, each
further one has a column with its difference to the first, over the tasks that they share. `--out FILE.json` writes
everything as JSON, with the outcome of every task. `--out FOLDER` also writes the answers, as `octetrl rollouts` and
`octetrl report` read them:

    eval.json                        all results, with the outcome of every task
    config.yaml                      the recipe with every field resolved
    metrics.jsonl                    one line: the numbers, under the checkpoint's step (0: no checkpoint)
    rollouts/step_NNNNNN.jsonl       every completion (telemetry/rollouts.py)

With several targets, the last three are in a folder for each, `1_NAME/`, `2_NAME/`, ...
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from octetrl.cli.output import loading_pytorch, refuse_file, refuse_unmakeable, whole_file, writes
from octetrl.config.environment import EnvironmentConfig
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.schema import Recipe
from octetrl.config.shipped import way_to_make
from octetrl.environments.python_object import search_beside
from octetrl.run.folder.journal import check_failures
from octetrl.run.model_source import recipe_of_run, refuse_no_model
from octetrl.system.errors import UserError, nearest_file, refuse_empty, runs_in
from octetrl.system.files import folder_lock
from octetrl.telemetry.eval_report import EvalReport, differences
from octetrl.telemetry.rollout_metrics import FailureShareError
from octetrl.telemetry.rollouts import ROLLOUTS, write_rollouts
from octetrl.telemetry.sample_estimates import LEVEL, Estimate

WIDE = 240  # letters of a line that no terminal shows
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        "-r",
        metavar="R",
        help="The recipe with the environment and the length limits. Default: that of the first run.",
        show_default=False,
    ),
]
OutOption = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="FILE.json|FOLDER",
        help="Write all results as JSON; into a folder with the answers, for `octetrl rollouts FOLDER`.",
    ),
]
LABELS = {"accuracy": "accuracy", "reward_mean": "reward"}
LENGTHS = {
    "mean": "mean length",
    "p50": "median length",
    "p90": "90% of lengths",
    "p99": "99% of lengths",
    "max": "longest",
}
IN_ENVIRONMENT, MEAN, COMPONENT = "accuracy in ", "mean of environments", "reward: "
Compared = dict[str, Mapping[str, Estimate]]  # by target: its differences to the first


def evaluate(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_OR_MODEL... [section.key=value]...",
            help="Run folders, RUN@STEP, RUN@best, checkpoints or Hugging Face folders, and fields that differ from the"
            " recipe. With engine.backend=openai fields only: the server's model is evaluated.",
            show_default=False,
        ),
    ],
    recipe: RecipeOption = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Completions per task. Default: the largest k, or the recipe's value.")
    ] = None,
    k: Annotated[
        str | None, typer.Option("--k", metavar="K,K,...", help="Estimate pass@k and maj@k for these k.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 is greedy. Default: the recipe's value.")
    ] = None,
    all_tasks: Annotated[
        bool, typer.Option("--all-tasks", help="Use every task of the environment, not only the held-out ones.")
    ] = False,
    out: OutOption = None,
) -> None:
    """Evaluate runs or models on a recipe's held-out tasks."""
    targets, overrides = _parted(words)
    overrides += _options_as_overrides(samples, k, temperature)
    recipe = recipe or _recipe_with_tasks(targets, overrides)
    overrides += _without_held_out(recipe, overrides) if all_tasks else []
    resolved = load_recipe(recipe, overrides, training=False)
    search_beside(recipe)
    _refuse_early(targets, recipe, resolved, all_tasks, out)
    for target in targets:
        refuse_no_model(target)
    with nullcontext() if out is None or is_json(out) else reserved(out):
        reports = _evaluated(targets, resolved, all_tasks)
        _show(reports, recipe, resolved, out)
    try:
        for target, report in reports.items():
            check_failures(resolved, report.groups, target)
    except FailureShareError as error:
        typer.echo(f"octetrl: the evaluation failed: {error}", err=True)
        raise typer.Exit(1) from None


def _show(reports: Mapping[str, EvalReport], recipe: str, resolved: Recipe, out: str | None) -> None:
    """Print the table, and write what `--out` asks for."""
    compared = _compared(reports)
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDE  # so that a row stays a line
    console.print(report_table(reports, compared))
    if len(reports) > 1:
        console.print(f"each answered the tasks of {recipe}", markup=False)
    if out is None:
        return
    results, look = results_as_json(recipe, resolved, reports, compared), ""
    if is_json(out):
        with whole_file("--out", Path(out)) as file:
            file.write_text(results, encoding="utf-8")
    else:
        write_folder(out, resolved, reports, results)
        look = f"; `octetrl rollouts {shlex.quote(out)}` shows the answers" if len(reports) == 1 else ""
    console.print(f"wrote {out}{look}", markup=False)


def _evaluated(targets: Sequence[str], resolved: Recipe, all_tasks: bool) -> dict[str, EvalReport]:
    """The report of each target, or that of the server's model by its name."""
    server = resolved.engine.openai
    if resolved.engine.backend != "openai" or server is None:
        with loading_pytorch():
            from octetrl.run.evaluate import evaluate_targets

        return evaluate_targets(targets, resolved, all_tasks=all_tasks)
    from octetrl.run.evaluate import evaluate_server

    return {server.name: evaluate_server(resolved, all_tasks=all_tasks)}


def _recipe_with_tasks(targets: Sequence[str], overrides: Sequence[str]) -> str:
    """`recipe_of` these. Raises UserError for a run that was trained on given data and names no environment."""
    recipe = recipe_of(targets)
    try:
        saved = load_recipe(recipe)
    except UserError:
        return recipe  # what is wrong is said where the recipe is loaded for the evaluation
    given = any(override.startswith("environment") for override in overrides) or saved.environments
    if isinstance(saved.algorithm, DatasetSettings) and not given and saved.environment == EnvironmentConfig():
        raise UserError(
            f"--recipe: '{Path(recipe).parent}' was trained on given data ({saved.algorithm.name}), and its recipe has"
            " no tasks to evaluate; give --recipe RECIPE.yaml, a recipe with an environment"
        )
    return recipe


def results_as_json(recipe: str, resolved: Recipe, reports: Mapping[str, EvalReport], compared: Compared) -> str:
    first = next(iter(reports), "")
    environments = {name: section.model_dump(mode="json") for name, section in resolved.environments.items()}
    content = {
        "recipe": recipe,
        **(
            {"environments": environments}
            if environments
            else {"environment": resolved.environment.model_dump(mode="json")}
        ),
        "evaluation": resolved.evaluation.model_dump(mode="json"),
        "models": [{"target": target, **report.as_json()} for target, report in reports.items()],
        "differences": [
            {"target": target, "less": first, "estimates": {name: asdict(one) for name, one in differing.items()}}
            for target, differing in compared.items()
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def _without_held_out(recipe: str, overrides: Sequence[str]) -> list[str]:
    """Overrides for `--all-tasks`: no task is held out, so that a small file leaves some for training."""
    names = load_recipe(recipe, overrides, training=False).environments
    sections = [f"environments.{name}" for name in names] or ["environment"]
    during_training = (
        "evaluation.every=0",
        "evaluation.on_start=false",
        "early_stopping=null",
        "checkpoint.keep_best=0",
    )
    return [*(f"{section}.eval_size=0" for section in sections), *during_training]


def _compared(reports: Mapping[str, EvalReport]) -> Compared:
    (_, baseline), *others = reports.items()
    compared: Compared = {}
    for target, report in others:
        each = {
            accuracy_of(name): difference["accuracy"]
            for name, part in report.parts.items()
            if "accuracy" in (difference := differences(part, baseline.parts[name]))
        }
        compared[target] = {**differences(report, baseline), **each}
    return compared


def recipe_of(targets: Sequence[str]) -> str:
    """The recipe that the first run among the targets saved."""
    for target in targets:
        refuse_empty(target, "model", "a run, a checkpoint or a model folder")
        if (found := recipe_of_run(target)) is not None:
            return str(found)
    for target in targets:
        if not Path(target.partition("@")[0]).exists():
            way = way_to_make(target) or f"give a run, a checkpoint or a model folder{nearest_file(Path(target))}"
            raise UserError(f"'{target}' does not exist; {way}")
    hint = next(filter(None, (runs_in(Path(target)) for target in targets)), "")
    raise UserError(f"--recipe: none of the targets is a run with a recipe of its own; give --recipe RECIPE.yaml{hint}")


def _is_override(word: str) -> bool:
    return "=" in word and "/" not in word.partition("=")[0]


def _options_as_overrides(samples: int | None, k: str | None, temperature: float | None) -> list[str]:
    fields: dict[str, Any] = {}
    if k is not None:
        words = [word.strip() for word in k.split(",")]
        if not all(word.isdecimal() and int(word) > 0 for word in words):
            raise UserError(f"--k: '{k}' is not a list of whole numbers from 1; write it as 1,4,16")
        fields["k"] = sorted({int(word) for word in words})
        samples = samples or max(fields["k"])
    fields |= {"samples": samples, "temperature": temperature}
    return [f"evaluation.{name}={value}" for name, value in fields.items() if value is not None]


def _parted(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The targets and the overrides. Raises UserError if both name a model."""
    targets = [word for word in words if not _is_override(word)]
    overrides = [word for word in words if _is_override(word)]
    named = next((override for override in overrides if override.startswith("model.path=")), None)
    if targets and named is not None and named.partition("=")[2].strip("'\"") not in targets:
        raise UserError(f"eval: {named} has no effect beside '{targets[0]}'; leave one of the two out")
    return targets, overrides


def _refuse_other_file(path: Path) -> None:
    """Raise UserError for a file that no evaluation wrote: `--out` would replace it."""
    if not path.is_file() or not path.stat().st_size:
        return
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        content = None
    if not (isinstance(content, dict) and {"evaluation", "models"} <= content.keys()):
        raise UserError(f"--out: '{path}' exists and is no evaluation; give another name, or remove it")


def _refuse_early(targets: Sequence[str], recipe: str, resolved: Recipe, all_tasks: bool, out: str | None) -> None:
    """Report errors that can be found before the work."""
    if resolved.engine.backend == "openai":
        if targets:
            raise UserError(
                f"eval: '{targets[0]}' is given and engine.backend is openai; leave it out (the server's model is"
                " evaluated), or engine.backend=octetrl"
            )
    elif not targets:
        raise UserError("eval: no run or model is given, only fields; name a run folder, a checkpoint or model folder")
    twice = [target for place, target in enumerate(targets) if target in targets[:place]]
    if twice:
        raise UserError(f"eval: '{twice[0]}' is given twice, and would not differ from itself; leave one out")
    if not any(environment.holds_out for environment in resolved.each_environment.values()) and not all_tasks:
        name = "environments.NAME.eval_size" if resolved.environments else "environment.eval_size"
        raise UserError(f"{recipe}: {name} is 0, so no task is held out; set it above 0, or give --all-tasks")
    if out is not None:
        refuse_empty(out, "file or folder", "--out eval.json, or a new folder")
    if out is not None and is_json(out):
        refuse_file("--out", Path(out), "eval.json")
        _refuse_other_file(Path(out))
    elif out is not None:
        refuse_folder(out)


def is_json(out: str) -> bool:
    """Whether `--out` names one file of results."""
    return Path(out).suffix == ".json"


def refuse_folder(out: str) -> None:
    """Raise UserError if `out` can't be the folder of an evaluation."""
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        what = "holds files already" if path.is_dir() else "is a file"
        raise UserError(f"--out: '{out}' {what}; give a new folder, or a file such as eval.json")
    refuse_unmakeable("--out", path)


@contextmanager
def reserved(out: str) -> Iterator[None]:
    """Hold the folder, so that another evaluation is refused before its work. If it stays empty, it is removed again.

    Raises UserError."""
    folder = Path(out)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with writes("--out", folder, "folder"):
            folder.mkdir(parents=True, exist_ok=True)
        with folder_lock(folder) as is_free:
            if not is_free:
                raise UserError(f"--out: another evaluation is writing '{out}'; give a new folder")
            yield
    finally:
        with suppress(OSError):  # it has files
            for path in made:
                path.rmdir()


def write_folder(out: str, recipe: Recipe, reports: Mapping[str, EvalReport], results: str) -> None:
    """Write an evaluation. `results`: the JSON of all. If that fails, as on a full disk, nothing of it stays.

    Raises UserError if somebody has written in the folder meanwhile."""
    refuse_folder(out)
    folder = Path(out)
    aside = folder / f".{os.getpid()}.partial"
    with writes("--out", folder, "folder"):
        aside.mkdir(parents=True)
        try:
            for place, (target, report) in enumerate(reports.items(), start=1):
                name = re.sub(r"[^\w.@-]+", "_", Path(target).resolve().name)
                target_folder = aside if len(reports) == 1 else aside / f"{place}_{name}"
                (target_folder / ROLLOUTS).mkdir(parents=True)
                write_rollouts(target_folder / ROLLOUTS, report.step, report.groups)
                row = json.dumps({"step": report.step, **report.metrics})
                (target_folder / "metrics.jsonl").write_text(row + "\n", encoding="utf-8")
                (target_folder / "config.yaml").write_text(dump_recipe(recipe), encoding="utf-8")
            (aside / "eval.json").write_text(results, encoding="utf-8")
            for written in sorted(aside.iterdir()):
                written.rename(folder / written.name)
        finally:
            shutil.rmtree(aside)


def report_table(reports: Mapping[str, EvalReport], compared: Compared) -> Table:
    """One column per target, in their order. Rows without a value are left out."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    table.add_column("")
    columns: list[Mapping[str, str]] = []
    for target, report in reports.items():
        table.add_column(Text(_short(target, reports)), overflow="fold")
        columns.append(_cells(report))
        if target in compared:
            table.add_column("less the first")
            columns.append({_label(name): _difference(estimate) for name, estimate in compared[target].items()})
    for label in _labels(reports.values()):
        table.add_row(label, *(Text(column.get(label, "")) for column in columns))
    table.caption, table.caption_justify = Text(_caption(list(reports.values()), bool(compared))), "left"
    return table


def accuracy_of(part: str) -> str:
    """The label of one of several environments or evaluation sets."""
    return f"{IN_ENVIRONMENT}{part.removeprefix('environments/')}"


def _caption(reports: list[EvalReport], is_compared: bool) -> str:
    note = f"means of {reports[0].tasks:,} tasks and [their {LEVEL:.0%} intervals]"
    if reports[0].by_environment:
        note += f"; accuracy counts every task once, the {MEAN} every environment once"
    if is_compared:
        note += "; * marks a difference whose interval excludes 0"
    says_answers = any("maj_at" in name for report in reports for name in report.estimates)
    if any(k > 1 for k in reports[0].scoring.ks) and not says_answers:
        note += "; no maj@k: the scorer does not return the answer"
    return note


def _cells(report: EvalReport) -> dict[str, str]:
    cells = {"accuracy": "none: no completion could be scored"}
    cells |= {_label(name): _interval(estimate, report.tasks) for name, estimate in report.estimates.items()}
    counts = {str(status): f"{count:,}" for status, count in report.counts.items() if count}
    cells |= {f"{COMPONENT}{name}": f"{mean:.4f}" for name, mean in report.components.items()}
    for name, of_name in report.parts.items():
        accuracy = of_name.estimates.get("accuracy")
        cells[accuracy_of(name)] = "none" if accuracy is None else _interval(accuracy, of_name.tasks)
    if report.mean_of_environments is not None:
        cells[MEAN] = f"{report.mean_of_environments:.4f}"
    if report.lengths:
        cells |= {label: f"{report.lengths[name]:,.0f}" for name, label in LENGTHS.items()}
        counts["truncated"] = f"{counts.get('truncated', '0')} ({report.lengths['truncated_share']:.1%})"
    return cells | counts | {"tokens/s": f"{report.tokens_per_second:,.0f}"}


def _labels(reports: Iterable[EvalReport]) -> list[str]:
    """All labels, in the order shown: estimates with k rising, lengths, statuses, speed."""
    labels = [label for report in reports for label in _cells(report)]
    ranks = ["accuracy", IN_ENVIRONMENT, MEAN, "reward", COMPONENT, "pass", "maj", *LENGTHS.values(), "truncated"]

    def rank(label: str) -> tuple[int, int]:
        family, _, k = label.partition("@")
        family = next((begin for begin in (IN_ENVIRONMENT, COMPONENT) if label.startswith(begin)), family)
        return (ranks.index(family) if family in ranks else len(ranks) + (label == "tokens/s"), int(k or 0))

    return sorted(dict.fromkeys(labels), key=rank)


def _short(target: str, targets: Iterable[str]) -> str:
    """The last part of the target's path, if no other target has the same. A server is named whole."""
    if "://" in target:
        return target
    name = Path(target).name
    return target if [Path(other).name for other in targets].count(name) > 1 or not name else name


def _label(name: str) -> str:
    return LABELS.get(name, name.replace("_at_", "@"))


def _interval(estimate: Estimate, tasks: int) -> str:
    over = "" if estimate.tasks == tasks else f" over {estimate.tasks:,}"
    ends = "" if estimate.low == estimate.high else f" [{estimate.low:.3f}, {estimate.high:.3f}]"  # equal rewards
    return f"{estimate.mean:.4f}{ends}{over}"


def _difference(estimate: Estimate) -> str:
    mark = " *" if estimate.low > 0 or estimate.high < 0 else ""
    return f"{estimate.mean:+.4f} [{estimate.low:+.3f}, {estimate.high:+.3f}]{mark}"
