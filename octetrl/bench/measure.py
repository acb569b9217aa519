"""Measures arms in turn: builds the run of each, takes short steps that are not timed, then the timed ones.

Turns alternate, A B C C B A, so a device that slows down as it heats up favours none of the arms. Every turn has the
device for itself. A turn with vLLM has a process of its own, because vLLM does not give up all it took.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import pairwise

from octetrl.bench.arms import Arm
from octetrl.bench.run import GenerateOnly, bench_run, completions_of, published_bytes
from octetrl.rollout.backend import GenerationMetrics
from octetrl.run.loop import one_step
from octetrl.system.errors import RunFailed
from octetrl.workers.roles import SeparateWorkers


@dataclass(frozen=True, slots=True)
class Turn:
    """One measurement of an arm."""

    arm: Arm
    lines: tuple[Mapping[str, float], ...]  # metrics of all steps, the untimed ones first
    seconds: tuple[float, ...]  # by the wall clock, of each timed step, from the end of the one before
    sessions: tuple[GenerationMetrics, ...]  # of each timed step of `bench rollout`, if the engine counts
    digest: str  # of the first step's tokens and log-probs; empty without a rollout
    published_bytes: int
    weight_buffer: str  # double or single; empty: the trainers generate
    startup_seconds: float  # nothing -> the first timed step

    @property
    def timed(self) -> Sequence[Mapping[str, float]]:
        return self.lines[len(self.lines) - len(self.seconds) :]


def measure(
    arms: Sequence[Arm], steps: int, rounds: int, on_turn: Callable[[int, Turn], None] | None = None
) -> list[Turn]:
    """Measure all turns and return them in order. `on_turn(round, turn)` is called after each."""
    turns = []
    for number, arm in in_turn(arms, rounds):
        turns.append(_in_fresh_process(arm, steps) if arm.recipe.engine.backend == "vllm" else take_turn(arm, steps))
        if on_turn is not None:
            on_turn(number, turns[-1])
    return turns


def in_turn(arms: Sequence[Arm], rounds: int) -> Iterator[tuple[int, Arm]]:
    """(round, arm) of every turn, rounds from 1: with arms A and B (1, A) (1, B) (2, B) (2, A) (3, A) ..."""
    for number in range(1, rounds + 1):
        yield from ((number, arm) for arm in (arms if number % 2 else reversed(arms)))


def take_turn(arm: Arm, steps: int) -> Turn:
    """Build, measure and end the run of one arm."""
    ends, lines, digest = [time.perf_counter()], list[Mapping[str, float]](), ""
    with bench_run(arm) as run:
        for number in range(1, arm.untimed + steps + 1):
            result = one_step(run, number)
            ends.append(time.perf_counter())
            lines.append(result.metrics)
            digest = digest or (digest_of(completions_of(result)) if result.groups else "")
        method, workers = run.method, run.workers
        records = method.sessions[-steps:] if isinstance(method, GenerateOnly) else []
        buffer = ("double" if workers.is_doubled else "single") if isinstance(workers, SeparateWorkers) else ""
        size = published_bytes(run)
    timed = ends[-steps - 1 :]
    return Turn(
        arm,
        tuple(lines),
        tuple(end - begin for begin, end in pairwise(timed)),
        tuple(record.metrics for record in records if record.metrics is not None),
        digest,
        size,
        buffer,
        timed[0] - ends[0],
    )


def digest_of(answers: Sequence[object]) -> str:
    """A digest of tokens and log-probs. It does not depend on the number of workers."""
    return hashlib.sha256(repr(answers).encode()).hexdigest()[:16]


def _in_fresh_process(arm: Arm, steps: int) -> Turn:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(take_turn, arm, steps).result()
        except BrokenProcessPool:
            raise RunFailed(f"bench: the process of {arm.name} died; its last lines say why") from None
