"""What a trainer computes without an update: gradients for benchmarks and the doctor, the cache's amax.

L layers, S scales of a layer's cache.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from octetrl.records import MicroBatch, PackedBatch
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.packing import pack_for_calibration
from octetrl.trainer.prepared import OptimizerStep, PreparedMicroBatch, TrainCall, on_device
from octetrl.trainer.trainer import Trainer


def accumulate_gradients(
    trainer: Trainer, batch: PackedBatch, kv: KVReplay, *, collect_kv_amax: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Add the on-policy gradients of every micro-batch to the trainer's sums, without an update.

    Returns the loss, on the device, and the amax of what is cached, float32 [L, S], if it is asked for. Codes that
    are `remade` come back with the model's `requantize`.
    """
    assert trainer.collects_kv_amax or not collect_kv_amax, "built with collect_kv_amax=False"
    amax_LS = trainer.forward.unobserved_amax() if collect_kv_amax else None
    if trainer.remakes_codes:
        trainer.model.release_codes()
    steps = []
    for minibatch, denominator in zip(batch.minibatches, batch.loss_denominators, strict=True):
        prepared = [PreparedMicroBatch(on_device(micro_batch, trainer.device)) for micro_batch in minibatch]
        count = len(prepared)
        steps.append(OptimizerStep(prepared, kv, True, denominator, num_micro_batches=count, most_micro_batches=count))
    call = TrainCall(tuple(steps), epochs=1, lr=None, kv_amax_LS=amax_LS, started=time.perf_counter())
    loss = torch.zeros((), device=trainer.device)
    for step in call.steps:
        loss += trainer.accumulate(call, step).loss
    return loss, amax_LS


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
