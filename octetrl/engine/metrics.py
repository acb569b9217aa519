"""The engine's metrics: progress during a session, and totals at its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from octetrl.engine.block_manager import BlockManager
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.model_runner import ModelRunner
from octetrl.engine.request import Step
from octetrl.records import GenerationProgress


@dataclass(slots=True)
class DraftTally:
    """Counts of speculation in one session."""

    forwards: int = 0  # with drafts
    drafted: int = 0  # tokens
    accepted: int = 0  # of these, in completions
    saved: float = 0.0  # accepted / sequences of the forward, added up; of one sequence these are the forwards saved

    def named(self) -> dict[str, float]:
        return {
            "rollout/drafted_tokens": float(self.drafted),
            "rollout/accepted_tokens": float(self.accepted),
            "rollout/forwards_saved": self.saved,
        }


STEPS_KEPT = 1 << 18  # a server's session has no end


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """Metrics of one session, such as one call of `generate`."""

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
    kv_saturation_LS: Tensor | None  # the same per layer and scale; float64, CPU. None: nothing is clamped
    non_finite_tokens: int  # tokens that met a non-finite activation
    tail_share: float  # share of the decoding time with less than half of the largest batch running: the long tail
    step_seconds: tuple[float, ...]  # between results of decode forwards one after another; the last `STEPS_KEPT`
    capture_seconds: float  # spent capturing CUDA graphs since the engine was made
    session_capture_seconds: float | None  # of these, in this session; None where nothing is captured, on a CPU
    cancelled: int  # completions
    idle_share: float  # share of the seconds with nothing to do
    drafts: DraftTally | None = None  # None: no speculation

    def named(self, *, scales_are_calibrated: bool) -> dict[str, float]:
        """Metrics by the names of a step. Values that were not measured are left out."""
        numbers = {
            "rollout/tokens_per_second": self.tokens_per_second,
            "rollout/prefilled_tokens": float(self.prefilled_tokens),
            "rollout/non_finite_tokens": float(self.non_finite_tokens),
            "rollout/preemptions": float(self.preemptions),
            "rollout/batch_occupancy": self.batch_occupancy,
            "rollout/cache_occupancy": self.cache_occupancy,
            "time/rollout_tail_share": self.tail_share,
        }
        if self.session_capture_seconds is not None:
            numbers["time/capture"] = self.session_capture_seconds
        if scales_are_calibrated:
            numbers["fp8/kv_saturation"] = self.kv_saturation
        return numbers if self.drafts is None else numbers | self.drafts.named()

    def merged(self, others: Sequence[EngineMetrics]) -> EngineMetrics:
        """These and those of sessions that ran at the same time on other workers."""
        return merged([self, *others])

    def followed_by(self, later: EngineMetrics) -> EngineMetrics:
        """These and those of a session that ran afterwards."""
        return merged([self, later], in_turn=True)

    @property
    def tokens_per_second(self) -> float:
        return self.generated_tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(slots=True)
class Tally:
    """Running counts of one session."""

    max_batch: int
    captured_before: float | None = None  # capturing seconds before the session; None: nothing is captured
    started: float = field(default_factory=time.perf_counter)
    done: int = 0
    cancelled: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    decoded_tokens: int = 0  # generated, and sampled after a stop and dropped
    prefilled_tokens: int = 0
    steps: int = 0
    decode_steps: int = 0
    drafts: DraftTally | None = None
    _last_results: float | None = None  # None: none yet, or something other than a decode forward came between
    _step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    _batches: deque[int] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))  # sequences in each of these steps
    _idle_seconds: float = 0.0
    _idle_since: float | None = None  # None: there is work

    def __post_init__(self) -> None:
        self._idle_since = self.started

    def count_request(self, prompt_tokens: int) -> None:
        """Records that the engine has work."""
        self.prompt_tokens += prompt_tokens
        if self._idle_since is not None:
            self._idle_seconds += time.perf_counter() - self._idle_since
            self._idle_since = None

    def count_idle(self) -> None:
        """Records that the engine is idle from now on."""
        if self._idle_since is None:
            self._idle_since = time.perf_counter()
            self._last_results = None

    def count_launch(self, step: Step) -> None:
        self.steps += 1
        self.decode_steps += bool(step.decode)
        self.decoded_tokens += len(step.decode)
        self.prefilled_tokens += sum(chunk.stop - chunk.start for chunk in step.chunks)
        if step.chunks:
            self._last_results = None

    def count_results(self, num_tokens: int) -> None:
        """Counts the results of a decode forward; `num_tokens` of them belong to unfinished sequences."""
        now = time.perf_counter()
        self.generated_tokens += num_tokens
        if self._last_results is not None:
            self._step_seconds.append(now - self._last_results)
            self._batches.append(num_tokens)
        self._last_results = now

    def count_accepted(self, num_tokens: int, num_sequences: int) -> None:
        """Counts right drafts that became tokens of a forward of `num_sequences` sequences."""
        assert self.drafts is not None, "a draft was accepted without speculation"
        self.generated_tokens += num_tokens
        self.decoded_tokens += num_tokens
        self.drafts.accepted += num_tokens
        self.drafts.saved += num_tokens / num_sequences

    def progress(self, running: int, waiting: int) -> GenerationProgress:
        return GenerationProgress(
            done=self.done,
            running=running,
            waiting=waiting,
            generated_tokens=self.generated_tokens,
            seconds=time.perf_counter() - self.started,
        )

    def metrics(
        self,
        *,
        preemptions: int,
        cache_occupancy: float,
        kv_capacity_tokens: int,
        kv_saturation: float,
        kv_saturation_LS: Tensor | None,
        non_finite_tokens: int,
        capture_seconds: float,
    ) -> EngineMetrics:
        """Up to now."""
        now = time.perf_counter()
        seconds = now - self.started
        idle_seconds = self._idle_seconds + (0.0 if self._idle_since is None else now - self._idle_since)
        places = self.decode_steps * self.max_batch
        return EngineMetrics(
            completions=self.done,
            generated_tokens=self.generated_tokens,
            prompt_tokens=self.prompt_tokens,
            prefilled_tokens=self.prefilled_tokens,
            steps=self.steps,
            seconds=seconds,
            preemptions=preemptions,
            batch_occupancy=self.generated_tokens / places if places else 0.0,
            cache_occupancy=cache_occupancy,
            kv_capacity_tokens=kv_capacity_tokens,
            kv_saturation=kv_saturation,
            kv_saturation_LS=kv_saturation_LS,
            non_finite_tokens=non_finite_tokens,
            tail_share=self._tail_share(),
            step_seconds=tuple(self._step_seconds),
            capture_seconds=capture_seconds,
            session_capture_seconds=None if self.captured_before is None else capture_seconds - self.captured_before,
            cancelled=self.cancelled,
            idle_share=min(1.0, idle_seconds / seconds) if seconds > 0 else 0.0,
            drafts=self.drafts,
        )

    def _tail_share(self) -> float:
        half = max(self._batches, default=0) / 2
        tail = sum(s for s, n in zip(self._step_seconds, self._batches, strict=True) if n < half)
        return tail / sum(self._step_seconds) if self._step_seconds else 0.0


def merged(parts: Sequence[EngineMetrics], *, in_turn: bool = False) -> EngineMetrics:
    """The metrics of several sessions: sums of sums, weighted by what each did. They ran beside each other on several
    workers, or `in_turn` on the same ones.

    Without the time of single steps, and without the saturation by layer.
    """
    assert parts, "there is at least one session"

    def total(name: str) -> int:
        return sum(getattr(part, name) for part in parts)

    def weighted(name: str, weights: Sequence[float]) -> float:
        parts_of = zip(parts, weights, strict=True)
        return sum(getattr(part, name) * weight for part, weight in parts_of) / (sum(weights) or 1.0)

    captured = [part.session_capture_seconds for part in parts if part.session_capture_seconds is not None]
    places = [part.generated_tokens / part.batch_occupancy for part in parts if part.batch_occupancy]
    cached = [float(part.generated_tokens + part.prefilled_tokens) for part in parts]
    seconds = [part.seconds for part in parts]
    over_time: Callable[[Sequence[float]], float] = sum if in_turn else max
    capacities = [part.kv_capacity_tokens for part in parts]
    return EngineMetrics(
        completions=total("completions"),
        generated_tokens=total("generated_tokens"),
        prompt_tokens=total("prompt_tokens"),
        prefilled_tokens=total("prefilled_tokens"),
        steps=total("steps"),
        seconds=over_time(seconds),
        preemptions=total("preemptions"),
        batch_occupancy=total("generated_tokens") / sum(places) if places else 0.0,
        cache_occupancy=max(part.cache_occupancy for part in parts),
        kv_capacity_tokens=capacities[-1] if in_turn else sum(capacities),
        kv_saturation=weighted("kv_saturation", cached),
        kv_saturation_LS=None,
        non_finite_tokens=total("non_finite_tokens"),
        tail_share=weighted("tail_share", seconds),
        step_seconds=(),
        capture_seconds=max(part.capture_seconds for part in parts),
        session_capture_seconds=over_time(captured) if captured else None,
        cancelled=total("cancelled"),
        idle_share=weighted("idle_share", seconds),
        drafts=_drafts_of([part.drafts for part in parts if part.drafts is not None], over_time),
    )


def _drafts_of(parts: Sequence[DraftTally], over_time: Callable[[Sequence[float]], float]) -> DraftTally | None:
    """Sums; of the forwards saved, which workers save beside one another, by `over_time`."""
    if not parts:
        return None
    return DraftTally(
        forwards=sum(part.forwards for part in parts),
        drafted=sum(part.drafted for part in parts),
        accepted=sum(part.accepted for part in parts),
        saved=over_time([part.saved for part in parts]),
    )


def session_metrics(
    tally: Tally, cache: KVCache, blocks: BlockManager, runner: ModelRunner, preemptions: int
) -> EngineMetrics:
    """Metrics of a session up to now. On a GPU this waits for all launched forwards."""
    runner.count_kept(cache)
    share_LS = cache.saturated_share(tally.decoded_tokens + tally.prefilled_tokens)
    return tally.metrics(
        preemptions=preemptions,
        cache_occupancy=blocks.peak_used / blocks.num_pages,
        kv_capacity_tokens=blocks.num_pages * blocks.page_size,
        kv_saturation=0.0 if share_LS is None else float(share_LS.sum()) / max(1, cache.page.num_clamping_scales),
        kv_saturation_LS=share_LS,
        non_finite_tokens=runner.num_poisoned(),
        capture_seconds=0.0 if runner.graphs is None else runner.graphs.seconds,
    )
