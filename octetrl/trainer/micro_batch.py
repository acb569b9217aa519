"""The tensors of a micro-batch: whole sequences end to end, and a row for each trained token.

T tokens of a micro-batch, B sequences, N trained tokens. The arithmetic is NumPy's: torch would divide it among threads
that wait for each other longer than it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, compress, count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octetrl.records import MicroBatch, Sample

Int64s = npt.NDArray[np.int64]


def micro_batch_of(given: Sequence[Sample], chosen: Sequence[int], token_weights: Sequence[float]) -> MicroBatch:
    """The micro-batch of the samples with indices `chosen`. `token_weights`: one per chosen sample."""
    samples = [given[i] for i in chosen]
    for sample in samples:
        assert len(sample.loss_mask) == len(sample.token_ids), "a sample's loss_mask is as long as its tokens"
        assert not sample.loss_mask[0], "the first token of a sequence has nothing to be predicted from"
    positions = [list(compress(count(), sample.loss_mask)) for sample in samples]

    lengths_B = _int64s(len(sample.token_ids) for sample in samples)
    ends_B = lengths_B.cumsum()
    starts_B = ends_B - lengths_B
    token_ids_T = _int64s(chain.from_iterable(sample.token_ids for sample in samples))
    target_positions_N = _int64s(chain.from_iterable(positions))
    sequence_N = np.arange(len(samples)).repeat([len(row) for row in positions])
    targets_at_N = starts_B[sequence_N] + target_positions_N
    return MicroBatch(
        token_ids_T=torch.from_numpy(token_ids_T),
        positions_T=torch.from_numpy(np.arange(len(token_ids_T)) - starts_B.repeat(lengths_B)),
        cu_seqlens_B1=torch.from_numpy(np.append(0, ends_B).astype(np.int32)),
        max_seqlen=int(lengths_B.max()),
        predictor_N=torch.from_numpy(targets_at_N - 1),
        targets_N=torch.from_numpy(token_ids_T[targets_at_N]),
        weights_N=torch.from_numpy(_float32s(token_weights)[sequence_N]),
        advantages_N=torch.from_numpy(_float32s(sample.advantage for sample in samples)[sequence_N]),
        generator_logprobs_N=_generator_logprobs(samples),
        sequence_N=torch.from_numpy(sequence_N),
        sample_N=torch.from_numpy(_int64s(chosen)[sequence_N]),
        target_positions_N=torch.from_numpy(target_positions_N),
        sequence_lengths_N=torch.from_numpy(lengths_B[sequence_N]),
        chosen_N=_chosen(samples, sequence_N),
        group_N=_group(samples, sequence_N),
        versions_N=_versions(given, samples, positions),
        cut_off_N=_cut_off(samples, sequence_N),
    )


def _int64s(values: Iterable[int]) -> Int64s:
    return np.fromiter(values, np.int64)


def _float32s(values: Iterable[float]) -> npt.NDArray[np.float32]:
    return np.fromiter(values, np.float32)


def _versions(given: Sequence[Sample], samples: Sequence[Sample], positions: Sequence[Sequence[int]]) -> Tensor | None:
    """None if one version sampled the whole batch."""
    if all(sample.token_versions is None for sample in given) and len({one.policy_version for one in given}) < 2:
        return None
    versions: list[int] = []
    for sample, row in zip(samples, positions, strict=True):
        own = sample.token_versions
        assert sample.policy_version is not None, "a sample with versions beside one without"
        versions += [sample.policy_version if own is None else own[t] for t in row]
    return torch.from_numpy(_int64s(versions))


def _chosen(samples: Sequence[Sample], sequence_N: Int64s) -> Tensor | None:
    if all(sample.pair is None for sample in samples):
        return None
    return torch.from_numpy(np.array([sample.chosen for sample in samples])[sequence_N])


def _cut_off(samples: Sequence[Sample], sequence_N: Int64s) -> Tensor | None:
    if not any(sample.cut_off for sample in samples):
        return None
    is_last_N = np.diff(sequence_N, append=len(samples)) > 0
    return torch.from_numpy(np.array([sample.cut_off for sample in samples])[sequence_N] & is_last_N)


def _group(samples: Sequence[Sample], sequence_N: Int64s) -> Tensor | None:
    groups = [sample.group for sample in samples if sample.group is not None]
    assert len(groups) in (0, len(samples)), "samples with and without a group in one batch"
    return torch.from_numpy(_int64s(groups)[sequence_N]) if groups else None


def _generator_logprobs(samples: Sequence[Sample]) -> Tensor | None:
    drawn = [(sample.generator_logprobs, sample.loss_mask) for sample in samples]
    if all(logprobs is None for logprobs, _ in drawn):
        return None
    chosen: list[Iterable[float]] = []
    for logprobs, mask in drawn:
        assert logprobs is not None, "samples with and without generator log-probs cannot share a batch"
        assert len(logprobs) == len(mask), "a sample's generator_logprobs are as long as its tokens"
        chosen.append(compress(logprobs, mask))
    return torch.from_numpy(_float32s(chain.from_iterable(chosen)))
