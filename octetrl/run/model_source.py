"""Finds a model by the name that a person gives: a folder, a run, `RUN@STEP`, or a name of the Hugging Face hub.

    models/Qwen3-0.6B        a folder: used as it is
    runs/mine                a run: its last checkpoint
    runs/mine@40             a run: its checkpoint after step 40
    runs/mine@best           a run: of its saved checkpoints the one with the highest checkpoint.best_metric
    Qwen/Qwen3-0.6B          the hub, if there is no such folder; `Qwen/Qwen3-0.6B@REVISION` for another revision

A model of the hub is fetched by huggingface_hub into its cache, which continues an interrupted download. The folder
that it returns contains the revision's commit, so the recipe that a run saves names exactly these weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octetrl.config.load import load_recipe
from octetrl.config.schema import RolloutConfig
from octetrl.system.errors import UserError, dangling, nearest_file, runs_in
from octetrl.system.names import HubName, hub_name

BEST = "best"  # RUN@best
SETTINGS = ("*.json", "*.txt", "*.model", "*.jinja")
WEIGHTS = "*.safetensors"
PARTS_OF_A_MODEL = ("checkpoints", "manifest.json", "config.json", "adapter_config.json")


def found_model(name: str | Path, *, weights: bool = True) -> Path:
    """The path of a model, run or checkpoint. Only names that are no local path are looked up elsewhere.

    weights: False to fetch only settings and tokenizer from the hub. Raises UserError if the hub lacks the model or
    can't be reached."""
    path = Path(name)
    if "\0" in str(name) or path.exists():
        return path
    run, at, step = str(name).rpartition("@")
    if at and (Path(run) / "checkpoints").is_dir():
        return _checkpoint(Path(run), step)
    hub = _hub_name(name)
    return path if hub is None else _fetched(hub.name, hub.revision, weights)  # or the caller reports it


def is_of_hub(name: str | Path) -> bool:
    """Whether `found_model` looks the name up on the hub."""
    return _hub_name(name) is not None


def _hub_name(name: str | Path) -> HubName | None:
    run = Path(str(name).rpartition("@")[0])
    return None if (run / "checkpoints").is_dir() else hub_name(name)


def refuse_no_model(name: str | Path) -> Path:
    """The path of a model, run or checkpoint. Raises UserError if there is none. A model of the hub is fetched."""
    if not str(name).strip():  # which a path would take for the folder we are in
        raise UserError(f"'{name}' names no model; give a run folder, a checkpoint, or a Hugging Face model folder")
    path = found_model(name)
    if not path.exists():
        raise UserError(
            f"'{path}' does not exist; give a run folder, a checkpoint, or a Hugging Face model folder with config.json"
            f"{nearest_file(path)}"
        )
    if not any((path / part).exists() for part in PARTS_OF_A_MODEL):
        raise UserError(
            f"'{path}' is neither a run folder, nor a checkpoint, nor a Hugging Face model folder with config.json"
            f"{runs_in(path)}{dangling(path, *PARTS_OF_A_MODEL)}"
        )
    return path


def recipe_of_run(name: str | Path) -> Path | None:
    """The recipe that a run saved: `name` is the run, `RUN@STEP` or one of its checkpoints. None for anything else."""
    run, at, _ = str(name).rpartition("@")
    path = Path(name)
    folders = [Path(run)] if at and not path.exists() else [path, path.parent.parent]
    for folder in folders:
        if (folder / "checkpoints").is_dir() and (folder / "config.yaml").is_file():
            return folder / "config.yaml"
    return None


def precision_of(name: str | Path, given: str | None) -> tuple[str | None, dict[str, Any]]:
    """How a model computes in generation: `precision`, and what else of a recipe belongs to it, for generation_recipe.

    given: a precision, with the defaults of its fields; None: as in the run's recipe, or bf16 if `name` is no run."""
    path = None if given is not None else recipe_of_run(name)
    if path is None:
        return given or "bf16", {}
    recipe = load_recipe(path)
    fp8 = recipe.fp8.model_dump(mode="json")
    return recipe.precision, {"fp8": fp8, "dtype": recipe.model.dtype}


def rollout_of(name: str | Path) -> RolloutConfig:
    """How the run's model was spoken to: variables of the chat template and the format of tool calls. The defaults if
    `name` is no run."""
    path = recipe_of_run(name)
    return RolloutConfig() if path is None else load_recipe(path).rollout


def _checkpoint(run: Path, step: str) -> Path:
    """The folder of `RUN@STEP` or `RUN@best`. Raises UserError if the run has no such checkpoint."""
    saved = sorted(path.name.removeprefix("step_") for path in (run / "checkpoints").glob("step_*"))
    steps = ", ".join(str(int(one)) for one in saved if one.isdecimal()) or "none"
    if step == BEST:
        from octetrl.run.folder.output_folder import read_run_id
        from octetrl.trainer.checkpoint import best_of

        metric = load_recipe(run / "config.yaml").checkpoint.best_metric
        best = best_of(run / "checkpoints", read_run_id(run), metric)
        if best is None:
            raise UserError(f"'{run}@{BEST}': no checkpoint has '{metric}', checkpoint.best_metric; it has {steps}")
        return best
    if not step.isdecimal() or f"{int(step):06d}" not in saved:
        raise UserError(f"'{run}@{step}': the run has no checkpoint of step {step}; it has {steps}")
    return run / "checkpoints" / f"step_{int(step):06d}"


def _fetched(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    patterns = [*SETTINGS, *([WEIGHTS] if weights else [])]
    at = f" --revision {revision}" if revision else ""
    folder = f"models/{name.rpartition('/')[2]}"
    by_hand = f"hf download {name}{at} --local-dir {folder}, then model.path={folder}"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except RepositoryNotFoundError:
        hint = nearest_file(Path(name))
        raise UserError(
            f"model '{name}': there is no such folder, and the hub has no such model that you may read{hint}; correct"
            " the name, or log in with `hf auth login`"
        ) from None
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].removeprefix("Got: ")
        raise UserError(
            f"model '{name}': there is no such folder, and the hub can't be used ({reason}); on a machine with a"
            f" network: {by_hand}"
        ) from None
