"""What the engine says about its work: while it goes on, and when it is done."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class GenerationProgress:
    """After each step of `generate`."""

    done: int  # completions
    running: int
    waiting: int
    generated_tokens: int
    seconds: float

    @property
    def total(self) -> int:
        return self.done + self.running + self.waiting

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Of one call of `generate`."""

    completions: int
    generated_tokens: int
    prompt_tokens: int  # of the requests, each prompt once
    prefilled_tokens: int  # tokens put into the cache by chunks; more than the prompts' where sequences were preempted
    steps: int
    seconds: float
    preemptions: int
    batch_occupancy: float  # mean share of max_batch that decoded
    cache_occupancy: float  # largest share of the pages in use
    kv_capacity_tokens: int
    kv_saturation: float  # share of K and V values clamped on the way into a calibrated cache
    non_finite_tokens: int  # tokens that met a non-finite activation
    kv_saturation_L2K: Tensor | None  # the same per layer, K or V, and head; float64, CPU. None: nothing is clamped

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0
