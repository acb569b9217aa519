"""Measures when each micro-batch of a learning phase began, by hooks on the model's forward.

    start                    first          second         third                      end
    |-- before: packing, ----|-- settling: memory is ------|-- steady: the cost of ---|
        freeing the cache       allocated again              each further token

On a GPU the marks are events in the stream, so nothing waits for them. With too few micro-batches to separate settling
from steady, there is no pace.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

SETTLING = 2  # micro-batches


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one learning phase."""

    before: float  # from the start to the first micro-batch
    settling: float  # time of the first micro-batches beyond the steady pace
    steady: float  # per token, in the micro-batches between the first ones and the last


class MicroBatchClock:
    """Put `marked` around the learning phase; call `pace` after a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    @contextmanager
    def marked(self, model: nn.Module) -> Iterator[None]:
        """Mark the start now, and each forward of `model` until the end."""
        self._marks = []
        self._mark()
        handle = model.register_forward_pre_hook(lambda *_: self._mark())
        try:
            yield
        finally:
            handle.remove()

    def _mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def pace(self, tokens: Sequence[int]) -> Pace | None:
        """The pace, from the tokens of each micro-batch. None unless each had one forward and some lie between the
        settling ones and the last, whose end is not marked."""
        if len(self._marks) != 1 + len(tokens) or len(tokens) < SETTLING + 2:
            return None
        gaps = [self._between(one, other) for one, other in zip(self._marks, self._marks[1:], strict=False)]
        before, first, between = gaps[0], gaps[1 : 1 + SETTLING], gaps[1 + SETTLING :]
        steady = sum(between) / sum(tokens[SETTLING:-1])
        return Pace(before, sum(first) - steady * sum(tokens[:SETTLING]), steady)

    @staticmethod
    def _between(one: torch.cuda.Event | float, other: torch.cuda.Event | float) -> float:
        if isinstance(one, float) or isinstance(other, float):
            assert isinstance(one, float) and isinstance(other, float)
            return other - one
        return one.elapsed_time(other) / 1e3
