"""The shape of the model that a recipe names. No torch: `octetrl check` needs it too."""

from __future__ import annotations

from pathlib import Path

from octetrl.config.schema import Recipe
from octetrl.models.families import load_spec, spec_from_config
from octetrl.shapes.presets import PRESETS, preset_config
from octetrl.shapes.spec import ModelSpec


def model_spec(recipe: Recipe) -> ModelSpec:
    """From the preset, or from the folder's config.json. A reward model may start from a reward model. Raises UserError
    for a folder that is not there or not a model's."""
    return _spec(recipe, scalar=recipe.algorithm.name == "reward_model")


def with_context_length(recipe: Recipe) -> Recipe:
    """The recipe with `model.context_length`, where that was left out, lowered to the model's positions."""
    if "context_length" in recipe.model.model_fields_set or (recipe.model.path or recipe.model.preset) is None:
        return recipe
    length = min(recipe.model.context_length, model_spec(recipe).max_positions)
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"context_length": length})})


def scalar_spec(recipe: Recipe) -> ModelSpec:
    """The same; a *ForSequenceClassification will do whatever is trained."""
    return _spec(recipe, scalar=True)


def preset_of_missing(recipe: Recipe) -> str | None:
    """The preset with the name of the recipe's model, if its folder is not there: `models/Qwen3-8B` is `qwen3-8b`."""
    path = recipe.model.path
    if path is None or Path(path).exists():
        return None
    name = Path(path).name.lower().removesuffix("-instruct").removesuffix("-base")
    return name if name in PRESETS else None


def _spec(recipe: Recipe, *, scalar: bool) -> ModelSpec:
    if recipe.model.preset is not None:
        return spec_from_config(preset_config(recipe.model.preset), implementation=recipe.model.implementation)
    assert recipe.model.path is not None, "validated: a pretrained model has a path"
    return load_spec(recipe.model.path, scalar=scalar, implementation=recipe.model.implementation)
