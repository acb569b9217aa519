"""Estimates the memory of each worker of a bench that trains, and refuses what does not fit before Ray starts."""

from __future__ import annotations

import torch

from octetrl.bench.memory import estimate
from octetrl.bench.on_workers import EMBEDDED, WorkersBench
from octetrl.config.worker_memory import on_each_worker
from octetrl.fp8.policy import precision_policy
from octetrl.shapes.spec import largest_cut
from octetrl.system.errors import UserError
from octetrl.system.host_memory import available_host_bytes


def estimated_bytes(bench: WorkersBench, precision: str, workers: int) -> int:
    """The estimate of `octetrl check` for training, of each worker. `workers`: 0 is the embedded one."""
    recipe, spec = bench.recipe(precision, workers), bench.model.spec
    part, policy = spec.cut(largest_cut(spec, recipe.cluster.tensor_parallel)), precision_policy(spec, recipe.fp8)
    whole = estimate(recipe, part, policy, on_gpu=bench.device.type == "cuda", engine=True)
    return on_each_worker(recipe, whole, None).training_bytes


def check_memory(bench: WorkersBench) -> None:
    """Raise UserError if a worker's estimate is more than its GPU has, or the workers of a CPU need more than it has.
    Workers on other machines are assumed to have the GPUs of this one."""
    on_gpu = bench.device.type == "cuda"
    has = torch.cuda.mem_get_info(bench.device)[1] if on_gpu else available_host_bytes()
    if has is None:  # the system does not report it
        return
    for precision in bench.precisions:
        for workers in bench.counts:
            needed = estimated_bytes(bench, precision, workers) * (1 if on_gpu else max(1, workers))
            if needed > has:
                name = "embedded" if workers == EMBEDDED else str(workers)
                each = "each takes" if on_gpu and workers > 1 else "takes"
                raise UserError(
                    f"--workers: {name} in {precision} {each} about {needed / 1e9:.0f} GB, and there are"
                    f" {has / 1e9:.0f}; leave {name} out of --workers, add --gradients sharded or --offload, or lower"
                    " --tokens or --layers"
                )
