"""The recipe with its model found: a folder in place of a run or a name of the hub. Only a run's needs torch."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.run.model_source import found_model
from octetrl.system.errors import UserError
from octetrl.workers.model_shape import with_context_length


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
