"""`octetrl check`: what a recipe means, before anything is built: essentials, what is FP8, memory by part, problems.

The shape comes from config.json, the device from nvidia-smi. Torch only counts the GPUs for several workers. A recipe
for a machine elsewhere is checked with that machine's memory: `--memory-gib 140`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer

from octetrl.cli.arguments import Overrides, RecipePath
from octetrl.cli.check_cluster import worker_lines, worker_problems
from octetrl.cli.check_files import file_problems
from octetrl.cli.check_turns import turns_line
from octetrl.config.algorithm import DistillConfig
from octetrl.config.errors import UserError
from octetrl.config.host_memory import USABLE_HOST, available_host_bytes
from octetrl.config.load import load_recipe
from octetrl.config.memory import (
    MemoryEstimate,
    Precisions,
    ScalarModel,
    estimate_memory,
    fewest_checkpointed_layers,
)
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.presets import preset_config
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.saved_state import SavedState, saved_state, saves_beside_steps
from octetrl.config.schema import Fp8Config, Recipe, TrainerConfig
from octetrl.config.spec import ModelSpec
from octetrl.config.validate import spec_problems
from octetrl.fp8.parity import refused_gate, slow_paths, why_not_equal
from octetrl.fp8.policy import LinearFormat, PrecisionPolicy, Side, precision_policy, scoring_policy, tokens_that_pay
from octetrl.models.families import load_critic_spec, load_reward_spec, load_spec, spec_from_config

GIB = 2**30
SMALLEST_GIB, LARGEST_GIB = 0.001, 1e6  # of --memory-gib: a petabyte is no device's, infinity no number of bytes


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    on_gpu: bool
    num_bytes: int | None  # None: not known
    is_here: bool = True  # false: planned for, a machine of which nothing else is known


def check(
    recipe: RecipePath,
    overrides: Overrides = None,
    memory_gib: Annotated[
        float | None,
        typer.Option(
            "--memory-gib", help="Plan for a GPU with this much memory; 0.001 to 1,000,000.", show_default=False
        ),
    ] = None,
) -> None:
    """Show what a recipe means, what it needs, and every problem it has."""
    if memory_gib is not None and not SMALLEST_GIB <= memory_gib <= LARGEST_GIB:
        raise UserError(
            f"--memory-gib: {memory_gib:g} is no GPU's memory; give {SMALLEST_GIB:g} to {LARGEST_GIB:,.0f}, as 140"
        )
    resolved = load_recipe(recipe, overrides or [])
    problems: list[str] = []
    spec = None
    try:
        spec = _model_spec(resolved)
    except UserError as error:
        problems.append(str(error))
    problems += file_problems(resolved, spec)
    device = find_device(resolved, memory_gib)
    problems += worker_problems(resolved.cluster) if device.is_here else []
    print_lines("recipe", _essentials(resolved, device))
    try:
        if spec is not None:
            problems += [problem.text for problem in spec_problems(resolved, spec)]
            policy = precision_policy(spec, resolved.fp8, resolved.numerics)
            problems += filter(None, [refused_gate(resolved, policy, on_gpu=device.on_gpu)])
            print_lines("model", _model(spec))
            print_lines("precision", _precision(resolved, spec, policy, device))
            print_lines("memory", _memory(resolved, spec, policy, device))
    except UserError as error:
        problems.append(str(error))
    if len(problems) == 1:
        raise UserError(f"{recipe}: {problems[0]}")
    if problems:
        raise UserError("\n  ".join([f"{recipe}: {len(problems)} problems", *problems]))
    typer.echo("no problems")


def print_lines(title: str, lines: Iterator[tuple[str, str]]) -> None:
    rows = list(lines)  # all of them first: a section is shown whole or not at all
    width = max(20, *(len(name) + 2 for name, _ in rows)) if rows else 20
    typer.echo(title)
    for name, value in rows:
        typer.echo(f"  {name:<{width}}{value}")


def find_device(recipe: Recipe, memory_gib: float | None) -> Device:
    """The device the recipe would run on here, or the one it is planned for."""
    if memory_gib is not None:
        return Device(f"a GPU with {memory_gib:g} GiB", True, int(memory_gib * GIB), is_here=False)
    if recipe.cluster.device != "cpu" and recipe.cluster.cpus is None:
        found = _first_gpu()
        if found is not None:
            return found
        if recipe.cluster.device == "cuda":
            return Device("cuda, but this machine has no GPU; plan for one with --memory-gib", True, None)
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(f"CPU with {num_bytes / GIB:.1f} GiB, FP8 is emulated", False, num_bytes)


def _first_gpu() -> Device | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    name, comma, mebibytes = answer.rpartition(", ")
    if not comma or not mebibytes.isdigit():
        return None
    return Device(f"{name}, {int(mebibytes) / 1024:.1f} GiB", True, int(mebibytes) * 2**20)


def _model_spec(recipe: Recipe) -> ModelSpec:
    if recipe.model.preset is not None:
        return spec_from_config(preset_config(recipe.model.preset))
    return load_spec(str(recipe.model.path), scalar=recipe.algorithm.name == "reward_model")


def _essentials(recipe: Recipe, device: Device) -> Iterator[tuple[str, str]]:
    rollout, algorithm, optimizer = recipe.rollout, recipe.algorithm, recipe.trainer.optimizer
    if isinstance(algorithm, DatasetSettings):
        what = "conversations" if algorithm.learns_from == "conversations" else "pairs"
        paths = ", ".join(source.path for source in recipe.sources.values())
        yield "algorithm", f"{algorithm.name}, {algorithm.batch_size} {what} a step from {paths}"
    else:
        size = f"{rollout.prompts_per_step} prompts x {rollout.group_size} siblings a step"
        yield "algorithm", f"{algorithm.name}, {size}, temperature {rollout.temperature:g}"
    yield "steps", f"{recipe.steps:,}, seed {recipe.seed}, into {recipe.output_dir}"
    yield "optimizer", f"AdamW, lr {optimizer.lr:g}, {optimizer.decay}, {optimizer.warmup_steps} warm-up steps"
    longest = f"{rollout.max_prompt_tokens:,} prompt + {rollout.max_new_tokens:,} answer tokens"
    lora = recipe.model.lora
    if lora is not None:
        beginning = "newly initialised" if lora.path is None else f"from {lora.path}"
        targets = "all projections" if lora.targets is None else ", ".join(lora.targets)
        yield "LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}, on {targets}; {beginning}"
    yield "lengths", f"{longest}, context {recipe.model.context_length:,}"
    environment = recipe.environment
    if isinstance(algorithm, DistillConfig):
        yield "teacher", f"{algorithm.teacher}, {algorithm.teacher_precision}, {algorithm.distillation}"
    if environment.dataset is not None:
        yield "environment", f"{environment.kind} {environment.dataset}, {environment.eval_size} tasks held out"
        yield from turns_line(recipe)
    if environment.kind == "code" or "python" in environment.tools:
        yield from _sandbox(environment.sandbox)
    yield "device", device.name
    yield from worker_lines(recipe.cluster)


def _sandbox(config: SandboxConfig) -> Iterator[tuple[str, str]]:
    """The level in force, and what it does not protect from. Where there is none, `_file_problems` has said so."""
    from octetrl.environments.sandbox.sandbox import sandbox_for

    try:
        sandbox = sandbox_for(config)
    except UserError:
        return
    yield "sandbox", f"level {sandbox.level}, {sandbox.interpreter.executable}; not protected from:"
    for gap in sandbox.protection.gaps:
        yield "", gap


def _model(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    yield "parameters", f"{spec.num_parameters:,} ({'tied' if spec.tied_embeddings else 'untied'} embeddings)"
    yield "shape", f"{spec.family}, {spec.num_layers} layers, hidden {spec.hidden_size}, MLP {spec.intermediate_size}"
    yield "heads", f"{spec.num_heads} query, {spec.num_kv_heads} KV, of {spec.head_size}"
    windows = [getattr(spec.blocks_of(layer).attention, "window", None) for layer in range(spec.num_layers)]
    if narrow := [window for window in windows if window is not None]:
        sizes = " or ".join(f"{size:,}" for size in sorted(set(narrow)))
        yield "windows", f"{sizes} keys in {len(narrow)} of {spec.num_layers} layers; older pages stay in the KV cache"
    yield "vocabulary", f"{spec.vocab_size:,}"


def _precision(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, device: Device) -> Iterator[tuple[str, str]]:
    yield "", f"{'rollout':<16}training"
    for kind, linears in policy.kinds().items():
        yield kind, f"{_share(linears, 'rollout'):<16}{_share(linears, 'train')}"
    if policy.kv_mode == "none":
        yield "KV cache", recipe.model.dtype
    else:
        scales = f"calibrated scales ({recipe.fp8.calibration})" if policy.kv_mode == "calibrated" else "dynamic scales"
        replay = "replayed in training" if recipe.fp8.kv_replay else "not replayed in training"
        formats = ", ".join(f"{name} {stored}" for name, stored in policy.cache)
        yield "KV cache", f"{formats}, {scales}, {replay}"
        cached = dict.fromkeys(tensor for layer in range(spec.num_layers) for tensor in spec.cached(layer))
        for tensor in cached:
            if tensor.never_fp8 is not None:
                yield "", f"{tensor.name} stays BF16: {tensor.never_fp8}"
    yield "everything else", f"{recipe.model.dtype}; log-softmax and loss float32"
    yield from _numerics(recipe, policy, device)
    given, wanted = recipe.trainer.tokens_per_micro_batch, tokens_that_pay(spec.hidden_size)
    if policy.uses_fp8("train") and device.on_gpu and not recipe.fp8.emulate and given < wanted:
        yield "warning", f"FP8 training is hardly faster than BF16 with {given:,} tokens a micro-batch at this width;"
        yield "", f"raise trainer.tokens_per_micro_batch to {wanted:,} or more, or take precision: bf16"


def _numerics(recipe: Recipe, policy: PrecisionPolicy, device: Device) -> Iterator[tuple[str, str]]:
    """Whether the two sides' log-probs will be equal, and if not why; which side of a GPU's run is not fused."""
    why = why_not_equal(recipe, policy, on_gpu=device.on_gpu)
    if why is None:
        yield "numerics", "parity: one order of sums on both sides, so equal log-probs"
    else:
        yield "numerics", f"{policy.numerics}; equal log-probs are not promised:"
        yield "", why
    for line in slow_paths(recipe, policy, on_gpu=device.on_gpu):
        yield "warning", line


def _share(linears: Sequence[LinearFormat], side: Side) -> str:
    """`fp8`, `bf16`, or how many of the layers are FP8."""
    formats = [linear.rollout if side == "rollout" else linear.train for linear in linears]
    count = formats.count("fp8")
    return formats[0] if count in (0, len(formats)) else f"fp8 in {count} of {len(formats)}"


def _memory(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, device: Device) -> Iterator[tuple[str, str]]:
    others: dict[str, Any] = {
        "critic": _critic(recipe, spec),
        "scorer": _scorer(recipe),
        "teacher": _teacher(recipe),
    }

    def estimated(recipe: Recipe) -> MemoryEstimate:
        return estimate_memory(
            recipe, spec, policy.precisions(), on_gpu=device.on_gpu, device_bytes=device.num_bytes, **others
        )

    estimate = estimated(recipe)
    for part in estimate.parts:
        yield part.name, f"{_size(part.num_bytes):>12}   {part.how}"
    if estimate.kv_cache_tokens is None:
        share = f"{recipe.engine.kv_memory_fraction:.0%} of the memory left"
        yield "KV cache", f"{'?':>12}   {share}, {estimate.kv_bytes_per_token:,} bytes a token"
    of_device = "" if device.num_bytes is None else f"   of {_size(device.num_bytes)}"
    if estimate.takes_turns and estimate.kv_bytes_per_token:
        training = estimate.training_bytes
        of_device += f"; {_size(training)} while training, with the KV cache freed"
    yield "total", f"{_size(estimate.total_bytes):>12}{of_device}"
    if device.num_bytes is not None:
        keeps_codes = policy.uses_fp8("train") and recipe.trainer.weight_codes == "kept" and recipe.model.lora is None
        yield from _room(estimate, device.num_bytes, keeps_codes)
        if device.on_gpu:
            fewest = fewest_checkpointed_layers(recipe, spec.num_layers, device.num_bytes, estimated)
            yield from _less_checkpointing(recipe.trainer, spec.num_layers, fewest)
    if saves_beside_steps(recipe):
        yield from _copy_for_saving(recipe, saved_state(recipe, spec, others["critic"]), estimate, device)


def _copy_for_saving(
    recipe: Recipe, state: SavedState, estimate: MemoryEstimate, device: Device
) -> Iterator[tuple[str, str]]:
    """The host memory that lets a checkpoint be written while the next step runs, and whether there is as much."""
    yield (
        "checkpoint copy",
        f"{_size(state.num_bytes):>12}   of the host's memory, so that saving does not stop the run",
    )
    free = available_host_bytes() if device.is_here else None
    if free is not None:
        if not device.on_gpu:
            free -= estimate.total_bytes
        elif recipe.trainer.optimizer.offload:
            free -= state.optimizer
        if state.num_bytes > USABLE_HOST * free:
            yield "", f"the host has room for {_size(max(free, 0))}: each checkpoint will stop the run while written"


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
    """Of a model that draws nothing: only what it computes scalars with has codes."""
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
    return spec, precision_policy(spec, fp8, recipe.numerics).precisions()


def _room(estimate: MemoryEstimate, device_bytes: int, keeps_codes: bool) -> Iterator[tuple[str, str]]:
    """What a larger KV cache could take; or what to do when even this does not fit."""
    if estimate.total_bytes > device_bytes:
        yield "", "more than the device has: lower trainer.tokens_per_micro_batch or trainer.logprob_chunk,"
        yield "", "or set trainer.optimizer.master=stochastic_rounding and trainer.optimizer.states=8bit"
        if keeps_codes:
            yield "", "or trainer.weight_codes=remade"
        return
    if not estimate.kv_bytes_per_token:
        return
    room = device_bytes - estimate.bytes_when("always")
    room -= sum(part.num_bytes for part in estimate.parts if part.when == "generating" and part.name != "KV cache")
    if not estimate.takes_turns:
        room -= estimate.bytes_when("training")
    tokens = room // estimate.kv_bytes_per_token
    yield "room for KV cache", f"{_size(room):>12}   {tokens:,} tokens, if nothing else uses the memory"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"
