"""Packs samples into micro-batches: whole sequences end to end, up to a number of tokens, without padding.

    samples -> minibatches (one optimizer step each, in the order given) -> first-fit-decreasing into micro-batches

First-fit-decreasing takes the longest sample first and puts each into the first micro-batch with enough room. It needs
at most 11/9 of the fewest possible micro-batches. Where attention pads (on a CPU), samples of similar length share a
micro-batch instead. Both are deterministic. A sample longer than a micro-batch has one to itself.

Packing changes speed and memory, never the loss: token weights and the denominator come from the counts of the whole
minibatch (algorithms/weighting.py), and the trainer divides only by that denominator.

T tokens of a micro-batch, B sequences, N trained tokens. The arithmetic is NumPy's: torch would divide it among threads
that wait for each other longer than it takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, count, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octetrl.algorithms.weighting import TokenWeighting, weigh
from octetrl.records import MicroBatch, PackedBatch, Sample

Int64s = npt.NDArray[np.int64]
Units = list[tuple[int, ...]]  # indices of samples that share a micro-batch


@dataclass(frozen=True, slots=True)
class PackingLayout:
    """The trainer's settings that packing depends on, created by the worker."""

    tokens_per_micro_batch: int
    minibatches: int = 1
    padded_attention: bool = False  # attention costs as much as if all sequences had the length of the longest
    precision_digest: str | None = None  # of the trainer's table; samples of another table are refused
    by_version: bool = False  # a micro-batch has samples of one version, whose cache had one set of scales at the end

    def fill(self, lengths: Sequence[int], versions: Sequence[int | None] = ()) -> list[list[int]]:
        return fill(lengths, self.tokens_per_micro_batch, padded=self.padded_attention, versions=versions)


def pack(samples: Sequence[Sample], layout: PackingLayout, token_weighting: TokenWeighting) -> PackedBatch:
    """Pack one batch into micro-batches, on the CPU.

    Samples without a trained token are left out and counted. With fewer rollouts than `layout.minibatches` there are as
    many minibatches as rollouts. Without samples the batch is empty, and the trainer skips it.
    Raises RuntimeError if samples were drawn under another precision table than the trainer's.
    """
    _check_digests(samples, layout.precision_digest)
    units = [unit for unit in _units(samples) if all(any(samples[i].loss_mask) for i in unit)]
    trained = [samples[i] for i in chain.from_iterable(units)]
    minibatches, denominators = [], []
    for rollouts_of_part in _split(_by_rollout(units, samples), layout.minibatches):
        part = list(chain.from_iterable(rollouts_of_part))
        numbers = list(chain.from_iterable(part))
        rollouts = [samples[i].rollout for i in numbers]
        weighting = weigh([sum(samples[i].loss_mask) for i in numbers], token_weighting, rollouts)
        weight_of = dict(zip(numbers, weighting.token_weights, strict=True))
        versions = [_last_version(samples[unit[-1]]) for unit in part] if layout.by_version else ()
        bins = layout.fill([sum(len(samples[i].token_ids) for i in unit) for unit in part], versions)
        rows = [list(chain.from_iterable(part[unit] for unit in chosen)) for chosen in bins]
        minibatches.append(tuple(micro_batch_of(samples, row, [weight_of[i] for i in row]) for row in rows))
        denominators.append(weighting.denominator)
    return PackedBatch(
        minibatches=tuple(minibatches),
        loss_denominators=tuple(denominators),
        policy_version=_oldest_version(trained),
        metrics=_metrics(samples, trained, sum(map(len, minibatches)), layout),
    )


def pack_for_calibration(token_lists: Sequence[Sequence[int]], layout: PackingLayout) -> tuple[MicroBatch, ...]:
    """Micro-batches for a forward without training (N = 0)."""
    return tuple(micro_batch for micro_batch, _ in pack_to_score([ids for ids in token_lists if len(ids)], layout))


def pack_to_score(
    token_lists: Sequence[Sequence[int]], layout: PackingLayout
) -> tuple[tuple[MicroBatch, tuple[int, ...]], ...]:
    """Micro-batches for a forward without training, each with the indices of its sequences in `token_lists`."""
    samples = [Sample(tuple(ids), (False,) * len(ids), None, 0.0, None) for ids in token_lists]
    bins = layout.fill([len(sample.token_ids) for sample in samples])
    return tuple((micro_batch_of(samples, chosen, [0.0] * len(chosen)), tuple(chosen)) for chosen in bins)


def _check_digests(samples: Sequence[Sample], expected: str | None) -> None:
    for sample in samples:
        digest = sample.precision_digest
        if None not in (digest, expected) and digest != expected:
            raise RuntimeError(
                f"samples were drawn under precision table {digest}, the trainer's is {expected}:"
                f" a tensor is FP8 on one side only; build engine and trainer from one policy"
            )


def _units(samples: Sequence[Sample]) -> Units:
    """Indices of samples that must share a micro-batch: both of a preference pair, or a single sample."""
    units: Units = []
    for number, sample in enumerate(samples):
        before = units[-1] if units else ()
        if sample.pair is not None and len(before) == 1 and samples[before[0]].pair == sample.pair:
            units[-1] += (number,)
        else:
            units.append((number,))
    return units


def _by_rollout(units: Units, samples: Sequence[Sample]) -> list[Units]:
    """The units of each rollout, which must share a minibatch: its weight is divided among its segments."""
    parts: list[Units] = []
    for unit in units:
        rollout = samples[unit[0]].rollout
        if parts and rollout is not None and samples[parts[-1][0][0]].rollout == rollout:
            parts[-1].append(unit)
        else:
            parts.append([unit])
    return parts


def _split(rollouts: Sequence[Units], parts: int) -> list[Sequence[Units]]:
    """Contiguous parts whose numbers of rollouts differ by at most one. No part is empty."""
    parts = min(parts, len(rollouts))
    bounds = [len(rollouts) * part // parts for part in range(parts + 1)] if parts else [0]
    return [rollouts[start:end] for start, end in pairwise(bounds)]


def _last_version(sample: Sample) -> int | None:
    """The version whose weights sampled its last trained token."""
    if sample.token_versions is None:
        return sample.policy_version
    return max(version for version, trained in zip(sample.token_versions, sample.loss_mask, strict=True) if trained)


def _oldest_version(samples: Sequence[Sample]) -> int | None:
    """The oldest policy version of the samples; None for SFT. A batch of several versions is not on-policy."""
    versions = {sample.policy_version for sample in samples}
    assert len(versions) == 1 or None not in versions, "samples with and without policy version in one batch"
    return min((version for version in versions if version is not None), default=None)


def _metrics(
    samples: Sequence[Sample], trained: Sequence[Sample], micro_batches: int, layout: PackingLayout
) -> dict[str, float]:
    tokens = sum(len(sample.token_ids) for sample in trained)
    capacity = micro_batches * layout.tokens_per_micro_batch
    return {
        "train/samples": float(len(trained)),
        "train/samples_without_trained_tokens": float(len(samples) - len(trained)),
        "train/tokens": float(tokens),
        "train/trained_tokens": float(sum(sum(sample.loss_mask) for sample in trained)),
        "train/micro_batches": float(micro_batches),
        "train/packing_efficiency": tokens / capacity if capacity else 0.0,
    }


def fill(
    lengths: Sequence[int], capacity: int, *, padded: bool, versions: Sequence[int | None] = ()
) -> list[list[int]]:
    """Indices of the samples of each micro-batch, first-fit-decreasing, or by similar length where attention pads.
    Every index occurs once.

    lengths: tokens of each sample. capacity: tokens of a micro-batch; a longer sample has one to itself. padded:
    samples of similar length share a micro-batch. versions: of each sample; those of one version share micro-batches
    only with each other. Empty: all samples may share.
    """
    if not versions:
        return _first_fit(range(len(lengths)), lengths, capacity, padded=padded)
    bins: list[list[int]] = []
    for version in dict.fromkeys(versions):
        own = [index for index, its in enumerate(versions) if its == version]
        bins += _first_fit(own, lengths, capacity, padded=padded)
    return bins


def _first_fit(indices: Sequence[int], lengths: Sequence[int], capacity: int, *, padded: bool) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(indices, key=lambda i: -lengths[i]):
        first = max(0, len(bins) - 1) if padded else 0
        for candidate in range(first, len(bins)):
            if lengths[index] <= room[candidate]:
                break
        else:
            candidate = len(bins)
            bins.append([])
            room.append(capacity)
        bins[candidate].append(index)
        room[candidate] -= lengths[index]
    return bins


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
        temperatures_N=_temperatures(samples, sequence_N),
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


def _temperatures(samples: Sequence[Sample], sequence_N: Int64s) -> Tensor | None:
    given = [sample.temperature for sample in samples if sample.temperature is not None]
    assert len(given) in (0, len(samples)), "samples with and without a temperature in one batch"
    return torch.from_numpy(_float32s(given)[sequence_N]) if given else None


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
