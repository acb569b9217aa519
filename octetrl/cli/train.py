"""`octetrl train`: runs a recipe from the first step or from the last checkpoint."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from octetrl.cli.arguments import Overrides, RecipePath
from octetrl.cli.ctrl_c import Stopped
from octetrl.config.errors import RunFailed, UserError
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.environments.python_object import search_beside


def train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the run folder's last checkpoint.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            "--allow",
            metavar="FIELD=VALUE",
            help="With --resume: change a field from here on, such as trainer.optimizer.lr=1e-6.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model by a recipe: reinforcement learning, SFT, preferences or a reward model."""
    allow = allow or []
    if allow and not resume:
        raise UserError("--allow: it changes a run that is resumed; add --resume, or leave it out")
    changed = [*(overrides or []), *allow]
    resolved = load_recipe(recipe, changed)
    if resume:
        _refuse_another_folder(Path(recipe), resolved, changed)
    search_beside(recipe)
    from octetrl.run import loop

    try:
        loop.train(resolved, resume=resume, allowed=[change.partition("=")[0].strip() for change in allow])
    except KeyboardInterrupt:
        raise Stopped(_how_to_go_on(resolved, recipe, changed)) from None
    except RunFailed as error:
        typer.echo(f"octetrl: the run failed: {error}", err=True)
        raise typer.Exit(1) from None


def _refuse_another_folder(recipe: Path, resolved: Recipe, overrides: list[str]) -> None:
    """Refuse the config.yaml of a run folder that was moved or copied: its output_dir is still the old folder."""
    is_of_run = recipe.name == "config.yaml" and (recipe.parent / "checkpoints").is_dir()
    is_given = any(override.partition("=")[0].strip() == "output_dir" for override in overrides)
    if is_of_run and not is_given and Path(resolved.output_dir).resolve() != recipe.parent.resolve():
        raise UserError(
            f"--resume: '{recipe}' lies in the folder of a run, but its output_dir is '{resolved.output_dir}'; add"
            f" output_dir={recipe.parent} to continue the run in '{recipe.parent}', or output_dir={resolved.output_dir}"
        )


def _how_to_go_on(resolved: Recipe, recipe: str, overrides: list[str]) -> str:
    if not (Path(resolved.output_dir) / "config.yaml").exists():
        return "stopped before the run began; nothing was written"
    return f"stopped; continue with: {shlex.join(['octetrl', 'train', recipe, *overrides, '--resume'])}"
