"""When each micro-batch of a learning began, told from outside the trainer: what its model's forward starts with.

    begun                     first          second         third                      ended
    |-- before: packing, ----|-- settling: memory is ------|-- steady: what one ------|
        the engine's cache      allocated again              more would cost too

On a GPU the marks are events in the stream, so nothing waits for them. A learning of too few micro-batches to tell
settling from steady has no steady pace.
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
    """Of one learning. Seconds."""

    before: float  # from its begin to the first micro-batch
    settling: float  # what the first micro-batches took beyond the steady pace
    steady: float  # of a token, in the micro-batches between the first and the last


class MicroBatchClock:
    """Marks of one learning. `marked` around it, `pace` after a synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[torch.cuda.Event | float] = []

    @contextmanager
    def marked(self, model: nn.Module) -> Iterator[None]:
        """Marks the beginning now, and each forward of `model` until the end."""
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
        """`tokens` of each micro-batch. None unless each had one forward and some lie between the settling ones and
        the last, whose end is not marked."""
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
