"""What `octetrl check` says about another rollout backend: what is promised, which corrections and gates remain."""

from __future__ import annotations

from collections.abc import Iterator

from octetrl.cli.check_device import Device
from octetrl.config.objective_settings import CorrectionSettings
from octetrl.config.schema import Recipe
from octetrl.config.vllm import VLLM_VERSION, why_no_vllm

PLANNED = "plan for one with --memory-gib"  # of `octetrl check`, which has this option


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
