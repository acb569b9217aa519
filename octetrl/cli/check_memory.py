"""The memory of `octetrl check`: each part, and if it does not fit, the smallest changes that make it fit; of several
workers also for other numbers of GPUs, and for new weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from octetrl.cli.check_machine import GIB, Device
from octetrl.cli.fitting import (
    FREE_SHARE,
    Change,
    draws_one,
    fewest_checkpointed_layers,
    fits,
    only_adapters,
    smallest_changes,
)
from octetrl.config.algorithm import DistillConfig
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.in_words import CACHE_OF_ANSWERS, cannot_keep, in_flight
from octetrl.config.memory import (
    MemoryEstimate,
    Precisions,
    SavedState,
    ScalarModel,
    describe_smallest,
    estimate_memory,
    saved_state,
    saves_beside_steps,
)
from octetrl.config.schema import Recipe, TrainerConfig
from octetrl.config.worker_memory import (
    batch_cache_bytes,
    buffer_choice,
    of_engine,
    of_trainer,
    on_each_worker,
    sent_bytes,
)
from octetrl.fp8.policy import PrecisionPolicy, precision_policy, scoring_policy
from octetrl.models.families import load_critic_spec, load_reward_spec, load_spec
from octetrl.shapes.model_cuts import largest_cut, why_not_cut
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.host import USABLE_HOST, available_host_bytes
from octetrl.system.text import binary_size as size

USUAL_GPUS = (1, 2, 4, 8)
MOST_GPUS = 65_536  # the most that a recipe may ask for
GROUPS = (2, 4, 8)  # sizes of groups of workers that share a model


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a recipe on a device."""

    recipe: Recipe
    spec: ModelSpec
    policy: PrecisionPolicy
    device: Device
    critic: ScalarModel | None
    scorer: ScalarModel | None
    teacher: tuple[ModelSpec, Precisions] | None

    @classmethod
    def of(cls, recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, device: Device) -> MemoryPlan:
        """Raises UserError if a further model of the recipe can't be read."""
        return cls(recipe, spec, policy, device, _critic(recipe, spec), _scorer(recipe), _teacher(recipe))

    def estimate(self, recipe: Recipe) -> MemoryEstimate:
        """The estimate for `recipe`, which has the same models and the same precision."""
        return estimate_memory(
            recipe,
            self.spec,
            self.policy.precisions(),
            on_gpu=self.device.on_gpu,
            device_bytes=self.device.num_bytes,
            critic=self.critic,
            scorer=self.scorer,
            teacher=self.teacher,
        )

    def of_worker(self, recipe: Recipe) -> MemoryEstimate:
        """The same for each of its workers."""
        return on_each_worker(recipe, self.estimate(recipe), self.device.num_bytes)

    def of_trainer(self, recipe: Recipe) -> MemoryEstimate:
        """The same for a worker that only trains."""
        return of_trainer(recipe, self.estimate(recipe))

    def of_engine(self, recipe: Recipe) -> MemoryEstimate:
        """The same for a worker that only generates."""
        device, precisions = self.device, self.policy.precisions()
        whole = self.estimate(recipe)
        return of_engine(recipe, self.spec, precisions, whole, on_gpu=device.on_gpu, available=device.num_bytes)

    def problem(self, is_allowed: Callable[[Sequence[Change]], bool]) -> str | None:
        """One line if the recipe needs more than the device has, with the smallest changes that make it fit. If several
        workers share the device: if one of them needs more than the whole device.

        is_allowed: whether a recipe with these changes is valid.
        """
        available = self.device.num_bytes
        if available is None or self._runs_elsewhere:
            return None
        what = self._lack(self.recipe, available)
        if what is None:
            return None
        sharing = self.sharing
        if sharing > 1:
            what = f"{sharing} workers share the device, and {what}"
        return f"memory: {what}; {self._remedy(available, sharing, is_allowed)}"

    @property
    def sharing(self) -> int:
        """Number of workers on the device."""
        return self._sharing(self.recipe)

    def _sharing(self, recipe: Recipe) -> int:
        """All workers of a run on the CPU of this machine, and `workers_per_gpu` on a GPU."""
        return recipe.cluster.workers_per_gpu if self.device.on_gpu else recipe.cluster.num_workers

    @property
    def _runs_elsewhere(self) -> bool:
        """Whether the workers are on CPUs that the device says nothing about."""
        cluster = self.recipe.cluster
        return cluster.on_cpus and (self.device.on_gpu or (cluster.uses_ray and not cluster.starts_ray))

    def _remedy(self, available: int, sharing: int, is_allowed: Callable[[Sequence[Change]], bool]) -> str:
        on_gpu = self.device.on_gpu
        spare = FREE_SHARE if on_gpu else 1.0

        def does_fit(recipe: Recipe) -> bool:
            share = available // self._sharing(recipe)
            return replace(self, device=replace(self.device, num_bytes=share))._lack(recipe, share, spare) is None

        how = "it fits" if sharing == 1 else "in even shares it fits"
        found = smallest_changes(self.recipe, does_fit, is_allowed, on_gpu=on_gpu)
        if found:
            return f"{how} with {_ways(found)}"
        none = "no smaller setting makes it fit" if sharing == 1 else "no smaller setting makes it fit in even shares"
        adapters = only_adapters(self.recipe)
        if adapters is not None:
            found = smallest_changes(self.recipe, does_fit, is_allowed, on_gpu=on_gpu, first=(adapters,))
        if found:
            return f"{none} while all weights are trained; {how} with {_ways(found)}"
        fewer = "" if sharing == 1 else "fewer workers on this device, "
        elsewhere = " (--memory-gib 80 plans for a GPU of 80 GiB)" if self._may_mean_a_gpu else ""
        return f"{none}; use a smaller model, {fewer}or a device with more memory{elsewhere}"

    @property
    def _may_mean_a_gpu(self) -> bool:
        """Whether the recipe runs on this machine's CPU only because there is no GPU."""
        cluster = self.recipe.cluster
        return self.device.is_here and not self.device.on_gpu and cluster.device == "auto" and not cluster.on_cpus

    def _lack(self, recipe: Recipe, available: int, spare: float = 1.0) -> str | None:
        """What a worker needs more than there is. `spare`: share of the memory that training may use."""
        if recipe.cluster.roles is not None:
            return self._lack_of_a_role(recipe, available, spare)
        if fits(recipe, self.estimate(recipe), available, spare=spare):
            return None
        needs = self.of_worker(recipe)
        if needs.total_bytes > available:
            what = "it" if self.sharing == 1 else "each worker"
            return f"{what} needs {size(needs.total_bytes)} of {size(available)}"
        return _too_few(recipe, needs, available)

    def _lack_of_a_role(self, recipe: Recipe, available: int, spare: float) -> str | None:
        training, engine = self.of_trainer(recipe).training_bytes, self.of_engine(recipe)
        if training > spare * available:
            return f"a worker that trains needs {size(training)} of {size(available)}"
        if engine.total_bytes > available:
            return f"a worker that generates needs {size(engine.total_bytes)} of {size(available)}"
        if draws_one(recipe, engine):
            return None
        return f"on a worker that generates {_too_few(recipe, engine, available)}"


def _ways(found: Sequence[Sequence[Change]]) -> str:
    return "; or with ".join(" ".join(chain.from_iterable(change.overrides for change in changes)) for changes in found)


def _too_few(recipe: Recipe, needs: MemoryEstimate, available: int) -> str:
    tokens, least = needs.kv_cache_tokens or 0, describe_smallest(recipe)
    return f"{size(available)} leave room for {tokens:,} tokens of the KV cache, less than {least}"


def memory_lines(plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """The estimate of a worker by part, with what a larger KV cache or fewer checkpointed layers could use."""
    estimate = plan.of_worker(plan.recipe)
    yield from estimate_lines(plan, estimate)
    yield from training_lines(plan, estimate, plan.of_worker)


def estimate_lines(plan: MemoryPlan, estimate: MemoryEstimate) -> Iterator[tuple[str, str]]:
    """The parts, their sum, and what a larger KV cache could use."""
    recipe, device = plan.recipe, plan.device
    for part in estimate.parts:
        yield part.name, f"{size(part.num_bytes):>12}   {part.how}"
    if estimate.kv_cache_tokens is None:
        share = f"{recipe.engine.kv_memory_fraction:.0%} of the memory left"
        yield "KV cache", f"{'?':>12}   {share}, {estimate.kv_bytes_per_token:,} bytes a token"
    sharing = plan.sharing
    of_device = "" if device.num_bytes is None else f"   of {size(device.num_bytes)}"
    if of_device and sharing > 1:
        of_device += f" that {sharing} workers share"
    if estimate.takes_turns and estimate.kv_bytes_per_token:
        training = estimate.training_bytes
        of_device += f"; {size(training)} while training, with the KV cache freed"
    yield "total", f"{size(estimate.total_bytes):>12}{of_device}"
    if device.num_bytes is not None:
        yield from _room(estimate, device.num_bytes // sharing, sharing)


def training_lines(
    plan: MemoryPlan, estimate: MemoryEstimate, of_recipe: Callable[[Recipe], MemoryEstimate]
) -> Iterator[tuple[str, str]]:
    """Whether fewer layers need to be checkpointed, and what saving needs. of_recipe: estimates the same worker."""
    recipe, device = plan.recipe, plan.device
    if device.num_bytes is not None and device.on_gpu:
        fewest = fewest_checkpointed_layers(recipe, plan.spec.num_layers, device.num_bytes, of_recipe)
        yield from _less_checkpointing(recipe.trainer, plan.spec.num_layers, fewest)
    if saves_beside_steps(recipe):
        yield from _copy_for_saving(recipe, saved_state(recipe, plan.spec, plan.critic), estimate, device)


def _copy_for_saving(
    recipe: Recipe, state: SavedState, estimate: MemoryEstimate, device: Device
) -> Iterator[tuple[str, str]]:
    """The host memory that lets a checkpoint be written while the next step runs, and whether there is as much."""
    yield (
        "checkpoint copy",
        f"{size(state.num_bytes):>12}   of the host's memory, so that saving does not stop the run",
    )
    free = available_host_bytes() if device.is_here else None
    if free is not None:
        if not device.on_gpu:
            free -= estimate.total_bytes
        elif recipe.trainer.optimizer.offload:
            free -= state.optimizer
        if state.num_bytes > USABLE_HOST * free:
            yield "", f"the host has room for {size(max(free, 0))}: each checkpoint will stop the run while written"


def _less_checkpointing(trainer: TrainerConfig, num_layers: int, fewest: int | None) -> Iterator[tuple[str, str]]:
    """How few layers need to run again in the backward, where that is fewer than do."""
    asked = num_layers if trainer.checkpointed_layers is None else trainer.checkpointed_layers
    if trainer.activation_checkpointing != "none" and fewest is not None and fewest < asked:
        said = f"{fewest} of {num_layers} layers are enough: trainer.checkpointed_layers={fewest} is faster"
        yield "checkpointing", said


def _critic(recipe: Recipe, spec: ModelSpec) -> ScalarModel | None:
    if recipe.algorithm.name != "ppo":
        return None
    if recipe.critic.path is not None:
        spec = load_critic_spec(recipe.critic.path, spec, recipe.model.context_length)
    return ScalarModel(spec, _training_alone(precision_policy(spec, recipe.fp8)))


def _scorer(recipe: Recipe) -> ScalarModel | None:
    if recipe.environment.reward_model is None:
        return None
    spec = load_reward_spec(recipe.environment.reward_model)
    return ScalarModel(spec, _training_alone(scoring_policy(spec, recipe.fp8)))


def _training_alone(policy: PrecisionPolicy) -> Precisions:
    """The precisions of a model that draws nothing: only what it computes scalars with has codes."""
    return replace(policy.precisions(), fp8_rollout=[])


def _teacher(recipe: Recipe) -> tuple[ModelSpec, Precisions] | None:
    algorithm = recipe.algorithm
    if not isinstance(algorithm, DistillConfig):
        return None
    assert algorithm.teacher is not None, "validated: distill has a teacher"
    try:
        spec = load_spec(algorithm.teacher)
    except UserError as error:
        raise UserError(f"algorithm.teacher: {error}") from None
    fp8 = Fp8Config(train=algorithm.teacher_precision == "fp8")
    return spec, precision_policy(spec, fp8).precisions()


def _room(estimate: MemoryEstimate, device_bytes: int, sharing: int) -> Iterator[tuple[str, str]]:
    """What a larger KV cache could take. device_bytes: of one worker, if several share the device evenly."""
    if estimate.total_bytes > device_bytes or not estimate.kv_bytes_per_token:
        return
    room = device_bytes - estimate.bytes_when("always")
    room -= sum(part.num_bytes for part in estimate.parts if part.when == "generating" and part.name != "KV cache")
    if not estimate.takes_turns:
        room -= estimate.bytes_when("training")
    tokens = room // estimate.kv_bytes_per_token
    if room < 0:
        return
    alone = "if nothing else uses the memory" if sharing == 1 else f"if the {sharing} workers share the memory evenly"
    yield "room for KV cache", f"{size(room):>12}   {tokens:,} tokens, {alone}"


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
        weights, cache = size(sent_bytes(*model)), size(batch_cache_bytes(*model))
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
    for group in GROUPS:
        why = why_not_cut(plan.spec, group)
        if why is not None:
            yield "", f"cluster.tensor_parallel={group}: {why}"
            continue
        part = replace(plan, spec=plan.spec.cut(largest_cut(plan.spec, group)))
        gpus = -(-max(USUAL_GPUS[-1], plan.recipe.cluster.num_workers) // group) * group
        needed = _training(part, gpus, group)
        said = "fits" if needed <= has else "does not fit"
        yield "", f"cluster.tensor_parallel={group}: {needed / GIB:.1f} GiB on each of {gpus} GPUs, which {said}"
    if plan.recipe.cluster.roles is not None:
        yield "", "it needs cluster.gpus: workers that only train or only generate have whole models so far"
    yield "", "on GPUs its training launches kernel by kernel so far, which is slow (docs/scale.md)"


def _training(plan: MemoryPlan, gpus: int, group: int = 1) -> int:
    recipe = _on(plan.recipe, gpus, group)
    of_worker = plan.of_worker if recipe.cluster.roles is None else plan.of_trainer
    return of_worker(recipe).training_bytes


def _on(recipe: Recipe, gpus: int, group: int) -> Recipe:
    """The recipe with so many GPUs that train. Workers that share a model do both. Several workers keep their codes:
    `remade` is refused, as none has whole weights."""
    if recipe.cluster.roles is not None and group == 1:
        update: dict[str, int | None] = {"trainer_gpus": gpus}
    else:
        update = {"gpus": gpus, "nodes": None, "gpus_per_node": None, "tensor_parallel": group}
        update |= {"trainer_gpus": None, "engine_gpus": None}
    changed = recipe.model_copy(update={"cluster": recipe.cluster.model_copy(update=update)})
    if changed.cluster.num_groups == 1:
        return changed
    return changed.model_copy(update={"trainer": recipe.trainer.model_copy(update={"weight_codes": "kept"})})
