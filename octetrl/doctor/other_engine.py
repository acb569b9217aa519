"""Where the log-probs of another engine leave the trainer's: `octetrl doctor RECIPE --backend vllm`.

The engine draws answers to the recipe's first tasks, and the trainer computes the log-probs of the same tokens, packed
as in training. Equality is not promised, so the report says how large the differences are and where they begin:

    by position      mean and largest |engine - trainer|, by place in the answer. Place 0 is computed by prefill, all
                     others read what the engine has cached. An error that grows comes from the cache
    first above      the earliest place at which a difference exceeds a bound

Only the doctor of our own engine goes op by op: another engine's values inside a forward are not ours to read.

**By precision** (`--attribute`): what FP8 adds to the differences. The recipe's precision is built up from BF16, and
engine and trainer are compared after each step:

    nothing in FP8       what remains is the order of sums in the kernels
    + linears            weights and activations of the linears
    + KV cache           what is read back from it

Each precision is a process of its own, because an engine's formats are set when it starts. Its tokens are drawn again
with the same seeds, and differ from those of the other precisions. So a share is the difference of two means over
different tokens, and small shares of few tokens mean nothing.

N drawn tokens, L layers, S scales of a layer's cache.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octetrl.config.schema import Recipe
from octetrl.doctor.examine import Examination, ExaminedWorker, samples_of
from octetrl.environments.python_object import search_beside
from octetrl.fp8.kv_scales import KVScales, split_scales
from octetrl.records import Completion
from octetrl.system.errors import RunFailed
from octetrl.telemetry.metrics import MISMATCH
from octetrl.telemetry.mismatch import mismatch_metrics
from octetrl.trainer.forward import KVReplay

ONE_SCALE = "FP8 with one scale for a layer's K or V"


@dataclass(frozen=True, slots=True)
class Departures:
    """The differences of N drawn tokens, all float32 or int64 on the CPU."""

    engine_N: Tensor
    trainer_N: Tensor
    place_N: Tensor  # in the answer, from 0
    sequence_N: Tensor
    token_N: Tensor

    @property
    def difference_N(self) -> Tensor:
        return (self.engine_N.double() - self.trainer_N.double()).abs()

    @property
    def mean(self) -> float:
        return float(self.difference_N.mean())

    @property
    def largest(self) -> float:
        return float(self.difference_N.max())

    @property
    def metrics(self) -> dict[str, float]:
        """As a run measures them (telemetry/mismatch.py)."""
        length = int(self.place_N.max()) + 1
        return mismatch_metrics(self.engine_N, self.trainer_N, self.place_N, torch.full_like(self.place_N, length))

    def by_place(self) -> Iterator[tuple[int, int, int, float, float]]:
        """First place, last place, tokens, mean and largest difference: places 0, 1, 2-3, 4-7, 8-15 and so on."""
        last, begin = int(self.place_N.max()), 0
        while begin <= last:
            end = min(last, max(begin, 2 * begin - 1))
            found_n = self.difference_N[(self.place_N >= begin) & (self.place_N <= end)]
            yield begin, end, found_n.numel(), float(found_n.mean()), float(found_n.max())
            begin = end + 1

    def first_above(self, bound: float) -> int | None:
        """Index of the earliest token in its answer that differs by more; of several, of the first sequence."""
        above = (self.difference_N > bound).nonzero().flatten()
        if not above.numel():
            return None
        order = self.place_N[above] * (int(self.sequence_N.max()) + 1) + self.sequence_N[above]
        return int(above[order.argmin()])


@dataclass(frozen=True, slots=True)
class OtherReport:
    """What was found."""

    departures: Departures
    replays: dict[str, float]  # mean |engine - trainer| by how the trainer sees K and V; empty without an FP8 cache
    bound: float
    gate: float  # mismatch.warn_above

    @property
    def is_near(self) -> bool:
        """Whether a run would not warn."""
        return self.departures.metrics[MISMATCH] <= self.gate

    def lines(self) -> Iterator[str]:
        found = self.departures
        yield f"log-probs of {found.engine_N.numel():,} drawn tokens, engine against trainer"
        yield f"  {'place in the answer':<22}{'tokens':>8}{'mean difference':>18}{'largest':>12}"
        for begin, end, count, mean, largest in found.by_place():
            place = f"{begin}" if begin == end else f"{begin} to {end}"
            yield f"  {place:<22}{count:>8,}{mean:>18.3g}{largest:>12.3g}"
        first = found.first_above(self.bound)
        if first is None:
            yield f"no difference is above {self.bound:g}"
        else:
            above = int((found.difference_N > self.bound).sum())
            yield (
                f"first above {self.bound:g}: sequence {int(found.sequence_N[first])}, place"
                f" {int(found.place_N[first])} of the answer, token {int(found.token_N[first])}: engine"
                f" {float(found.engine_N[first]):.6g}, trainer {float(found.trainer_N[first]):.6g}; {above:,} tokens"
            )
        if self.replays:
            yield "the same with other K and V in the trainer; the smallest shows what the engine does with them"
        for name, mean in self.replays.items():
            yield f"  {name:<42}mean difference {mean:.3g}"
        metrics = found.metrics
        verdict = "a run does not warn" if self.is_near else "a run warns"
        yield (
            f"mean {found.mean:.3g}, largest {found.largest:.3g}, {MISMATCH} {metrics[MISMATCH]:.6g} ({verdict} at"
            f" {self.gate:g}), mismatch/gen_kl {metrics['mismatch/gen_kl']:.3g}"
        )


def examine_other(subject: ExaminedWorker, bound: float) -> OtherReport:
    """Draws with the worker's backend and compares with its trainer. Equality is not expected."""
    worker = subject.worker
    worker.engine.forget_prefixes()
    drawn = worker.engine.generate(subject.requests())
    worker.engine.sleep()  # its memory is the trainer's now
    found = departures(drawn, subject.trainer_ends(drawn)[0].logprobs_N)
    samples, replays = samples_of(subject.prompts, drawn), {}
    if worker.policy.kv_mode != "none":
        for name, replay in replays_of(subject.kv, worker.kv_scales, subject):
            trainer_N = subject.logprobs_of(samples, worker.layout, replay)
            replays[name] = replace(found, trainer_N=trainer_N).mean
    return OtherReport(found, replays, bound, subject.recipe.mismatch.warn_above)


def departures(drawn: list[list[Completion]], trainer_N: Tensor) -> Departures:
    answers = [answer for answers in drawn for answer in answers]
    lengths = [len(answer.token_ids) for answer in answers]
    return Departures(
        engine_N=torch.tensor([logprob for answer in answers for logprob in answer.logprobs], dtype=torch.float32),
        trainer_N=trainer_N,
        place_N=torch.tensor([place for length in lengths for place in range(length)]),
        sequence_N=torch.tensor([number for number, length in enumerate(lengths) for _ in range(length)]),
        token_N=torch.tensor([token for answer in answers for token in answer.token_ids]),
    )


def replays_of(own: KVReplay, scales: KVScales | None, subject: ExaminedWorker) -> Iterator[tuple[str, KVReplay]]:
    """Ways in which the trainer can see K and V. The one nearest to the engine shows what the engine does with them."""
    yield "as it trains", own
    if own.kv_mode != "none":
        yield "not quantised", KVReplay()
    if scales is not None:
        by_layer = [
            torch.cat([torch.full_like(part, float(part.max())).flatten() for part in parts if part is not None])
            for parts in (split_scales(row, subject.spec.cached(layer)) for layer, row in enumerate(scales.scale_LS))
        ]
        scale_LS = scales.scale_LS.clone()
        for layer, row in enumerate(by_layer):
            scale_LS[layer, : row.numel()] = row
        yield ONE_SCALE, KVReplay("calibrated", scale_LS)


# ---------------------------------------------------------------- by precision

REST, LINEARS, CACHE = "nothing in FP8", "+ linears", "+ KV cache"


@dataclass(frozen=True, slots=True)
class Summary:
    """What is shown of one examination. It travels between processes."""

    title: str
    lines: tuple[str, ...]
    is_near: bool
    mean: float  # difference
    largest: float


def summary_of(recipe: Recipe, examination: Examination, bound: float) -> Summary:
    """Examines a recipe's engine. Once a process: vLLM's memory can sleep for one engine."""
    subject = ExaminedWorker(recipe, examination)
    report = examine_other(subject, bound)
    found = report.departures
    return Summary(str(subject), tuple(report.lines()), report.is_near, found.mean, found.largest)


def precisions_of(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """The recipe's precision, built up from BF16. Steps that change nothing are left out."""
    fp8 = recipe.fp8
    steps = [(REST, fp8.model_copy(update={"rollout": False, "train": False, "kv_cache": "none"}))]
    if fp8.rollout or fp8.train:
        steps.append((LINEARS, fp8.model_copy(update={"kv_cache": "none"})))
    if fp8.kv_cache != "none":
        steps.append((CACHE, fp8))
    return [(name, recipe.model_copy(update={"fp8": step, "precision": None})) for name, step in steps]


def by_precision(recipe: Recipe, whole: Summary, examine: Callable[[Recipe], Summary]) -> list[tuple[str, Summary]]:
    """Examines each precision but the recipe's own, which is the last one and of which `whole` is known."""
    *steps, (own, _) = precisions_of(recipe)
    return [*((name, examine(step)) for name, step in steps), (own, whole)]


def precision_lines(examined: Sequence[tuple[str, Summary]]) -> Iterator[str]:
    yield "the same engine and trainer in other precisions (each draws its own tokens, with the same seeds)"
    whole, before = examined[-1][1].mean, 0.0
    for name, one in examined:
        share = (one.mean - before) / whole if whole else 0.0
        before = one.mean
        yield f"  {name:<18}mean {one.mean:<10.3g}largest {one.largest:<10.3g}{share:>8.1%} of the recipe's mean"


def summary_in_process(path: str, examination: Examination, bound: float, recipe: Recipe) -> Summary:
    """Examines a recipe in a new process, which frees all memory at its end. `path`: of the file beside which the
    recipe's modules are."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        try:
            return process.submit(_summary, path, recipe, examination, bound).result()
        except BrokenProcessPool:
            raise RunFailed(
                "doctor: the process of one precision died; its last lines say why, or it ran out of memory"
            ) from None


def _summary(path: str, recipe: Recipe, examination: Examination, bound: float) -> Summary:
    search_beside(path)
    return summary_of(recipe, examination, bound)
