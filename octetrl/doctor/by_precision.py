"""What FP8 adds to the differences of another engine: `octetrl doctor RECIPE --backend vllm --attribute`.

The recipe's precision is built up from BF16, and engine and trainer are compared after each step:

    nothing in FP8       what remains is the order of sums in the kernels
    + linears            weights and activations of the linears
    + KV cache           what is read back from it

Each precision is a process of its own, because an engine's formats are set when it starts. Its tokens are drawn again
with the same seeds, and differ from those of the other precisions. So a share is the difference of two means over
different tokens, and small shares of few tokens mean nothing.

**Many.** `octetrl doctor` on several workers: each examines its own GPU or CPU, and all are compared.

Every worker draws the same tokens for the same prompts. One that finds other bits than most of them has another build
of torch, or a faulty GPU.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial

import torch

from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe
from octetrl.doctor.examine import Examination, ExaminedWorker
from octetrl.doctor.findings import examine, lines_of
from octetrl.doctor.other_engine import Measured, Summary, summary_of
from octetrl.environments.python_object import search_beside
from octetrl.system.errors import RunFailed
from octetrl.workers.many.build import start_team
from octetrl.workers.many.team import Deadlines, Team

REST, LINEARS, CACHE = "nothing in FP8", "+ linears", "+ KV cache"
Examine = Callable[[Recipe], Summary]


@dataclass(frozen=True, slots=True)
class ByPrecision:
    """The differences of each precision, the recipe's own last."""

    found: Sequence[tuple[str, Measured]]

    def lines(self) -> Iterator[str]:
        yield "the same engine and trainer in other precisions (each draws its own tokens, with the same seeds)"
        whole, before = self.found[-1][1].mean, 0.0
        for name, one in self.found:
            share = (one.mean - before) / whole if whole else 0.0
            before = one.mean
            yield f"  {name:<18}mean {one.mean:<10.3g}largest {one.largest:<10.3g}{share:>8.1%} of the recipe's mean"


def precisions_of(recipe: Recipe) -> list[tuple[str, Recipe]]:
    """The recipe's precision, built up from BF16. Steps that change nothing are left out."""
    fp8 = recipe.fp8
    nothing = fp8.model_copy(update={"rollout": False, "train": False, "kv_cache": "none"})
    steps = [(REST, nothing)]
    if fp8.rollout or fp8.train:
        steps.append((LINEARS, fp8.model_copy(update={"kv_cache": "none"})))
    if fp8.kv_cache != "none":
        steps.append((CACHE, fp8))
    return [(name, recipe.model_copy(update={"fp8": one, "precision": None})) for name, one in steps]


def by_precision(recipe: Recipe, whole: Measured, examine: Examine) -> ByPrecision:
    """Examines each precision but the recipe's own, of which `whole` is known."""
    *steps, (own, _) = precisions_of(recipe)
    return ByPrecision([*((name, examine(one).measured) for name, one in steps), (own, whole)])


def in_a_process(path: str, examination: Examination, bound: float) -> Examine:
    """Examines a recipe in a new process, which gives all memory back. `path`: of its file, beside which its modules
    are."""

    def examine(recipe: Recipe) -> Summary:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
            try:
                return process.submit(_summary, path, recipe, examination, bound).result()
            except BrokenProcessPool:
                raise RunFailed(
                    "doctor: the process of one precision died; its last lines say why, or it ran out of memory"
                ) from None

    return examine


def _summary(path: str, recipe: Recipe, examination: Examination, bound: float) -> Summary:
    search_beside(path)
    return summary_of(recipe, examination, bound)


@dataclass(frozen=True, slots=True)
class Findings:
    """Of one worker."""

    subject: str
    lines: tuple[str, ...]
    verdict: str
    equal: bool  # engine and trainer
    digest: str  # of the tokens and log-probs that the engine drew


def findings_of(recipe: Recipe, examination: Examination, beside: str, device: torch.device) -> Findings:
    """Of this process. `beside`: a recipe's file, whose folder may have its modules."""
    search_beside(beside)
    here = ClusterConfig(device="cuda" if device.type == "cuda" else "cpu")
    subject = ExaminedWorker(recipe.model_copy(update={"cluster": here}), examination)
    examined = examine(subject)
    report = examined.report
    lines = [
        *lines_of("forwards, against the trainer's packed one", report.passes),
        *lines_of("log-probs, against those of the engine", report.ends),
    ]
    drawn = repr(examined.sequences.token_ids).encode() + examined.engine_logprobs_N.cpu().numpy().tobytes()
    return Findings(str(subject), tuple(lines), report.verdict, report.equal, hashlib.sha256(drawn).hexdigest()[:12])


def examine_workers(recipe: Recipe, examination: Examination, beside: str) -> tuple[list[str], bool]:
    """Lines for a person, and whether all workers found equal bits, and the same ones. Raises UserError."""
    team = start_team(recipe, None, Deadlines(recipe.cluster.deadlines))
    try:
        work = partial(findings_of, recipe, examination, beside)
        return compared(team, team.ask("doctor", "run", "doctor", work))
    finally:
        team.close()


def compared(team: Team, found: Sequence[Findings]) -> tuple[list[str], bool]:
    """The lines and the result of `examine_workers`."""
    lines = [f"doctor: {found[0].subject}, by each of {team.size} workers"]
    common, count = Counter(one.digest for one in found).most_common(1)[0]
    others, whose_gpu = f"{count} of the workers", "its GPU"
    if 2 * count <= len(found):  # nobody knows whose are wrong
        others, whose_gpu = team.place([one.digest for one in found].index(common)), "the GPU of one of them"
    for worker, one in enumerate(found):
        lines.append(f"{team.place(worker)}: {one.verdict}")
        if not one.equal:
            lines += one.lines
        if one.digest != common:
            lines.append(
                f"  it drew other tokens or log-probs than {others} ({one.digest}, not {common}): {whose_gpu} may be"
                " faulty"
            )
    equal = count == len(found) and all(one.equal for one in found)
    if equal:
        lines.append(f"equal: all {team.size} workers drew the same tokens with the same log-probs, bit for bit")
    return lines, equal
