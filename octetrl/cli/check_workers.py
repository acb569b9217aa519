"""What `octetrl check` says about the memory of a worker: for other numbers of GPUs, and for new weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from octetrl.cli.check_device import GIB
from octetrl.cli.check_memory import MemoryPlan, estimate_lines, training_lines
from octetrl.config.kept_cache import CACHE_OF_ANSWERS, cannot_keep, in_flight
from octetrl.config.role_memory import buffer_choice
from octetrl.config.schema import Recipe
from octetrl.config.weight_buffer import batch_cache_bytes, sent_bytes
from octetrl.shapes.spec import largest_cut, why_not_cut
from octetrl.system.text import binary_size

USUAL_GPUS = (1, 2, 4, 8)
MOST_GPUS = 65_536  # the most that a recipe may ask for
SIZES = (2, 4, 8)  # of groups of workers that share a model


def role_sections(plan: MemoryPlan) -> Iterator[tuple[str, Iterator[tuple[str, str]]]]:
    """The memory of a worker that trains and of one that generates: a title and its lines for each."""
    recipe = plan.recipe
    trainer, engine = plan.of_trainer(recipe), plan.of_engine(recipe)
    train = chain(estimate_lines(plan, trainer), training_lines(plan, trainer, plan.of_trainer))
    yield "memory of a worker that trains", chain(train, worker_memory_lines(plan))
    generate = chain(estimate_lines(plan, engine), weight_buffer_lines(plan), kept_cache_lines(plan))
    yield "memory of a worker that generates", generate


def worker_memory_lines(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """A worker's memory by number of GPUs, if several are used or one is too small; and whether any number is enough.

    It is that of training without the KV cache, which takes what is left.
    """
    cluster, has = plan.recipe.cluster, plan.device.num_bytes
    if not plan.device.on_gpu or has is None or cluster.on_cpus:
        return
    if cluster.tensor_parallel > 1 or cluster.workers_per_gpu > 1:
        return
    if cluster.num_workers == 1 and _training(plan, 1) <= has:
        return
    counts = sorted({*USUAL_GPUS, cluster.num_trainers})
    sizes = ", ".join(f"{count}: {_training(plan, count) / GIB:.1f}" for count in counts)
    if cluster.roles is None:
        yield "each of N GPUs", f"{sizes} GiB while training, with the KV cache freed"
    else:
        yield "each of N trainers", f"{sizes} GiB"
    if plan.recipe.trainer.weight_codes == "remade":
        yield "", "more than 1 with trainer.weight_codes=kept; remade needs whole weights, so it is for 1"
    least = _training(plan, MOST_GPUS)
    if least > has:
        yield from _tensor_parallel(plan, least, has)


def weight_buffer_lines(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """Where workers that generate receive new weights, if they generate ahead, and why there."""
    recipe, device, cluster = plan.recipe, plan.device, plan.recipe.cluster
    if not cluster.max_staleness:
        return
    model = recipe, plan.spec, plan.policy.precisions()
    choice = buffer_choice(*model, plan.estimate(recipe), on_gpu=device.on_gpu, available=device.num_bytes)
    if choice is None:
        weights, cache = binary_size(sent_bytes(*model)), binary_size(batch_cache_bytes(*model))
        yield "new weights", "in a second buffer if the GPU's memory allows it, else in a pause"
        yield "", f"the buffer takes {weights}, the KV cache of a whole batch {cache}"
        return
    pause = "between two batches" if cluster.weights_in_flight == "off" else "between two forwards"
    yield "new weights", "in a second buffer, while answers are generated" if choice.doubles else f"in a pause {pause}"
    yield "", choice.why


def kept_cache_lines(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """What becomes of the KV cache of unfinished answers if weights change in flight."""
    cluster, kv_mode = plan.recipe.cluster, plan.policy.kv_mode
    said = CACHE_OF_ANSWERS[in_flight(cluster, kv_mode)]
    if said is not None:
        yield "", f"the KV cache of unfinished answers is {said}"
    warning = cannot_keep(cluster, kv_mode)
    if warning is not None:
        yield "warning", warning


def _tensor_parallel(plan: MemoryPlan, least: int, has: int) -> Iterator[tuple[str, str]]:
    whole = f"a whole model takes at least {least / GIB:.1f} GiB on each of any number of GPUs, of {has / GIB:.1f}"
    yield "tensor parallelism", f"needed: {whole}"
    for size in SIZES:
        why = why_not_cut(plan.spec, size)
        if why is not None:
            yield "", f"cluster.tensor_parallel={size}: {why}"
            continue
        part = replace(plan, spec=plan.spec.cut(largest_cut(plan.spec, size)))
        gpus = -(-max(USUAL_GPUS[-1], plan.recipe.cluster.num_workers) // size) * size
        needed = _training(part, gpus, size)
        fits = "fits" if needed <= has else "does not fit"
        yield "", f"cluster.tensor_parallel={size}: {needed / GIB:.1f} GiB on each of {gpus} GPUs, which {fits}"
    if plan.recipe.cluster.roles is not None:
        yield "", "it needs cluster.gpus: workers that only train or only generate have whole models so far"
    yield "", "on GPUs its training launches kernel by kernel so far, which is slow (docs/scale.md)"


def _training(plan: MemoryPlan, gpus: int, size: int = 1) -> int:
    recipe = _on(plan.recipe, gpus, size)
    of_worker = plan.of_worker if recipe.cluster.roles is None else plan.of_trainer
    return of_worker(recipe).training_bytes


def _on(recipe: Recipe, gpus: int, size: int) -> Recipe:
    """The recipe with so many GPUs that train. Workers that share a model do both. Several workers keep their codes:
    `remade` is refused, as none has whole weights."""
    if recipe.cluster.roles is not None and size == 1:
        update: dict[str, int | None] = {"trainer_gpus": gpus}
    else:
        update = {"gpus": gpus, "nodes": None, "gpus_per_node": None, "tensor_parallel": size}
        update |= {"trainer_gpus": None, "engine_gpus": None}
    changed = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=update)})
    if changed.cluster.num_groups == 1:
        return changed
    return changed.model_copy(update={"trainer": recipe.trainer.model_copy(update={"weight_codes": "kept"})})
