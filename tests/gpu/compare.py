"""What tests on a GPU share: bytes of results, captured graphs, and code that must not wait for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from octetrl.fp8.quantize import Quantized

Result = TypeVar("Result")


def bytes_of(x: Tensor) -> Tensor:
    """One dimension, in the order of the axes. NaN equals itself."""
    return x.detach().reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def differing(got: Iterable[Tensor | Quantized], want: Iterable[Tensor | Quantized]) -> int:
    """How many bytes of these tensors are not the same, on whichever device they are."""
    count = 0
    for ours, theirs in zip(_tensors(got), _tensors(want), strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (ours.shape, ours.dtype, theirs.dtype)
        count += int((bytes_of(ours) != bytes_of(theirs).to(ours.device)).sum())
    return count


def _tensors(given: Iterable[Tensor | Quantized]) -> Iterator[Tensor]:
    for one in given:
        yield from (one,) if isinstance(one, Tensor) else one


def captured(function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of `function`, and its result. Kernels must be compiled before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


@contextmanager
def no_waits() -> Iterator[None]:
    """An error where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
