"""Combinations of settings that save memory in training, as config/validate.py reports them."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.config.schema import Recipe
from octetrl.config.section import Problem


def training_memory_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from _weight_code_problems(recipe)
    yield from _gradient_problems(recipe)


def _weight_code_problems(recipe: Recipe) -> Iterator[Problem]:
    fp8, name = recipe.fp8, recipe.algorithm.name
    if recipe.trainer.weight_codes == "kept":
        return
    if not fp8.train:
        text = (
            "trainer.weight_codes: 'remade' has no effect if training is not FP8; leave it out, or use precision:"
            " fp8_full"
        )
        yield Problem(("trainer.weight_codes", "fp8.train"), text)
    elif recipe.model.lora is not None and name != "ppo":
        text = (
            "trainer.weight_codes: with model.lora an FP8 weight exists only as codes, so they cannot be 'remade';"
            " use kept"
        )
        yield Problem(("trainer.weight_codes", "model.lora"), text)
    has_graphs = fp8.rollout and name != "reward_model" and recipe.cluster.device != "cpu"
    if fp8.train and has_graphs and not recipe.engine.release_for_training:
        text = (
            "trainer.weight_codes: 'remade' moves the codes that the engine's captured graphs read, but"
            " engine.release_for_training: false keeps the graphs; set that to true, or use kept"
        )
        yield Problem(("trainer.weight_codes", "engine.release_for_training"), text)


def _gradient_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.trainer.gradients == "float32":
        return
    if recipe.model.dtype == "float32":
        text = "trainer.gradients: bfloat16 sums are for bfloat16 weights; with model.dtype: float32 use float32"
        yield Problem(("trainer.gradients", "model.dtype"), text)
    if recipe.cluster.tensor_parallel > 1:
        text = "trainer.gradients: bfloat16 sums are not available with cluster.tensor_parallel; use float32"
        yield Problem(("trainer.gradients", "cluster.tensor_parallel"), text)
    elif recipe.model.lora is not None and recipe.algorithm.name != "ppo":
        text = (
            "trainer.gradients: with model.lora only adapters have gradients, so bfloat16 saves next to nothing; use"
            " float32"
        )
        yield Problem(("trainer.gradients", "model.lora"), text)
