"""Samples into micro-batches: whole sequences end to end, up to a budget of tokens, never padded.

    samples -> minibatches (one optimizer step each, in the order given) -> first-fit-decreasing into micro-batches

First-fit-decreasing: longest sample first, each into the first micro-batch with room; within 11/9 of the fewest
possible. Where attention pads (CPU), neighbours in length share a micro-batch instead. Both are deterministic. A sample
longer than the budget has a micro-batch to itself.

How samples are packed changes speed and memory, never the loss: token weights and the denominator come from the counts
of the whole minibatch (algorithms/weighting.py), and the trainer divides by that alone.

T tokens of a micro-batch, B sequences, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch

from octetrl.algorithms.weighting import TokenWeighting, weigh
from octetrl.records import MicroBatch, PackedBatch, Sample


@dataclass(frozen=True, slots=True)
class PackingLayout:
    """What packing needs to know of the trainer; made by the worker."""

    tokens_per_micro_batch: int
    minibatches: int = 1
    padded_attention: bool = False  # attention costs as if all sequences of a micro-batch had its longest length
    precision_digest: str | None = None  # of the trainer's table; samples drawn under another are refused


def pack(samples: Sequence[Sample], layout: PackingLayout, token_weighting: TokenWeighting) -> PackedBatch:
    """All micro-batches of one batch, on the CPU.

    Samples without a trained token are left out and counted. Fewer samples than `layout.minibatches` give as many
    minibatches as there are samples; none at all give an empty batch, from which the trainer learns nothing.
    Raises RuntimeError when samples were drawn under another precision table than the trainer's.
    """
    _check_digests(samples, layout.precision_digest)
    units = [unit for unit in _units(samples) if all(any(samples[i].loss_mask) for i in unit)]
    trained = [samples[i] for i in chain.from_iterable(units)]
    minibatches, denominators = [], []
    for part in _split(units, layout.minibatches):
        numbers = list(chain.from_iterable(part))
        weighting = weigh([sum(samples[i].loss_mask) for i in numbers], token_weighting)
        weight_of = dict(zip(numbers, weighting.token_weights, strict=True))
        bins = _fill([sum(len(samples[i].token_ids) for i in unit) for unit in part], layout)
        rows = [list(chain.from_iterable(part[unit] for unit in chosen)) for chosen in bins]
        minibatches.append(tuple(_micro_batch(samples, row, [weight_of[i] for i in row]) for row in rows))
        denominators.append(weighting.denominator)
    return PackedBatch(
        minibatches=tuple(minibatches),
        loss_denominators=tuple(denominators),
        policy_version=_oldest_version(trained),
        metrics=_metrics(samples, trained, sum(map(len, minibatches)), layout),
    )


def pack_for_calibration(token_lists: Sequence[Sequence[int]], layout: PackingLayout) -> tuple[MicroBatch, ...]:
    """Micro-batches for a forward alone, with nothing to train on (N = 0)."""
    return tuple(micro_batch for micro_batch, _ in pack_to_score([ids for ids in token_lists if len(ids)], layout))


def pack_to_score(
    token_lists: Sequence[Sequence[int]], layout: PackingLayout
) -> tuple[tuple[MicroBatch, tuple[int, ...]], ...]:
    """Micro-batches for a forward alone, each with the places in `token_lists` of its sequences, in their order."""
    samples = [Sample(tuple(ids), (False,) * len(ids), None, 0.0, None) for ids in token_lists]
    bins = _fill([len(sample.token_ids) for sample in samples], layout)
    return tuple((_micro_batch(samples, chosen, [0.0] * len(chosen)), tuple(chosen)) for chosen in bins)


def _check_digests(samples: Sequence[Sample], expected: str | None) -> None:
    for sample in samples:
        digest = sample.precision_digest
        if None not in (digest, expected) and digest != expected:
            raise RuntimeError(
                f"samples were drawn under precision table {digest}, the trainer's is {expected}:"
                f" a tensor is FP8 on one side only; build engine and trainer from one policy"
            )


def _units(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Numbers of what must share a micro-batch: the two of a preference pair, or a sample by itself."""
    units: list[tuple[int, ...]] = []
    for number, sample in enumerate(samples):
        before = units[-1] if units else ()
        if sample.pair is not None and len(before) == 1 and samples[before[0]].pair == sample.pair:
            units[-1] += (number,)
        else:
            units.append((number,))
    return units


def _split(units: Sequence[tuple[int, ...]], parts: int) -> list[Sequence[tuple[int, ...]]]:
    """Contiguous parts whose sizes differ by one at most; no empty part."""
    parts = min(parts, len(units))
    bounds = [len(units) * part // parts for part in range(parts + 1)] if parts else [0]
    return [units[start:end] for start, end in pairwise(bounds)]


def _fill(lengths: Sequence[int], layout: PackingLayout) -> list[list[int]]:
    """Indices of the samples of each micro-batch; every index once."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        first = max(0, len(bins) - 1) if layout.padded_attention else 0
        for candidate in range(first, len(bins)):
            if lengths[index] <= room[candidate]:
                break
        else:
            candidate = len(bins)
            bins.append([])
            room.append(layout.tokens_per_micro_batch)
        bins[candidate].append(index)
        room[candidate] -= lengths[index]
    return bins


def _micro_batch(given: Sequence[Sample], chosen: Sequence[int], token_weights: Sequence[float]) -> MicroBatch:
    """Of the samples numbered `chosen` among those given."""
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
    )


def _chosen(samples: Sequence[Sample], sequence_N: torch.Tensor) -> torch.Tensor | None:
    if all(sample.pair is None for sample in samples):
        return None
    return torch.tensor([sample.chosen for sample in samples])[sequence_N]


def _group(samples: Sequence[Sample], sequence_N: torch.Tensor) -> torch.Tensor | None:
    groups = [sample.group for sample in samples if sample.group is not None]
    assert len(groups) in (0, len(samples)), "samples with and without a group in one batch"
    return torch.tensor(groups, dtype=torch.int64)[sequence_N] if groups else None


def _generator_logprobs(samples: Sequence[Sample], positions: Sequence[Sequence[int]]) -> torch.Tensor | None:
    drawn = [sample.generator_logprobs for sample in samples]
    if all(logprobs is None for logprobs in drawn):
        return None
    chosen: list[float] = []
    for logprobs, trained in zip(drawn, positions, strict=True):
        assert logprobs is not None, "samples with and without generator log-probs cannot share a batch"
        chosen += [logprobs[t] for t in trained]
    return torch.tensor(chosen, dtype=torch.float32)


def _oldest_version(samples: Sequence[Sample]) -> int | None:
    """With samples of several versions, the oldest: such a batch is not on-policy."""
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
