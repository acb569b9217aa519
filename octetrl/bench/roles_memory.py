"""Estimates the memory of the workers that train in each arm of a roles bench, before Ray starts."""

from __future__ import annotations

import torch

from octetrl.bench.memory import estimate
from octetrl.bench.roles import RolesArm, RolesBench
from octetrl.config.worker_memory import on_each_worker
from octetrl.fp8.policy import precision_policy
from octetrl.system.errors import UserError
from octetrl.system.host_memory import available_host_bytes


def estimated_bytes(bench: RolesBench, precision: str, arm: RolesArm) -> int:
    """The estimate of `octetrl check` for training, of each worker that trains."""
    recipe, spec, on_gpu = bench.recipe(precision, arm), bench.model.spec, bench.device.type == "cuda"
    whole = estimate(recipe, spec, precision_policy(spec, recipe.fp8), on_gpu=on_gpu, engine=True)
    return on_each_worker(recipe, whole, None).training_bytes


def check_memory(bench: RolesBench) -> None:
    """Raise UserError if an arm needs more than a GPU has; on a CPU, than the machine has for all workers."""
    on_gpu = bench.device.type == "cuda"
    has = torch.cuda.mem_get_info(bench.device)[1] if on_gpu else available_host_bytes()
    if has is None:  # the system does not report it
        return
    for precision in bench.step.precisions:
        for arm in bench.arms:
            needed = estimated_bytes(bench, precision, arm) * (1 if on_gpu else bench.cluster.num_workers)
            if needed > has:
                raise UserError(
                    f"--roles: {arm.name} in {precision} takes about {needed / 1e9:.0f} GB"
                    f"{' on each GPU that trains' if on_gpu else ''}, and there are {has / 1e9:.0f}; give more workers"
                    " that train, add --offload, or lower --tokens or --layers"
                )
