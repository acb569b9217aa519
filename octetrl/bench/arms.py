"""Arms: what a bench compares. An arm is a recipe with a list of overrides; its run has the bench's workload."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import Literal

from octetrl.bench.workload import Workload
from octetrl.config.objective_settings import OverlongSettings
from octetrl.config.schema import Recipe
from octetrl.config.validate import validate_with_spec
from octetrl.fp8.policy import PrecisionPolicy, precision_policy
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.workers.model_shape import model_spec

Verb = Literal["rollout", "train", "step"]
Words = tuple[str, ...]
SHORT_STEPS = {"rollout": 1, "train": 1, "step": 2}  # untimed


@dataclass(frozen=True, slots=True)
class Arm:
    """`words`: its overrides, by which it is named. `recipe`: of the run, with the sizes of the workload."""

    verb: Verb
    words: Words
    recipe: Recipe
    spec: ModelSpec
    workload: Workload

    @property
    def name(self) -> str:
        """The overrides beside the precision, which has a column of its own."""
        return " ".join(word for word in self.words if not word.startswith("precision="))

    @property
    def policy(self) -> PrecisionPolicy:
        return precision_policy(self.spec, self.recipe.fp8)

    @property
    def untimed(self) -> int:
        """Steps before the timed ones: short ones, then as many as make a batch as old as it will be."""
        return SHORT_STEPS[self.verb] + (self.recipe.cluster.max_staleness if self.verb == "step" else 0)


def words_of_arms(fields: Sequence[str], whole: Sequence[str] = ()) -> list[Words]:
    """The overrides of each arm. Raises UserError.

    fields: `FIELD=A,B` stands for an arm for each value. A comma inside brackets belongs to the value. whole: each is
    one arm, overrides with spaces between them. Of several, all combinations are arms, the last one fastest.
    """
    choices: list[list[Words]] = [[tuple(shlex.split(words)) for words in whole]] if whole else []
    for option in fields:
        field, equals, values = option.partition("=")
        given = list(_split(values))
        if not equals or not field or not all(given) or len(set(given)) < len(given):
            raise UserError(
                f"--arms: '{option}' is not FIELD=VALUE,VALUE with different values; give for example"
                " precision=bf16,fp8_full"
            )
        choices.append([(f"{field}={value}",) for value in given])
    return [tuple(chain(*arm)) for arm in product(*choices)]


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are in no brackets."""
    part, depth = "", 0
    for letter in text:
        depth += (letter in "[{(") - (letter in "]})")
        if letter == "," and depth == 0:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()


def with_layers(recipe: Recipe, layers: int | None) -> ModelSpec:
    """The shape of the recipe's model, with only its first layers. Raises UserError."""
    spec = model_spec(recipe)
    if layers is None or layers == spec.num_layers:
        return spec
    if layers > spec.num_layers:
        raise UserError(f"--layers: {layers} were requested, but the model has {spec.num_layers}; give fewer")
    if recipe.model.init == "pretrained":
        raise UserError("--layers: the model is a folder with weights of its own; give a preset, or leave it out")
    return replace(spec, num_layers=layers)


def make_arm(verb: Verb, words: Words, recipe: Recipe, spec: ModelSpec, workload: Workload, steps: int) -> Arm:
    """The arm with its recipe: sizes of the workload, `steps` timed steps, and nothing written. Raises UserError."""
    if recipe.algorithm.learns_from != "rollouts":
        raise UserError(f"algorithm.name: {recipe.algorithm.name} samples no rollouts, and a bench needs them")
    longest = max(sum(lengths) for lengths in workload.siblings)
    siblings, staleness = len(workload.siblings), recipe.cluster.max_staleness
    changes: dict[str, object] = {
        "model": recipe.model.model_copy(update={"context_length": max(16, longest)}),
        "rollout": recipe.rollout.model_copy(
            update={
                "prompts_per_step": len(workload.groups),
                "group_size": len(workload.groups[0][1]),
                "max_prompt_tokens": max(prompt for prompt, _ in workload.groups),
                "max_new_tokens": max(answer for _, answer in workload.siblings),
                "stop": (),
            }
        ),
        "engine": recipe.engine.model_copy(update={"max_batch": min(recipe.engine.max_batch, siblings)}),
        "evaluation": recipe.evaluation.model_copy(update={"every": 0}),
        "steps": SHORT_STEPS[verb] + 2 * staleness + steps,  # batches behind the last timed step are begun
    }
    if isinstance(recipe.algorithm, OverlongSettings):  # each answer of a bench ends at its limit
        changes["algorithm"] = recipe.algorithm.model_copy(update={"overlong": "keep"})
    recipe = recipe.model_copy(update=changes)
    validate_with_spec(recipe, spec)
    return Arm(verb, words, recipe, spec, workload)
