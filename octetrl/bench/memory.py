"""Estimates the device memory of `octetrl bench train` and `bench step`, as `octetrl check` does (config/memory.py).

A bench refuses a setting that does not fit before it builds anything.

Torch is only asked for the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from octetrl.config.memory import MemoryEstimate, estimate_memory
from octetrl.config.schema import Recipe, TrainerConfig
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.host_memory import available_host_bytes


def estimate(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, *, on_gpu: bool, engine: bool) -> MemoryEstimate:
    """The estimate by part. Without an `engine`, codes that only an engine reads are left out. On a GPU the KV cache
    has no part, because it takes a share of the memory that is left."""
    precisions = policy.precisions() if engine else replace(policy.precisions(), fp8_rollout=[])
    return estimate_memory(recipe, spec, precisions, on_gpu=on_gpu, device_bytes=None)


def refuse_what_does_not_fit(
    device: torch.device,
    needed: Iterable[tuple[str, int]],
    trainer: TrainerConfig,
    *,
    updates: bool = True,
    further: Sequence[str] = (),
    is_preset: bool = True,
) -> None:
    """Raise UserError for the first precision that needs more memory than the device has.

    needed: (precision, bytes) pairs. updates: whether the optimizer runs; if not, its settings are no remedy. further:
    remedies of the command. is_preset: fewer layers are a remedy. On a CPU the limit is the available host memory.
    """
    on_gpu = device.type == "cuda"
    has = torch.cuda.mem_get_info(device)[1] if on_gpu else available_host_bytes()
    if has is None:  # the system does not report it
        return
    for precision, num_bytes in needed:
        if num_bytes > has:
            smaller = "lower --tokens or --layers" if is_preset else "lower --tokens"
            own = [*_remedies(trainer, updates, precision)] if on_gpu else ["use a GPU"]
            *remedies, last = [*own, *further, smaller]
            ways = f"{', '.join(remedies)}, or {last}" if remedies else last
            room = f"the GPU has {has / 1e9:.0f}" if on_gpu else f"this machine has {has / 1e9:.0f} available"
            raise UserError(f"--precision: {precision} takes about {num_bytes / 1e9:.0f} GB and {room}; {ways}")


def _remedies(trainer: TrainerConfig, updates: bool, precision: str) -> Iterator[str]:
    own = trainer.optimizer
    streamed = own.offload or not updates  # the states' width then costs the device nothing
    narrower = [] if streamed or own.states == "8bit" else ["--optimizer-states 8bit"]
    narrower += [] if streamed or own.master == "stochastic_rounding" else ["--master stochastic_rounding"]
    whole = trainer.activation_checkpointing == "layer" and trainer.checkpointed_layers is None
    narrower += [] if whole else ["--checkpointing layer"]
    has_codes = precision in ("fp8", "fp8_full") and trainer.weight_codes == "kept"
    narrower += ["--weight-codes remade"] if has_codes else []
    if narrower:
        yield f"take {' '.join(narrower)}"
    if not streamed:
        yield "add --offload"


def checkpointed_layers(trainer: TrainerConfig, spec: ModelSpec) -> int:
    """The number of layers that are recomputed in the backward."""
    if trainer.activation_checkpointing == "none":
        return 0
    return spec.num_layers if trainer.checkpointed_layers is None else trainer.checkpointed_layers
