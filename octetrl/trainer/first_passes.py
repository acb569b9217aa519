"""Passes over a micro-batch before the first update of a `train` call: reference, teacher, the policy's own log-probs.

N trained tokens of a micro-batch, L layers, S scales of a layer's cache, E hidden size, K tokens of a teacher.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octetrl.records import MicroBatch
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.prepared import PreparedMicroBatch, on_device

if TYPE_CHECKING:
    from octetrl.trainer.trainer import Trainer


@torch.no_grad()
def first_passes(
    trainer: Trainer, micro_batch: MicroBatch, kv: KVReplay, amax_LS: Tensor | None, *, updates: int
) -> PreparedMicroBatch:
    """The micro-batch on the device, with the log-probs that the algorithm needs before the first update.

    `updates`: optimizer steps of the policy in this call. If there are none, the pass also raises `amax_LS`.
    """
    algorithm, reference = trainer.algorithm, trainer.reference_forward
    micro_batch = on_device(micro_batch, trainer.device)
    prepared = PreparedMicroBatch(micro_batch)
    if reference is not None:
        seen = kv if trainer.reference.replays(kv.kv_mode) else KVReplay()
        hidden_NE = reference.predictors(micro_batch, seen)
        prepared.reference_N, _ = reference.logprobs_of(hidden_NE, micro_batch)
        k, below = algorithm.teacher_top_k, trainer.model.spec.vocab_size
        if k:
            prepared.teacher_ids_NK, prepared.teacher_top_NK1 = reference.top_logprobs(hidden_NE, k, below)
    needs_proximal = algorithm.needs_proximal and updates > 1
    shapes_with_kl = algorithm.shape is not None and reference is not None
    if needs_proximal or shapes_with_kl or algorithm.step_means or not updates:
        prepared.first_N, _ = trainer.forward.logprobs(micro_batch, kv, None if updates else amax_LS)
        prepared.proximal_N = prepared.first_N if needs_proximal else None
    return prepared
