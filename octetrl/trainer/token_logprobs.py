"""What both sides said of trained tokens before any update: the trainer hands it to telemetry after a `train` call.

N trained tokens of the batch, those of micro-batches that no forward saw before the first update left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octetrl.trainer.prepared import Prepared


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Both sides' log-probs of N trained tokens, the trainer's before any update; on the CPU, for telemetry."""

    generator_N: Tensor  # float32
    trainer_N: Tensor  # float32
    target_positions_N: Tensor  # int64
    sequence_lengths_N: Tensor  # int64


def token_logprobs(minibatches: Sequence[Sequence[Prepared]]) -> TokenLogprobs | None:
    prepared = [one for minibatch in minibatches for one in minibatch if one.first_N is not None]
    generator = [one.micro_batch.generator_logprobs_N for one in prepared]
    if not prepared or any(logprobs_N is None for logprobs_N in generator):
        return None
    first = [one.first_N for one in prepared]
    return TokenLogprobs(
        generator_N=_joined(generator),
        trainer_N=_joined(first),
        target_positions_N=_joined([one.micro_batch.target_positions_N for one in prepared]),
        sequence_lengths_N=_joined([one.micro_batch.sequence_lengths_N for one in prepared]),
    )


def _joined(parts: Sequence[Tensor | None]) -> Tensor:
    return torch.cat([part for part in parts if part is not None]).cpu()
