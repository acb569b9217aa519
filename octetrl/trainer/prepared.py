"""Micro-batches with what is computed of them once, before the first update, and the advantages made of that.

N trained tokens, K tokens of a teacher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from octetrl.algorithms.token_loss import LossInputs
from octetrl.algorithms.token_rewards import TokenRewards
from octetrl.records import MicroBatch, TokenLogprobs


@dataclass(slots=True)
class PreparedMicroBatch:
    """A micro-batch on the device, with the log-probs that stay as they are during the call."""

    micro_batch: MicroBatch
    proximal_N: Tensor | None = None
    reference_N: Tensor | None = None
    first_N: Tensor | None = None  # the trainer's, before any update; None where nobody needed it before one came
    values_N: Tensor | None = None  # the critic's, before any update
    returns_N: Tensor | None = None  # what the critic is fitted to
    step_means: dict[str, Tensor] = field(default_factory=dict)  # over its optimizer step, by field of LossInputs
    teacher_ids_NK: Tensor | None = None  # the teacher's likeliest tokens, and their log-probs
    teacher_top_NK: Tensor | None = None


def loss_inputs(
    prepared: PreparedMicroBatch,
    logprobs_N: Tensor,
    entropy_N: Tensor,
    *,
    on_policy: bool,
    kl_scale: float,
    top_logprobs_NK: Tensor | None = None,
) -> LossInputs:
    """What the algorithm's loss is given."""
    micro_batch = prepared.micro_batch
    return LossInputs(
        logprobs_N=logprobs_N,
        entropy_N=entropy_N,
        advantages_N=micro_batch.advantages_N,
        sequence_N=micro_batch.sequence_N,
        num_sequences=num_sequences_of(micro_batch),
        generator_logprobs_N=micro_batch.generator_logprobs_N,
        proximal_logprobs_N=prepared.proximal_N,
        reference_logprobs_N=prepared.reference_N,
        chosen_N=micro_batch.chosen_N,
        teacher_top_logprobs_NK=prepared.teacher_top_NK,
        top_logprobs_NK=top_logprobs_NK,
        mean_weight=prepared.step_means.get("mean_weight"),
        kept_share=prepared.step_means.get("kept_share"),
        kl_scale=kl_scale,
        on_policy=on_policy,
    )


def fill_step_means(
    values_of: Mapping[str, Callable[[LossInputs], Tensor]], minibatch: Sequence[PreparedMicroBatch], on_policy: bool
) -> None:
    """Means over one optimizer step, its tokens weighted as in the loss."""
    for name, values in values_of.items():
        total = torch.zeros((), device=minibatch[0].micro_batch.weights_N.device)
        for one in minibatch:
            assert one.first_N is not None, "the trainer's log-probs before the update come first"
            inputs = loss_inputs(one, one.first_N, one.first_N, on_policy=on_policy, kl_scale=1.0)
            total += (one.micro_batch.weights_N * values(inputs)).sum()
        mean = total / sum(float(one.micro_batch.weights_N.sum()) for one in minibatch)
        for one in minibatch:
            one.step_means[name] = torch.where(mean > 0, mean, 1.0)  # where all is masked nothing is divided


def shape_advantages(
    shape: Callable[[TokenRewards], Tensor], prepared: Sequence[PreparedMicroBatch], kl_scale: float = 1.0
) -> Tensor | None:
    """Replaces the advantages of these micro-batches, all of one `train` call, by what `shape` makes of them. Returns
    log p - log reference of each token, float32 [N]; None without a reference."""
    counts = [one.micro_batch.sequence_N.numel() for one in prepared]
    rewards = replace(token_rewards(prepared), kl_scale=kl_scale)
    shaped_N = shape(rewards)
    assert shaped_N.shape == (sum(counts),), f"{tuple(shaped_N.shape)} advantages for {sum(counts)} tokens"
    for one, advantages_N in zip(prepared, shaped_N.float().split(counts), strict=True):
        one.micro_batch = replace(one.micro_batch, advantages_N=advantages_N)
    return rewards.kl_N


def token_rewards(prepared: Sequence[PreparedMicroBatch]) -> TokenRewards:
    """All trained tokens of these micro-batches, in their order."""
    sequences, num_sequences = [], 0
    for one in prepared:
        sequences.append(one.micro_batch.sequence_N + num_sequences)
        num_sequences += num_sequences_of(one.micro_batch)
    sequence_N = torch.cat(sequences)
    is_last_N = torch.ones_like(sequence_N, dtype=torch.bool)
    is_last_N[:-1] = sequence_N[1:] != sequence_N[:-1]
    first_N = _joined([one.first_N for one in prepared])
    reference_N = _joined([one.reference_N for one in prepared])
    return TokenRewards(
        outcome_N=torch.cat([one.micro_batch.advantages_N for one in prepared]),
        sequence_N=sequence_N,
        num_sequences=num_sequences,
        is_last_N=is_last_N,
        kl_N=None if first_N is None or reference_N is None else first_N - reference_N,
        values_N=_joined([one.values_N for one in prepared]),
        group_N=_joined([one.micro_batch.group_N for one in prepared]),
    )


def token_logprobs(prepared: Sequence[PreparedMicroBatch]) -> TokenLogprobs | None:
    """Both sides' log-probs of the trained tokens, for telemetry. Micro-batches that no forward saw before the first
    update are left out; None where no engine drew the samples."""
    seen = [one for one in prepared if one.first_N is not None]
    generator = [one.micro_batch.generator_logprobs_N for one in seen]
    if not seen or any(logprobs_N is None for logprobs_N in generator):
        return None

    def on_cpu(parts: Sequence[Tensor | None]) -> Tensor:
        return torch.cat([part for part in parts if part is not None]).cpu()

    return TokenLogprobs(
        generator_N=on_cpu(generator),
        trainer_N=on_cpu([one.first_N for one in seen]),
        target_positions_N=on_cpu([one.micro_batch.target_positions_N for one in seen]),
        sequence_lengths_N=on_cpu([one.micro_batch.sequence_lengths_N for one in seen]),
    )


def num_sequences_of(micro_batch: MicroBatch) -> int:
    return micro_batch.cu_seqlens_B1.numel() - 1


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    assert len(given) in (0, len(parts)), "some micro-batches were prepared and others not"
    return torch.cat(given) if given else None
