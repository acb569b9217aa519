"""Finds changes of a recipe that make it fit a device, by trying them.

Each change sets one field to the value that needs the least memory. Those that cost less time come first. If no change
is enough alone, all are made, and those that are not needed are taken back, the most expensive first. A number that was
lowered further than necessary (tokens of a micro-batch, GPUs) is then moved back as far as the memory allows. A change
counts only if `check` and `train` accept the changed recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from octetrl.cli.check_files import turns_line
from octetrl.config.memory import MemoryEstimate, generates, longest_rollout, smallest_cache
from octetrl.config.schema import LoraConfig, OptimizerConfig, Recipe
from octetrl.config.section import Section
from octetrl.config.worker_memory import on_each_worker

MOST_SHOWN = 3
FREE_SHARE = 0.9  # of the device's memory that training may use: the rest is for what the estimate leaves out
GPUS = (2, 4, 8)
MORE_GPUS = ("cluster.gpus", "cluster.trainer_gpus", "cluster.workers_per_gpu")
LEAST_CHUNK = 256

Estimate = Callable[[Recipe], MemoryEstimate]


@dataclass(frozen=True, slots=True)
class Change:
    """A field with a value that needs less memory. `milder`: values that need more, the most expensive last.
    `also`: further fields, without which the value is refused."""

    field: str
    value: Any
    milder: tuple[Any, ...] = ()
    also: tuple[tuple[str, Any], ...] = ()

    @property
    def overrides(self) -> list[str]:
        return [f"{field}={_text(value)}" for field, value in ((self.field, self.value), *self.also)]

    def apply(self, recipe: Recipe) -> Recipe:
        for field, value in ((self.field, self.value), *self.also):
            recipe = _with(recipe, field.split("."), value)
        return recipe


def _text(value: Any) -> str:
    if isinstance(value, Section):
        assert value == type(value)(), "a section of defaults"
        return "{}"
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def fits(recipe: Recipe, estimate: MemoryEstimate, available: int, *, spare: float = 1.0) -> bool:
    """Whether a worker's memory is enough, also for the smallest KV cache. spare: share for training."""
    estimate = on_each_worker(recipe, estimate, available)
    training = estimate.training_bytes + (0 if estimate.takes_turns else estimate.bytes_when("generating"))
    if estimate.total_bytes > available or training > spare * available:
        return False
    return not generates(recipe) or draws_one(recipe, estimate)


def draws_one(recipe: Recipe, estimate: MemoryEstimate) -> bool:
    """Whether the KV cache is large enough to generate at all."""
    tokens = estimate.kv_cache_tokens
    return tokens is None or tokens >= smallest_cache(recipe)


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
    first: tuple[Change, ...] = (),
) -> list[tuple[Change, ...]]:
    """At most three sets of changes that fit, none with a change that it can do without. Empty if no set fits.

    does_fit: whether a changed recipe fits the device, with some memory to spare. is_allowed: whether a recipe with
    these changes is valid. first: changes that every set begins with.
    """

    if first and not is_allowed(first):
        return []

    def works(changes: Sequence[Change]) -> bool:
        return does_fit(_apply([*first, *changes], recipe))

    def accepts(changes: Sequence[Change]) -> bool:
        return is_allowed([*first, *changes])

    if first and works(()):
        return [first]
    possible = [change for change in _changes(_apply(first, recipe), on_gpu) if accepts([change])]
    sets: Sequence[tuple[Change, ...]] = [(change,) for change in possible if works([change])][:MOST_SHOWN]
    if not sets:
        sets = [_needed(*changes, works) for changes in _together(possible, accepts) if works([*chain(*changes)])]
        sets = [changes for changes in sets if accepts(changes)]
    return [(*first, *_milder(changes, works, accepts)) for changes in sets]


def _together(
    possible: Sequence[Change], accepts: Callable[[Sequence[Change]], bool]
) -> Iterator[tuple[Sequence[Change], Sequence[Change]]]:
    """The changes without more GPUs; and those that more GPUs allow, with these."""
    others = [change for change in possible if change.field not in MORE_GPUS]
    yield others, ()
    for more in possible:
        if more.field in MORE_GPUS:
            yield [change for change in others if accepts([more, change])], (more,)


def _needed(
    changes: Sequence[Change], kept: Sequence[Change], works: Callable[[Sequence[Change]], bool]
) -> tuple[Change, ...]:
    """The `changes` without which it does not fit, and those to keep."""
    for change in reversed(changes):
        fewer = [other for other in changes if other is not change]
        if works([*fewer, *kept]):
            changes = fewer
    return (*changes, *kept)


def _apply(changes: Sequence[Change], recipe: Recipe) -> Recipe:
    for change in changes:
        recipe = change.apply(recipe)
    return recipe


def _milder(
    changes: tuple[Change, ...],
    works: Callable[[Sequence[Change]], bool],
    accepts: Callable[[Sequence[Change]], bool],
) -> tuple[Change, ...]:
    for place, change in enumerate(changes):
        for value in reversed(change.milder):
            tried = (*changes[:place], replace(change, value=value), *changes[place + 1 :])
            if works(tried) and accepts(tried):
                changes = tried
                break
    return changes


def _changes(recipe: Recipe, on_gpu: bool) -> Iterator[Change]:
    """Changes that need less memory than the recipe, those that cost least time first."""
    engine, trainer, cluster = recipe.engine, recipe.trainer, recipe.cluster
    if on_gpu and not engine.release_for_training:
        yield Change("engine.release_for_training", True)
    if engine.kv_cache_tokens is not None:
        yield from _fewer("engine.kv_cache_tokens", engine.kv_cache_tokens, smallest_cache(recipe))
    if smallest_cache(recipe) > longest_rollout(recipe) and _has_one_turn(recipe):
        yield from _fewer("model.context_length", recipe.model.context_length, longest_rollout(recipe))
    if recipe.fp8.train and trainer.weight_codes == "kept":
        yield Change("trainer.weight_codes", "remade")
    if trainer.activation_checkpointing != "layer":
        yield Change("trainer.activation_checkpointing", "layer")
    if trainer.checkpointed_layers is not None:
        yield Change("trainer.checkpointed_layers", None)
    if trainer.logprob_chunk > LEAST_CHUNK:
        yield Change("trainer.logprob_chunk", LEAST_CHUNK)
    yield from _fewer("trainer.tokens_per_micro_batch", trainer.tokens_per_micro_batch, longest_rollout(recipe))
    if cluster.roles is not None and cluster.weight_buffer != "single":
        yield Change("cluster.weight_buffer", "single")
    if cluster.gradients == "local":
        yield Change("cluster.gradients", "sharded")
    yield from _optimizer_changes("trainer.optimizer", trainer.optimizer, recipe, on_gpu)
    if recipe.algorithm.name == "ppo":
        yield from _optimizer_changes("critic.optimizer", recipe.critic.optimizer, recipe, on_gpu)
    if trainer.gradients == "float32":
        yield Change("trainer.gradients", "bfloat16")
    if on_gpu:
        yield from _more_gpus(recipe)


def _more_gpus(recipe: Recipe) -> Iterator[Change]:
    """Weights, states and, if sharded, gradients are shared out among the workers that train."""
    cluster = recipe.cluster
    if cluster.workers_per_gpu > 1:
        yield Change("cluster.workers_per_gpu", 1)
    elif cluster.nodes is None:
        field, has = ("cluster.gpus", cluster.gpus or 1) if cluster.roles is None else (MORE_GPUS[1], cluster.roles[0])
        more = [number for number in GPUS if number > has]
        kept = (("trainer.weight_codes", "kept"),) if recipe.trainer.weight_codes == "remade" else ()
        if more:
            yield Change(field, more[-1], tuple(more[-2::-1]), kept)


def only_adapters(recipe: Recipe) -> Change | None:
    """The change that trains adapters in place of all weights. None: the recipe does that already."""
    if recipe.model.lora is not None:
        return None
    kept = recipe.trainer.weight_codes == "remade" and recipe.algorithm.name != "ppo"
    return Change("model.lora", LoraConfig(), also=(("trainer.weight_codes", "kept"),) if kept else ())


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


def _has_one_turn(recipe: Recipe) -> bool:
    """Whether no conversation needs more of the context than one prompt and answer."""
    return not recipe.environments and next(turns_line(recipe), None) is None


def _with(section: Any, keys: Sequence[str], value: Any) -> Any:
    assert isinstance(section, Section), keys
    if len(keys) > 1:
        value = _with(getattr(section, keys[0]), keys[1:], value)
    return section.model_copy(update={keys[0]: value})
