"""`octetrl train`: runs a recipe from the first step or from the last checkpoint."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.arguments import Overrides, RecipePath
from octetrl.cli.ctrl_c import Stopped
from octetrl.cli.output import loading_pytorch
from octetrl.config.load import is_of_run, load_recipe
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import search_beside
from octetrl.run.folder.allowed_changes import CONTENT
from octetrl.run.model_source import recipe_of_run
from octetrl.run.recipe_files import Resume, refuse_early, will_resume
from octetrl.run.store import fetch_recipe
from octetrl.system.errors import RunFailed, Terminated, UserError
from octetrl.system.names import is_url

Resumed = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume from the run folder's last checkpoint. `--resume auto`: start where the folder has no run, and end"
        " at once where it has finished.",
    ),
]
Allowed = Annotated[
    list[str] | None,
    typer.Option(
        "--allow",
        metavar="FIELD[=VALUE]",
        help="With --resume: change a field from here on, such as trainer.optimizer.lr=1e-6, or go on with other rows"
        " or code than the run began with, such as environment.reward.",
        show_default=False,
    ),
]


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Resumed = False,
    auto: Annotated[bool, typer.Option("--resume-auto", hidden=True)] = False,
    allow: Allowed = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN[@STEP]",
            help="Begin with a run's weights: of its last checkpoint, of a step's, or a checkpoint's folder.",
            show_default=False,
        ),
    ] = None,
    with_optimizer: Annotated[
        bool, typer.Option("--with-optimizer", help="With --from: begin with the run's optimizer states too.")
    ] = False,
) -> None:
    """Train a model from a recipe: reinforcement learning, SFT, preferences or a reward model."""
    allow = allow or []
    if allow and not (resume or auto):
        raise UserError("--allow: it changes a run that is resumed; add --resume, or leave it out")
    for one in allow:
        if "=" not in one and not CONTENT.fullmatch(one):
            raise UserError(f"--allow: '{one}' has no value; give it as FIELD=VALUE, such as trainer.optimizer.lr=1e-6")
    if with_optimizer and source is None:
        raise UserError("--with-optimizer: it belongs to --from RUN, whose optimizer it is; add that, or leave it out")
    changed = [*(overrides or []), *(one for one in allow if "=" in one)]
    if is_url(recipe):
        recipe = _fetched(recipe, changed, resumes=resume or auto)
    branch = [] if source is None else _weights_of(source, changed)
    resolved = load_recipe(recipe, [*changed, *branch])
    if resume or auto:
        _refuse_another_folder(Path(recipe), resolved, changed)
    search_beside(recipe)
    resumes: Resume = "auto" if auto else resume
    will_resume(resolved, resumes)
    refuse_early(resolved, resume=resumes)
    with loading_pytorch():
        from octetrl.run import loop

    fields = [change.partition("=")[0].strip() for change in allow]
    try:
        loop.train(resolved, resume=resumes, allowed=fields, optimizer_of=source if with_optimizer else None)
    except (KeyboardInterrupt, Terminated) as error:
        words = [*changed, *([] if source is None else ["--from", source])]
        words += ["--with-optimizer"] if with_optimizer else []
        how = _how_to_go_on(resolved, recipe, words)
        if isinstance(error, Terminated):
            if (Path(resolved.output_dir) / "config.yaml").exists():
                typer.echo(f"octetrl: {how}", err=True)
            raise
        raise Stopped(how) from None
    except RunFailed as error:
        typer.echo(f"octetrl: the run failed: {error}", err=True)
        raise typer.Exit(1) from None


def _fetched(url: str, changed: list[str], *, resumes: bool) -> str:
    """The config.yaml of a stored run, which is fetched into its output_dir. The run goes on in that store."""
    if not resumes:
        raise UserError(f"'{url}' is a stored run, which can only be continued; add --resume")
    given = [text for name, _, text in (one.partition("=") for one in changed) if name.strip() == "output_dir"]
    changed.append(f"checkpoint.store={json.dumps(url)}")
    return str(fetch_recipe(url, given[-1] if given else None))


def _refuse_another_folder(recipe: Path, resolved: Recipe, overrides: list[str]) -> None:
    """Refuse the config.yaml of a run folder that was moved or copied: its output_dir is still the old folder."""
    is_given = any(override.partition("=")[0].strip() == "output_dir" for override in overrides)
    if is_of_run(recipe) and not is_given and Path(resolved.output_dir).resolve() != recipe.parent.resolve():
        raise UserError(
            f"--resume: '{recipe}' lies in the folder of a run, but its output_dir is '{resolved.output_dir}'; add"
            f" output_dir={recipe.parent} to continue the run in '{recipe.parent}', or output_dir={resolved.output_dir}"
        )


def _weights_of(source: str, overrides: list[str]) -> list[str]:
    """What `--from` sets in the recipe. An adapter goes on with its own rank and alpha."""
    if recipe_of_run(source) is None:
        raise UserError(f"--from: '{source}' is no run, RUN@STEP or checkpoint; for another model set model.path")
    given = [
        override
        for override in overrides
        if override.partition("=")[0].strip() in ("model.path", "model.preset", "model.init")
    ]
    if given:
        raise UserError(f"--from: '{given[0]}' names other weights; leave one of them out")
    from octetrl.run.trained_model import trained_model, weights_folder

    trained = trained_model(weights_folder(Path(source)))
    fields = [f"model.path={json.dumps(source)}", "model.preset=null", "model.init=pretrained"]
    return [*fields, "model.lora=null"] if trained["lora"] is not None else fields


def last_saved_step(folder: Path) -> int:
    """The step of a run folder's last checkpoint; 0 if there is none."""
    manifests = folder.glob("checkpoints/step_*/manifest.json")
    return max((int(manifest.parent.name.removeprefix("step_")) for manifest in manifests), default=0)


def _how_to_go_on(resolved: Recipe, recipe: str, overrides: list[str]) -> str:
    if not (Path(resolved.output_dir) / "config.yaml").exists():
        return "stopped before the run began; nothing was written"
    step = last_saved_step(Path(resolved.output_dir))
    saved = f"step {step} is saved" if step else "no step is saved"
    return f"stopped; {saved}; continue with: {shlex.join(['octetrl', 'train', recipe, *overrides, '--resume'])}"
