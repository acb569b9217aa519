"""`octetrl doctor` on several workers: each examines its own GPU or CPU, and all are compared.

Every worker draws the same tokens for the same prompts. One that finds other bits than most of them has another build
of torch, or a faulty GPU.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe
from octetrl.doctor.examine import Examination, ExaminedWorker
from octetrl.doctor.findings import examine, lines_of
from octetrl.environments.python_object import search_beside
from octetrl.workers.many.build import start_team
from octetrl.workers.many.deadlines import Deadlines
from octetrl.workers.many.team import Team


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
