"""Packs samples into micro-batches: whole sequences end to end, up to a number of tokens, without padding.

    samples -> minibatches (one optimizer step each, in the order given) -> first-fit-decreasing into micro-batches

First-fit-decreasing takes the longest sample first and puts each into the first micro-batch with enough room. It needs
at most 11/9 of the fewest possible micro-batches. Where attention pads (on a CPU), samples of similar length share a
micro-batch instead. Both are deterministic. A sample longer than a micro-batch has one to itself.

Packing changes speed and memory, never the loss: token weights and the denominator come from the counts of the whole
minibatch (algorithms/weighting.py), and the trainer divides only by that denominator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from octetrl.algorithms.weighting import TokenWeighting, weigh
from octetrl.records import MicroBatch, PackedBatch, Sample
from octetrl.trainer.fill import fill
from octetrl.trainer.micro_batch import micro_batch_of


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

    Samples without a trained token are left out and counted. With fewer samples than `layout.minibatches` there are as
    many minibatches as samples. Without samples the batch is empty, and the trainer skips it.
    Raises RuntimeError if samples were drawn under another precision table than the trainer's.
    """
    _check_digests(samples, layout.precision_digest)
    units = [unit for unit in _units(samples) if all(any(samples[i].loss_mask) for i in unit)]
    trained = [samples[i] for i in chain.from_iterable(units)]
    minibatches, denominators = [], []
    for part in _split(units, layout.minibatches):
        numbers = list(chain.from_iterable(part))
        weighting = weigh([sum(samples[i].loss_mask) for i in numbers], token_weighting)
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


def _units(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Indices of samples that must share a micro-batch: both of a preference pair, or a single sample."""
    units: list[tuple[int, ...]] = []
    for number, sample in enumerate(samples):
        before = units[-1] if units else ()
        if sample.pair is not None and len(before) == 1 and samples[before[0]].pair == sample.pair:
            units[-1] += (number,)
        else:
            units.append((number,))
    return units


def _split(units: Sequence[tuple[int, ...]], parts: int) -> list[Sequence[tuple[int, ...]]]:
    """Contiguous parts whose sizes differ by at most one. No part is empty."""
    parts = min(parts, len(units))
    bounds = [len(units) * part // parts for part in range(parts + 1)] if parts else [0]
    return [units[start:end] for start, end in pairwise(bounds)]


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
