"""The model, files and folders that a recipe names, looked up before torch is imported, which takes seconds.

The refusals come first for a quick answer. Those that decide come later: `weights_folder`, `load_spec`, `OutputFolder`,
and the readers of tasks and conversations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

from octetrl.config.environment import reward_names
from octetrl.config.rules_environment import FILES
from octetrl.config.schema import Recipe
from octetrl.config.several_environments import alone, renamed
from octetrl.config.shipped import way_to_make
from octetrl.models.families import load_spec
from octetrl.run.folder.layout import RECIPE_FILE, process_of, refuse_unwritable, refuse_used
from octetrl.run.model_source import PARTS_OF_A_MODEL, found_model, is_of_hub
from octetrl.run.store import fetch_if_ahead, refuse_store
from octetrl.system.errors import UserError, nearest, nearest_file
from octetrl.system.names import hub_dataset
from octetrl.telemetry.curves import missing_clients
from octetrl.telemetry.glossary import METRICS, explained
from octetrl.telemetry.metrics import OF_A_PART, OF_ALL
from octetrl.telemetry.notify import notify_problems
from octetrl.workers.model_shape import with_context_length

Resume = bool | Literal["auto"]


def has_run(folder: Path) -> bool:
    """Whether `resume: auto` resumes there."""
    return (folder / RECIPE_FILE).exists()


def will_resume(recipe: Recipe, resume: Resume) -> bool:
    """Whether a run goes on in its folder, into which a later checkpoint of the recipe's store is fetched first."""
    if resume:
        fetch_if_ahead(recipe)
    return has_run(Path(recipe.output_dir)) if resume == "auto" else resume


def module_names(recipe: Recipe) -> list[str]:
    """What the recipe names as `module:name`."""
    names = [recipe.algorithm.name, *recipe.callbacks]
    for each in recipe.each_environment.values():
        dataset = [each.dataset] if each.kind == "python" and each.dataset is not None else []
        names += [*dataset, *reward_names(each.reward), *each.tools]
    return names


def with_found_model(recipe: Recipe, *, weights: bool = True) -> Recipe:
    """The recipe with the folder of its model in place of a run or a name of the hub, and with the context's length."""
    given = recipe.model.path
    if given is None:
        return _with_context_length(recipe)
    path = found_model(given, weights=weights)
    if not (path / "checkpoints").is_dir() and not (path / "manifest.json").is_file():
        changed = {} if str(path) == str(Path(given)) else {"path": str(path)}
    else:
        from octetrl.run.trained_model import trained_model, weights_folder  # imports torch

        changed = trained_model(weights_folder(path))
        if recipe.model.tokenizer is not None:
            del changed["tokenizer"]
        if recipe.model.lora is not None:
            if changed["lora"] is not None:
                raise UserError(
                    f"model.path: '{given}' trained an adapter, and the recipe has model.lora too; give model.lora.path"
                    " the adapter's folder, or export the run first"
                )
            del changed["lora"]
    if changed:
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=changed)})
    return _with_context_length(recipe)


def _with_context_length(recipe: Recipe) -> Recipe:
    """As workers/model_shape.py. Of a model that can't be read, which its reader reports, the recipe as it is."""
    with suppress(UserError):
        return with_context_length(recipe)
    return recipe


def refuse_early(recipe: Recipe, *, resume: Resume) -> None:
    """Refuse to train a model that is missing, on files that are missing, or in a folder that can't take the run."""
    folder = Path(recipe.output_dir)
    try:
        resume = has_run(folder) if resume == "auto" else resume
        if resume:
            _refuse_no_run(folder)
        else:
            refuse_used(folder, was_taken=process_of(folder) is not None)
        refuse_unwritable(folder)
    except OSError as error:  # a name that is too long, links in a circle
        raise UserError(f"output_dir: '{folder}' can't be a folder ({error.strerror}); choose another") from None
    if recipe.model.path is not None and not is_of_hub(recipe.model.path):
        path = found_model(recipe.model.path)
        if not any((path / part).exists() for part in PARTS_OF_A_MODEL):
            load_spec(path)  # its message says what to do
    for problem in (*unknown_metric(recipe), *missing_clients(recipe.logging), *notify_problems(recipe.logging.notify)):
        raise UserError(problem)
    refuse_store(recipe, resumes=resume)
    missing = None if resume else next(missing_files(recipe), None)  # a resumed run is first compared with its recipe
    if missing is not None:
        raise UserError(missing)


def unknown_metric(recipe: Recipe) -> Iterator[str]:
    """Whether a metric that ranks checkpoints, or ends the run, is one that no run has. An objective of one's own may
    add any."""
    named = {"checkpoint.best_metric": recipe.checkpoint.best_metric} if recipe.checkpoint.keep_best else {}
    if recipe.early_stopping is not None:
        named["early_stopping.metric"] = recipe.early_stopping.metric
    for field, metric in named.items():
        if metric.startswith("eval/"):
            if problem := unmeasured(recipe, metric):
                yield f"{field}: {problem}"
        elif explained(metric) is None and ":" not in recipe.algorithm.name:
            near = nearest(metric, [each.name for family in METRICS.values() for each in family])
            yield f"{field}: no run has '{metric}'{near}; `octetrl metrics` lists all"


def unmeasured(recipe: Recipe, metric: str) -> str | None:
    """Why the evaluations of this recipe do not have the metric `eval/...`. None: they have it."""
    if recipe.holds_out_rows:
        return _unmeasured_rows(recipe, metric)
    several, evaluation = recipe.each_environment, recipe.evaluation
    sets = {name: one for each in several.values() for name, one in each.eval_sets.items() if name}
    own = ("python", "verifiers", "gymnasium", "openenv", "harbor")
    terms: set[str] | None = set()  # None: an environment's own code gives them names
    for each in several.values():
        if isinstance(each.reward, str) or (each.reward is None and each.kind in own):
            terms = None
        elif terms is not None and isinstance(each.reward, Mapping):
            terms |= {name for name, one in each.reward.items() if one.only != "training"}

    def of_part(ks: Collection[int]) -> set[str]:
        estimates = {f"pass_at_{k}" for k in ks} | {f"maj_at_{k}" for k in ks if k > 1}
        return {*OF_A_PART, *estimates, *(f"component/{name}" for name in terms or ())}

    known = of_part(evaluation.k) | OF_ALL
    if recipe.environments:
        each_part = of_part(evaluation.k)
        known |= {"mean_of_environments", *(f"environments/{name}/{one}" for name in several for one in each_part)}
    for name, one in sets.items():
        known |= {f"{name}/{number}" for number in of_part(evaluation.k if one.k is None else one.k)}
    name = metric.removeprefix("eval/")
    beginning, is_term, _ = name.rpartition("component/")
    part = name.partition("/")[2]
    if part in of_part(evaluation.k) and any(one.kind == "python" for one in several.values()):
        return None  # the environment may have such a set
    if name in known or (terms is None and is_term and (not beginning or f"{beginning}accuracy" in known)):
        return None
    return f"no evaluation of this recipe measures '{metric}'{nearest(metric, [f'eval/{one}' for one in known])}"


def _unmeasured_rows(recipe: Recipe, metric: str) -> str | None:
    names = ("loss",) if recipe.algorithm.learns_from == "conversations" else ("loss", "accuracy", "margin")
    sets = dict.fromkeys(f"{name}/".lstrip("/") for name in ("", *recipe.held_out_sources))
    known = [f"eval/{each}{name}" for each in sets for name in names]
    return None if metric in known else f"held-out examples of data have {', '.join(known)}, and no '{metric}'"


def missing_files(recipe: Recipe) -> Iterator[str]:
    """What is wrong with the names of the recipe's files of tasks, conversations and pairs: there is no such file."""
    if recipe.algorithm.learns_from != "rollouts":
        for name, source in recipe.sources.items():
            field = f"data.sources.{name}.path" if recipe.data.sources else "algorithm.conversations"
            yield from _missing_file(field, source.path)
        for name, held_out in recipe.held_out_sources.items() if recipe.data.eval_dataset is not None else ():
            yield from _missing_file(f"data.eval_dataset{f'.{name}.path' if name else ''}", held_out.path)
    for name, one in alone(recipe).items():
        files = {"dataset": one.environment.dataset} if one.environment.kind in FILES else {}
        for of_set, config in one.environment.eval_sets.items():
            files[f"eval_dataset.{of_set}.dataset" if of_set else "eval_dataset"] = config.dataset
        for field, path in files.items():
            for problem in _missing_file(f"environment.{field}", path) if path is not None else ():
                yield renamed(problem, name)


def _missing_file(field: str, path: str) -> Iterator[str]:
    if hub_dataset(path) is None and not Path(path).exists():
        way = way_to_make(path) or f"give a JSONL or Parquet file, or a folder{nearest_file(Path(path))}"
        yield f"{field}: no file '{path}'; {way}"


def _refuse_no_run(folder: Path) -> None:
    """Refuse to resume where nothing is. Of a folder with a part of a run, `OutputFolder` says what is left."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        raise UserError(f"--resume: '{folder}' holds no run (no {RECIPE_FILE}); leave --resume out to start one there")
