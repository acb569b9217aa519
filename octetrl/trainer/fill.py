"""Assigns samples to micro-batches: first-fit-decreasing, or by similar length where attention pads."""

from __future__ import annotations

from collections.abc import Sequence


def fill(
    lengths: Sequence[int], capacity: int, *, padded: bool, versions: Sequence[int | None] = ()
) -> list[list[int]]:
    """Indices of the samples of each micro-batch. Every index occurs once.

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
