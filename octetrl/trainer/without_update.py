"""What a trainer computes without an update: the loss of held-out examples, gradients for benchmarks and the doctor,
the cache's amax.

**Held-out losses.** Of each micro-batch the float64 sum and the number of items: trained tokens, or preference pairs.
The micro-batches follow from the batch and the recipe alone, and `added` rounds the sum of their sums once. So the mean
has the same bits for any number of workers.

L layers, S scales of a layer's cache, N trained tokens, I items.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import fsum

import torch
from torch import Tensor

from octetrl.records import MicroBatch, PackedBatch
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack_for_calibration
from octetrl.trainer.prepared import OptimizerStep, PreparedMicroBatch, TrainCall, loss_inputs, on_device
from octetrl.trainer.reward_trainer import RewardTrainer
from octetrl.trainer.trainer import Trainer

OF_PAIRS = ("accuracy", "margin")


def accumulate_gradients(trainer: Trainer, batch: PackedBatch, kv: KVReplay) -> None:
    """Add the on-policy gradients of every micro-batch to the trainer's sums, without an update. Codes that are
    `remade` come back with the model's `requantize`."""
    if trainer.remakes_codes:
        trainer.model.release_codes()
    steps = []
    for minibatch, denominator in zip(batch.minibatches, batch.loss_denominators, strict=True):
        prepared = [PreparedMicroBatch(on_device(micro_batch, trainer.device)) for micro_batch in minibatch]
        count = len(prepared)
        steps.append(OptimizerStep(prepared, kv, True, denominator, num_micro_batches=count, most_micro_batches=count))
    call = TrainCall(tuple(steps), epochs=1, lr=None, kv_amax_LS=None, started=time.perf_counter())
    for step in call.steps:
        trainer.accumulate(call, step)


Sums = Mapping[str, tuple[float, int]]  # by metric: the sum over a micro-batch's items, and their number


def added(parts: Sequence[Sums]) -> Sums:
    """The sums over all parts, each rounded once."""
    names = parts[0] if parts else ()
    return {name: (fsum(one[name][0] for one in parts), sum(one[name][1] for one in parts)) for name in names}


@torch.no_grad()
def held_out_sums(trainer: Trainer | RewardTrainer, batch: PackedBatch, kv: KVReplay) -> list[Sums]:
    """`loss`, and of pairs `accuracy` and `margin`, of each micro-batch, with the present weights."""
    sums: list[Sums] = []
    for micro_batch in (one for minibatch in batch.minibatches for one in minibatch):
        if isinstance(trainer, RewardTrainer):
            found = trainer.measure(micro_batch)
        else:
            prepared = trainer.first_passes(micro_batch, kv, None, updates=1)
            scored = trainer.forward.logprobs(prepared.micro_batch, kv)
            inputs = loss_inputs(prepared, *scored, on_policy=False, kl_scale=trainer.reference.kl_scale)
            found = trainer.algorithm.loss(inputs)
            if inputs.chosen_N is not None:
                found = replace(found, loss_N=_of_pairs(found.loss_N, inputs.sequence_N))
        of_pairs = {name: found.metrics.get(f"preference/{name}") for name in OF_PAIRS}
        if not micro_batch.reports:
            continue
        values = {
            "loss": found.loss_N,
            **{name: values_I for name, values_I in of_pairs.items() if values_I is not None},
        }
        sums.append({name: (float(each.double().sum()), each.numel()) for name, each in values.items()})
    return sums


def _of_pairs(loss_N: Tensor, sequence_N: Tensor) -> Tensor:
    """The loss of each pair, which all its tokens carry."""
    pair_N = sequence_N // 2
    return loss_N[pair_N.diff(prepend=pair_N.new_tensor([-1])) > 0]


def observe_kv(trainer: Trainer, tokens: PackedBatch | Sequence[Sequence[int]]) -> Tensor:
    """The largest magnitudes of what is cached, float32 [L, S] on the device.

    One forward with the present weights and no replay: for the first step's prompts and for `calibration: exact`. A
    head that met no token holds NEVER_OBSERVED.
    """
    if isinstance(tokens, PackedBatch):
        micro_batches: Sequence[MicroBatch] = [m for minibatch in tokens.minibatches for m in minibatch]
    else:
        micro_batches = pack_for_calibration(tokens, trainer.layout)
    amax_LS = trainer.forward.unobserved_amax()
    with torch.no_grad():
        for micro_batch in micro_batches:
            trainer.forward.hidden(on_device(micro_batch, trainer.device), KVReplay(), amax_LS)
    return trainer.peers.maximum(amax_LS, "amax of K and V")
