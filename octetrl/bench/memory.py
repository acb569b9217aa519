"""Estimates the device memory of `octetrl bench train` and `bench step`, as `octetrl check` does (config/memory.py).

A bench refuses a setting that does not fit before it builds anything.

Torch is only asked for the device's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from octetrl.config.errors import UserError
from octetrl.config.memory import MemoryEstimate, Precisions, estimate_memory
from octetrl.config.schema import Recipe, TrainerConfig
from octetrl.config.spec import ModelSpec
from octetrl.fp8.policy import PrecisionPolicy


def estimate(recipe: Recipe, spec: ModelSpec, policy: PrecisionPolicy, *, on_gpu: bool, engine: bool) -> MemoryEstimate:
    """By part. Without an `engine` there are no codes that it alone would read. On a GPU the KV cache has no part of
    its own: it takes a share of what is left."""
    precisions = Precisions(
        fp8_rollout=[linear.name for linear in policy.linears if linear.rollout == "fp8"] if engine else [],
        fp8_train=[linear.name for linear in policy.linears if linear.train == "fp8"],
        k_cache=policy.k_cache,
        v_cache=policy.v_cache,
    )
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
    """Raises UserError for the first precision that takes more than the GPU has; `needed`: its name and its bytes.

    The remedies are what this trainer has not taken yet (without `updates`, none of the optimizer's), and `further`
    ones that the verb knows; a preset can be cut to fewer layers. A CPU is not asked: its memory is not one process's.
    """
    if device.type != "cuda":
        return
    has = torch.cuda.mem_get_info(device)[1]
    for precision, num_bytes in needed:
        if num_bytes > has:
            smaller = "lower --tokens or --layers" if is_preset else "lower --tokens"
            *remedies, last = [*_remedies(trainer, updates, precision), *further, smaller]
            ways = f"{', '.join(remedies)}, or {last}" if remedies else last
            raise UserError(
                f"--precision: {precision} takes about {num_bytes / 1e9:.0f} GB and the GPU has {has / 1e9:.0f}; {ways}"
            )


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
    """How many layers run again in the backward."""
    if trainer.activation_checkpointing == "none":
        return 0
    return spec.num_layers if trainer.checkpointed_layers is None else trainer.checkpointed_layers
