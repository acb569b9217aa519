"""Finds the smallest changes of a recipe that make it fit a device, by trying them.

Each change sets one field to the value that needs the least memory. All sets of one change are tried, then all of two,
and so on, until some fit; changes that cost less time come first. A number that was lowered further than necessary
(tokens of a micro-batch, GPUs) is then moved back as far as the memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from octetrl.config.memory import MemoryEstimate
from octetrl.config.schema import OptimizerConfig, Recipe
from octetrl.config.section import Section
from octetrl.config.worker_memory import on_each_worker

MOST_SHOWN = 3
FREE_SHARE = 0.9  # of the device's memory that training may use: the rest is for what the estimate leaves out
GPUS = (2, 4, 8)
LEAST_CHUNK = 256

Estimate = Callable[[Recipe], MemoryEstimate]


@dataclass(frozen=True, slots=True)
class Change:
    """A field with a value that needs less memory. `milder`: values that need more, the most expensive last."""

    field: str
    value: Any
    milder: tuple[Any, ...] = ()

    @property
    def override(self) -> str:
        text = {None: "null", True: "true", False: "false"}.get(self.value, str(self.value))
        return f"{self.field}={text}"

    def apply(self, recipe: Recipe) -> Recipe:
        return _with(recipe, self.field.split("."), self.value)


def fits(recipe: Recipe, estimate: MemoryEstimate, available: int, *, spare: float = 1.0) -> bool:
    """Whether a worker's memory is enough, also for the KV cache of one rollout. spare: share for training."""
    estimate = on_each_worker(recipe, estimate, available)
    training = estimate.training_bytes + (0 if estimate.takes_turns else estimate.bytes_when("generating"))
    if estimate.total_bytes > available or training > spare * available:
        return False
    draws = recipe.algorithm.learns_from == "rollouts" or recipe.evaluation.every > 0
    return not draws or draws_one(recipe, estimate)


def draws_one(recipe: Recipe, estimate: MemoryEstimate) -> bool:
    """Whether the KV cache holds the longest rollout."""
    tokens = estimate.kv_cache_tokens
    return tokens is None or tokens >= _longest(recipe)


def fewest_checkpointed_layers(recipe: Recipe, num_layers: int, device_bytes: int, estimate: Estimate) -> int | None:
    """Find the smallest `checkpointed_layers` whose training fits into nine tenths of a GPU. None: no number fits.

    estimate: estimates the memory of this recipe with another `checkpointed_layers`.
    """
    for number in range(num_layers + 1):
        trainer = recipe.trainer.model_copy(update={"checkpointed_layers": number})
        found = estimate(recipe.model_copy(update={"trainer": trainer}))
        training = found.training_bytes
        if not found.takes_turns:
            training += found.bytes_when("generating")
        if training <= FREE_SHARE * device_bytes:
            return number
    return None


def smallest_changes(
    recipe: Recipe,
    does_fit: Callable[[Recipe], bool],
    is_allowed: Callable[[Sequence[Change]], bool],
    *,
    on_gpu: bool,
) -> list[tuple[Change, ...]]:
    """At most three sets of changes that fit, all of the smallest possible size. Empty if no set fits.

    does_fit: whether a changed recipe fits the device, with some memory to spare.
    """

    def works(changes: Sequence[Change]) -> bool:
        changed = recipe
        for change in changes:
            changed = change.apply(changed)
        return does_fit(changed)

    possible = [change for change in _changes(recipe, on_gpu) if is_allowed([change])]
    if not works(possible):
        return []
    for count in range(1, len(possible) + 1):
        found: list[tuple[Change, ...]] = []
        for chosen in combinations(possible, count):
            if works(chosen) and is_allowed(chosen):
                found.append(_milder(chosen, works))
            if len(found) == MOST_SHOWN:
                break
        if found:
            return found
    return []


def _milder(changes: tuple[Change, ...], works: Callable[[Sequence[Change]], bool]) -> tuple[Change, ...]:
    for place, change in enumerate(changes):
        for value in reversed(change.milder):
            tried = (*changes[:place], replace(change, value=value), *changes[place + 1 :])
            if works(tried):
                changes = tried
                break
    return changes


def _changes(recipe: Recipe, on_gpu: bool) -> Iterator[Change]:
    """Changes that need less memory than the recipe, those that cost least time first."""
    engine, trainer, cluster = recipe.engine, recipe.trainer, recipe.cluster
    if on_gpu and not engine.release_for_training:
        yield Change("engine.release_for_training", True)
    if engine.kv_cache_tokens is not None:
        yield from _fewer("engine.kv_cache_tokens", engine.kv_cache_tokens, _longest(recipe))
    if recipe.fp8.train and trainer.weight_codes == "kept":
        yield Change("trainer.weight_codes", "remade")
    if trainer.activation_checkpointing != "layer":
        yield Change("trainer.activation_checkpointing", "layer")
    if trainer.checkpointed_layers is not None:
        yield Change("trainer.checkpointed_layers", None)
    if trainer.logprob_chunk > LEAST_CHUNK:
        yield Change("trainer.logprob_chunk", LEAST_CHUNK)
    yield from _fewer("trainer.tokens_per_micro_batch", trainer.tokens_per_micro_batch, _longest(recipe))
    if cluster.roles is not None and cluster.weight_buffer == "double":
        yield Change("cluster.weight_buffer", "single")
    yield from _optimizer_changes("trainer.optimizer", trainer.optimizer, recipe, on_gpu)
    if recipe.algorithm.name == "ppo":
        yield from _optimizer_changes("critic.optimizer", recipe.critic.optimizer, recipe, on_gpu)
    if on_gpu and not cluster.uses_ray:
        yield Change("cluster.gpus", GPUS[-1], GPUS[-2::-1])


def _optimizer_changes(section: str, optimizer: OptimizerConfig, recipe: Recipe, on_gpu: bool) -> Iterator[Change]:
    if on_gpu and not optimizer.offload:
        yield Change(f"{section}.offload", True)
    if optimizer.states != "8bit":
        yield Change(f"{section}.states", "8bit", ("bfloat16",) if optimizer.states == "float32" else ())
    if optimizer.master == "float32" and recipe.model.dtype == "bfloat16":
        yield Change(f"{section}.master", "stochastic_rounding")


def _fewer(field: str, number: int, least: int) -> Iterator[Change]:
    """A whole number lowered to `least`, or by halves as far as the memory needs it."""
    halves = []
    while number // 2 > least:
        number //= 2
        halves.append(number)
    if number > least:
        yield Change(field, least, tuple(reversed(halves)))


def _longest(recipe: Recipe) -> int:
    """Tokens of the longest rollout, in whole pages."""
    page = recipe.engine.page_size
    longest = recipe.rollout.max_prompt_tokens + max(
        recipe.rollout.max_new_tokens, recipe.evaluation.max_new_tokens or 0
    )
    return -(-longest // page) * page


def _with(section: Any, keys: Sequence[str], value: Any) -> Any:
    assert isinstance(section, Section), keys
    if len(keys) > 1:
        value = _with(getattr(section, keys[0]), keys[1:], value)
    return section.model_copy(update={keys[0]: value})
