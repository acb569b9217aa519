"""What `octetrl check` says about the machine: device, workers, and a rollout backend that needs a GPU.

The device is this machine's, or another one with a given amount of memory. Of another backend it says what is promised,
and which corrections and gates remain.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from octetrl.cli.check_files import turns_line
from octetrl.config.backends import TRAITS, VLLM_VERSION, why_no_vllm
from octetrl.config.in_words import describe_roles, whole_weights_problem
from octetrl.config.objective_settings import CorrectionSettings, DatasetSettings
from octetrl.config.schema import Recipe
from octetrl.fp8.architectures import ARCHITECTURES, Capability, architecture_of, kernel_choices
from octetrl.fp8.policy import PrecisionPolicy, Side
from octetrl.system.errors import UserError

GIB = 2**30
SIDES: tuple[Side, ...] = ("rollout", "train")
HOPPER = (9, 0)  # compute capability of the GPUs on which vLLM takes FP8
PLANNED = "plan for one with --memory-gib"  # of `octetrl check`, which has this option
LEAST_MICRO_BATCHES = 4  # of a worker
CONNECT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Device:
    name: str
    on_gpu: bool
    num_bytes: int | None  # None: not known
    is_here: bool = True  # false: planned for, a machine of which nothing else is known
    capability: Capability | None = None  # compute capability of a GPU; None: not known


def find_device(recipe: Recipe, memory_gib: float | None, capability: Capability | None = None) -> Device:
    """The device the recipe would run on here, or the one it is planned for."""
    if memory_gib is not None or capability is not None:
        of_it = "a GPU" if capability is None else f"a GPU of {architecture_of(capability).name}"
        name = of_it if memory_gib is None else f"{of_it} with {memory_gib:g} GiB"
        num_bytes = None if memory_gib is None else int(memory_gib * GIB)
        return Device(name, True, num_bytes, is_here=False, capability=capability)
    if recipe.cluster.device != "cpu" and not recipe.cluster.on_cpus:
        found = _first_gpu()
        if found is not None:
            return found
        if recipe.cluster.device == "cuda":
            return Device("cuda, but this machine has no GPU", True, None)
        if _needs_gpu(recipe):
            return Device("a GPU, and this machine has none; --memory-gib plans for one", True, None)
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(f"CPU with {num_bytes / GIB:.1f} GiB, FP8 is emulated", False, num_bytes)


def missing_gpu(recipe: Recipe, device: Device) -> list[str]:
    """The problem of a recipe that asks for a GPU where there is none."""
    if recipe.cluster.device != "cuda" or not device.is_here or device.num_bytes is not None:
        return []
    return [
        "cluster.device: cuda was asked for, but this machine has no GPU; plan for a machine that has one with"
        " --memory-gib 80, or set cpu, where FP8 is emulated"
    ]


def _needs_gpu(recipe: Recipe) -> bool:
    """Whether the recipe runs on no CPU, so this machine's memory says nothing about it."""
    return TRAITS[recipe.engine.backend].needs_gpu or (recipe.cluster.uses_ray and recipe.cluster.num_gpus > 0)


def missing_fp8(recipe: Recipe, device: Device) -> list[str]:
    """The problem of a recipe with FP8 on a GPU of this machine, or of a known architecture: linears for which it has
    no GEMMs, or a cache of vLLM whose attention may keep old scales."""
    cluster, fp8 = recipe.cluster, recipe.fp8
    elsewhere = device.is_here and cluster.uses_ray and not cluster.starts_ray
    if not device.on_gpu or elsewhere or device.capability in (None, HOPPER):
        return []
    of_vllm, products = recipe.engine.backend == "vllm", architecture_of(device.capability).fp8
    if not (fp8.rollout or fp8.train) or fp8.is_emulated is True:
        return [_no_cache_of_vllm(device)] if of_vllm and fp8.kv_cache == "calibrated" else []
    of_ours = not TRAITS[recipe.engine.backend].has_weights
    if of_ours and products == "triton" and fp8.train and fp8.wgrad_blocks == "tokens":
        return [f"fp8.wgrad_blocks: 'tokens' has no GEMM on {device.name}, which is not Hopper; use 'square'"]
    if of_ours and products is not None:
        return []
    emulate = ", or fp8.emulate=true for its numbers without its speed" if of_ours else ""
    return [
        f"fp8: {device.name}, has no block-scaled FP8 GEMM (compute capability {spelled(device.capability)}, and a"
        f" Hopper GPU has {spelled(HOPPER)}); use precision=bf16{emulate}"
    ]


def _no_cache_of_vllm(device: Device) -> str:
    return (
        f"fp8.kv_cache: calibrated with engine.backend: vllm needs a Hopper GPU (compute capability"
        f" {spelled(HOPPER)}), and {device.name}, has {spelled(device.capability)}; elsewhere vLLM's attention"
        " may keep old scales; use none, or"
        " engine.backend: octetrl"
    )


def spelled(capability: Capability | None) -> str:
    return "unknown" if capability is None else "{}.{}".format(*capability)


def architecture_named(name: str) -> Capability:
    """The compute capability of an architecture as `--gpu` takes it. Raises UserError."""
    found = {known.name: capability for capability, known in ARCHITECTURES.items()}
    if name not in found:
        raise UserError(f"--gpu: '{name}' is not in the table of architectures; give one of {', '.join(found)}")
    return found[name]


def kernel_lines(policy: PrecisionPolicy, device: Device) -> Iterator[tuple[str, str]]:
    """Which kernels a GPU runs, if it is planned for or not the one that they are tested and timed on."""
    if not device.on_gpu or device.capability is None:
        return
    found = architecture_of(device.capability)
    if found.was_run and device.is_here:
        return
    yield "kernels", f"{found.name}: {found.state}"
    uses_fp8 = any(policy.uses_fp8(side) for side in SIDES)
    for operation, choice in kernel_choices(found, mx=policy.mx).items():
        if uses_fp8 or "FP8" not in operation:
            yield "", f"{operation}: {choice}"


def _first_gpu() -> Device | None:
    """The first GPU, as nvidia-smi describes it. None: there is none."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=compute_cap,memory.total,name", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    capability, *values = answer.stdout.strip().split(", ", 2)
    numbers = capability.split(".")
    if answer.returncode != 0 or len(values) != 2 or len(numbers) != 2:
        return None
    if not all(number.isdigit() for number in (*numbers, values[0])):
        return None
    mebibytes, name = int(values[0]), values[1]
    major, minor = map(int, numbers)
    return Device(f"{name}, {mebibytes / 1024:.1f} GiB", True, mebibytes * 2**20, capability=(major, minor))


def backend_problems_here(recipe: Recipe, device: Device, remedy: str = "run this on a machine with one") -> list[str]:
    """Why vLLM cannot run on the device of this machine. Another machine's packages are not known. `remedy`: what to do
    without a GPU."""
    if recipe.engine.backend != "vllm" or not device.is_here:
        return []
    if not device.on_gpu or (device.num_bytes is None and recipe.cluster.device != "cuda"):
        return [f"engine.backend: vllm needs an NVIDIA GPU, and this machine has none; {remedy}"]
    why = why_no_vllm()
    return [] if why is None else [why]


def _where(recipe: Recipe) -> str:
    cluster = recipe.cluster
    if cluster.roles is not None:
        return f"on each of the {cluster.roles[1]} workers that generate"
    if cluster.num_workers == 1:
        return "in the trainer's process"
    if cluster.tensor_parallel > 1:
        return f"one for each group of {cluster.tensor_parallel} workers"
    return f"on each of the {cluster.num_workers} workers"


def backend_lines(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """What the recipe's backend is and does; nothing for our own engine."""
    if recipe.engine.backend != "vllm":
        return
    yield "rollout backend", f"vLLM {VLLM_VERSION}, {_where(recipe)}, with weights of its own"
    size = recipe.cluster.tensor_parallel
    if size > 1:
        yield "tensor parallelism", f"by vLLM itself, {size} ranks; each has columns of o_proj and of down_proj"
    yield "log-probs", "of the sampled tokens, after the temperature; those of the trainer differ"
    if (recipe.cluster.roles or (0, recipe.cluster.num_workers))[1] > 1:
        yield "", "a request has the same seed on every worker; vLLM's sums, and so a token, may depend on the batch"
    yield "", "`octetrl doctor RECIPE --backend vllm` measures the difference"
    if recipe.fp8.kv_cache == "calibrated":
        yield "KV scales", "one for K and one for V of each layer: the largest of the heads' scales; Q's is 1"
    algorithm = recipe.algorithm
    if isinstance(algorithm, CorrectionSettings):
        named = ", ".join(algorithm.corrections)
        cap = f" (at most {algorithm.tis_cap:g})" if "tis" in algorithm.corrections else ""
        yield "corrections", f"{named}{cap}" if named else "none: the ratio p / g is not corrected"
    else:
        yield "corrections", f"{algorithm.name} has none"
    gates = recipe.mismatch
    stop = "never stops" if gates.fail_above is None else f"stops above {gates.fail_above:g}"
    yield "gate", f"mismatch/token_mult_prob_error: warns above {gates.warn_above:g}, {stop}"


def worker_lines(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The number of workers and where they run. Nothing for one worker without Ray."""
    cluster = recipe.cluster
    if not cluster.uses_ray:
        return
    count, gpus = cluster.num_workers, cluster.num_gpus
    place = f"{gpus} GPU{'s' if gpus > 1 else ''}" if gpus else "the CPU"
    joined = "" if cluster.starts_ray else f", of the Ray cluster at {cluster.address}, whose machines are not checked"
    yield "cluster", f"{count} worker{'s' if count > 1 else ''} on {place}{joined}"
    if not cluster.starts_ray and not _answers(str(cluster.address)):
        yield "", f"warning: nothing answers at {cluster.address} from this machine; start Ray there before the run"
    roles = describe_roles(recipe)
    if roles is not None:
        yield "", roles
        if cluster.max_staleness and recipe.mismatch.fail_above is not None:
            limit = (
                f"mismatch.fail_above={recipe.mismatch.fail_above:g} judges stale tokens too, so the policy's change"
            )
            yield "", f"warning: {limit} may end the run; give mismatch.fail_above=null, or a limit that allows for it"
        count = cluster.num_trainers
    groups, size = cluster.num_groups, cluster.tensor_parallel
    if size > 1:
        yield "", f"{groups} group{'s' if groups > 1 else ''} of {size} workers, which share one model by rows"
        yield "", "the memory below is that of the worker with the largest part of the model"
    elif count > 1:
        if roles is None:
            each = "the memory below is that of each worker: codes, activations, a KV cache, and its share of the"
            yield "", f"{each} optimizer's states"
        few = micro_batches_of_longest(recipe)
        if few < LEAST_MICRO_BATCHES * count:
            what = f"at their longest, a step's sequences fill {few} micro-batches of an update; {count} workers need"
            lower = "Lower trainer.minibatches or trainer.tokens_per_micro_batch, give a step more sequences, or"
            yield "", f"warning: {what} {LEAST_MICRO_BATCHES} each, or some wait for others. {lower} use fewer workers"


def _answers(address: str) -> bool:
    """Whether a port is open. `auto` is found by Ray, when the run starts."""
    if address == "auto":
        return True
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def micro_batches_of_longest(recipe: Recipe) -> int:
    """Micro-batches of an optimizer step if every sequence has its largest length."""
    algorithm, rollout, trainer = recipe.algorithm, recipe.rollout, recipe.trainer
    longest = recipe.model.context_length
    if isinstance(algorithm, DatasetSettings):
        sequences = algorithm.batch_size * (2 if algorithm.learns_from == "preferences" else 1)
    else:
        sequences = recipe.most_answers
        if next(turns_line(recipe), None) is None:  # one turn
            longest = min(longest, rollout.max_prompt_tokens + rollout.max_new_tokens)
    each = max(1, trainer.tokens_per_micro_batch // longest)  # sequences of a micro-batch
    return -(-sequences // trainer.minibatches // each)


def weight_problems(recipe: Recipe, policy: PrecisionPolicy) -> Iterator[str]:
    """What several workers cannot do, since none has whole weights."""
    trains_fp8 = policy.uses_fp8("train")
    problem = whole_weights_problem(recipe.cluster, recipe.trainer.weight_codes, trains_fp8=trains_fp8)
    if problem is not None:
        yield problem
