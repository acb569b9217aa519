"""The tensors of a micro-batch: whole sequences end to end, and a row for each trained token.

T tokens of a micro-batch, B sequences, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from octetrl.records import MicroBatch, Sample


def micro_batch_of(given: Sequence[Sample], chosen: Sequence[int], token_weights: Sequence[float]) -> MicroBatch:
    """The micro-batch of the samples with indices `chosen`. `token_weights`: one per chosen sample."""
    samples = [given[i] for i in chosen]
    lengths = [len(sample.token_ids) for sample in samples]
    starts = list(accumulate(lengths, initial=0))
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.token_ids), "a sample's loss_mask is as long as its tokens"
        assert not sample.loss_mask[0], "the first token of a sequence has nothing to be predicted from"
    positions = [[t for t, is_trained in enumerate(sample.loss_mask) if is_trained] for sample in samples]
    counts = [len(row) for row in positions]

    lengths_B, counts_B = torch.tensor(lengths), torch.tensor(counts)
    token_ids_T = torch.tensor(list(chain.from_iterable(sample.token_ids for sample in samples)))
    target_positions_N = torch.tensor(list(chain.from_iterable(positions)), dtype=torch.int64)
    sequence_N = torch.arange(len(samples)).repeat_interleave(counts_B)
    starts_B = torch.tensor(starts[:-1])
    targets_at_N = starts_B[sequence_N] + target_positions_N
    return MicroBatch(
        token_ids_T=token_ids_T,
        positions_T=torch.arange(starts[-1]) - starts_B.repeat_interleave(lengths_B),
        cu_seqlens_B1=torch.tensor(starts, dtype=torch.int32),
        max_seqlen=max(lengths),
        predictor_N=targets_at_N - 1,
        targets_N=token_ids_T[targets_at_N],
        weights_N=torch.tensor(token_weights, dtype=torch.float32)[sequence_N],
        advantages_N=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)[sequence_N],
        generator_logprobs_N=_generator_logprobs(samples, positions),
        sequence_N=sequence_N,
        sample_N=torch.tensor(chosen, dtype=torch.int64)[sequence_N],
        target_positions_N=target_positions_N,
        sequence_lengths_N=lengths_B[sequence_N],
        chosen_N=_chosen(samples, sequence_N),
        group_N=_group(samples, sequence_N),
        versions_N=_versions(given, samples, positions),
    )


def _versions(given: Sequence[Sample], samples: Sequence[Sample], positions: Sequence[Sequence[int]]) -> Tensor | None:
    """None if one version sampled the whole batch."""
    if all(sample.token_versions is None for sample in given) and len({one.policy_version for one in given}) < 2:
        return None
    versions: list[int] = []
    for sample, row in zip(samples, positions, strict=True):
        own = sample.token_versions
        assert sample.policy_version is not None, "a sample with versions beside one without"
        versions += [sample.policy_version if own is None else own[t] for t in row]
    return torch.tensor(versions, dtype=torch.int64)


def _chosen(samples: Sequence[Sample], sequence_N: Tensor) -> Tensor | None:
    if all(sample.pair is None for sample in samples):
        return None
    return torch.tensor([sample.chosen for sample in samples])[sequence_N]


def _group(samples: Sequence[Sample], sequence_N: Tensor) -> Tensor | None:
    groups = [sample.group for sample in samples if sample.group is not None]
    assert len(groups) in (0, len(samples)), "samples with and without a group in one batch"
    return torch.tensor(groups, dtype=torch.int64)[sequence_N] if groups else None


def _generator_logprobs(samples: Sequence[Sample], positions: Sequence[Sequence[int]]) -> Tensor | None:
    drawn = [sample.generator_logprobs for sample in samples]
    if all(logprobs is None for logprobs in drawn):
        return None
    chosen: list[float] = []
    for logprobs, trained in zip(drawn, positions, strict=True):
        assert logprobs is not None, "samples with and without generator log-probs cannot share a batch"
        chosen += [logprobs[t] for t in trained]
    return torch.tensor(chosen, dtype=torch.float32)
