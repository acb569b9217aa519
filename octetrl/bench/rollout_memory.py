"""Estimates the weights of `octetrl bench rollout`, and refuses what does not fit before anything is built.

The KV cache takes a share of the memory that is left, so it has no part. A worker holds codes of FP8 linears alone.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from octetrl.bench.cluster_rollout import ClusterRollout
from octetrl.bench.on_workers import EMBEDDED
from octetrl.config.weight_buffer import held_bytes
from octetrl.fp8.policy import precision_policy
from octetrl.shapes.spec import largest_cut
from octetrl.system.errors import UserError
from octetrl.system.host_memory import available_host_bytes


def estimated_bytes(plan: ClusterRollout, precision: str, workers: int) -> int:
    """Weights of each worker. `workers`: 0 is the embedded one."""
    recipe = plan.recipe(plan.bench.workloads[0], precision, workers)
    spec = plan.bench.model.spec
    part, precisions = spec.cut(largest_cut(spec, recipe.cluster.tensor_parallel)), precision_policy(spec, recipe.fp8)
    found = precisions.precisions()
    return held_bytes(recipe, part, replace(found, fp8_train=found.fp8_rollout))


def check_memory(plan: ClusterRollout) -> None:
    """Raise UserError if a worker's weights are larger than its GPU's memory; on a CPU, those of all workers."""
    on_gpu = plan.bench.device.type == "cuda"
    has = torch.cuda.mem_get_info(plan.bench.device)[1] if on_gpu else available_host_bytes()
    if has is None:  # the system does not report it
        return
    for precision in plan.bench.precisions:
        for workers in plan.counts:
            needed = estimated_bytes(plan, precision, workers) * (1 if on_gpu else max(1, workers))
            if needed > has:
                where = "--precision" if workers == EMBEDDED else f"--workers: {workers}, --precision"
                room = f"the GPU has {has / 1e9:.0f}" if on_gpu else f"this machine has {has / 1e9:.0f} available"
                raise UserError(
                    f"{where}: weights in {precision} take at least {needed / 1e9:.0f} GB and {room}; lower --layers"
                    " or take a smaller --model"
                )
