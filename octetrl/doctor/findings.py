"""The doctor's findings: the first op whose bits differ, the side at fault, and a verdict of one line.

Ops are compared in the order of the forward. At the first op with a differing row, the report shows the first element
of the earliest such row of the earliest sequence. Later ops differ as a consequence and are not shown.

**Several workers.** Each examines its own GPU or CPU, and all are compared. Every worker draws the same tokens for the
same prompts. One that finds other bits than most of them has another build of torch, or a faulty GPU.

R rows: tokens of all sequences end to end; N drawn tokens; C elements of a row at a site.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from octetrl.config.cluster import ClusterConfig
from octetrl.config.schema import Recipe
from octetrl.doctor.examine import End, Examination, ExaminedWorker
from octetrl.doctor.passes import LOGPROB, DrawnSequences, Pass
from octetrl.doctor.taps import Fingerprints, RowValues, Site, sites_of
from octetrl.environments.python_object import search_beside
from octetrl.workers.build_workers import start_team
from octetrl.workers.team import Deadlines, Team

LOOKED_AT = 1 << 27  # most elements of a site that are compared


@dataclass(frozen=True, slots=True)
class Difference:
    """The first op whose bits differ between two passes, and its first differing element."""

    reference: str
    other: str
    site: Site
    place: int  # of the site in the forward
    shape: tuple[int, ...]  # of one token's row
    sequence: int
    position: int
    token: int
    element: tuple[int, ...]
    values: tuple[float, float]  # the reference's, the other's
    num_elements: int  # that differ, in the compared rows
    num_rows: int  # that differ
    of_rows: int  # that both computed
    looked_at: int  # differing rows whose elements were compared

    def __str__(self) -> str:
        if not self.num_elements:
            return (
                f"{self.site}: {self.num_rows} of {self.of_rows} tokens differed and did not when computed again:"
                f" the op does not repeat its bits (token {self.token} at position {self.position} of sequence"
                f" {self.sequence}, {self.reference} against {self.other})"
            )
        at_least = "" if self.looked_at == self.num_rows else "at least "
        of = self.of_rows * torch.Size(self.shape).numel()
        ours, theirs = (f"{value:.9g} ({_hex(value)})" for value in self.values)
        return (
            f"{self.site}: {at_least}{self.num_elements:,} of {of:,} elements differ, in {self.num_rows:,} of"
            f" {self.of_rows:,} tokens of shape {list(self.shape)}; first in sequence {self.sequence}, position"
            f" {self.position}, token {self.token}, element {list(self.element)}: {self.reference} {ours},"
            f" {self.other} {theirs}"
        )


@dataclass(frozen=True, slots=True)
class EndDifference:
    """An end whose tokens or log-probs differ from the first engine end."""

    name: str
    num_tokens: int  # sampled differently
    num_logprobs: int
    max_abs: float
    sequence: int
    position: int
    values: tuple[float, float]

    def __str__(self) -> str:
        drawn = f", {self.num_tokens:,} tokens drawn otherwise" if self.num_tokens else ""
        return (
            f"{self.num_logprobs:,} log-probs differ{drawn}, by {self.max_abs:.3g} at most; first in sequence"
            f" {self.sequence}, position {self.position}: {self.values[0]:.9g}, here {self.values[1]:.9g}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    passes: tuple[tuple[str, Difference | None], ...]
    ends: tuple[tuple[str, EndDifference | None], ...]
    num_tokens: int  # rows both sides computed
    num_drawn: int
    num_layers: int
    off_forwards: tuple[str, ...]  # ends whose log-probs differ from the trainer's packed forward
    at_fault: str | None = None  # "engine" or "trainer"

    @property
    def first(self) -> Difference | None:
        """The difference at the earliest op."""
        differences = [difference for _, difference in self.passes if difference is not None]
        return min(differences, key=lambda difference: difference.place, default=None)

    @property
    def equal(self) -> bool:
        return self.first is None and all(difference is None for _, difference in self.ends)

    @property
    def verdict(self) -> str:
        if self.equal:
            return (
                f"equal: every bit of {self.num_tokens:,} tokens x {self.num_layers} layers, and the log-probs of"
                f" {self.num_drawn:,} sampled tokens"
            )
        if self.first is not None:
            blame = "" if self.at_fault is None else f"; the fault is the {self.at_fault}'s"
            return f"first difference: {self.first}{blame}"
        side = " and ".join(dict.fromkeys(name.split(",")[0] for name in self.off_forwards)) or "no"
        return (
            f"the forwards agree on every bit and the {side} side does not follow them: {'; '.join(self.off_forwards)}."
            f" Look at what a run has round them: {_SUSPECTS.get(side, '; '.join(_SUSPECTS.values()))}"
        )


_SUSPECTS = {
    "engine": "captured graphs, rows and pages of the batch, sampling (engine/)",
    "trainer": "packing, activation checkpointing, the log-probs' chunks (trainer/)",
}


@dataclass(frozen=True, slots=True, eq=False)
class Examined:
    """A report with the inputs of the attribution."""

    report: Report
    subject: ExaminedWorker
    sequences: DrawnSequences
    engine_logprobs_N: Tensor


def examine(subject: ExaminedWorker) -> Examined:
    """Samples, computes both sides in every way, and compares."""
    engine_ends, drawn = subject.engine_ends()
    sequences = subject.sequences(drawn)
    ends = [*engine_ends, *subject.trainer_ends(drawn)]
    passes = subject.passes(sequences)
    reference = noted(passes[0], sequences)
    found: list[tuple[str, Difference | None]] = []
    common_R = torch.zeros(sequences.num_rows, dtype=torch.bool, device=sequences.device)
    for other in passes[1:]:
        theirs = noted(other, sequences)
        common_R |= reference.rows_seen_with(theirs) if other.side == "engine" else False
        found.append((other.name, first_difference(passes[0], other, reference, theirs, subject, sequences)))
    forward_N = forward_logprobs(passes[0], sequences)
    report = Report(
        passes=tuple(found),
        ends=tuple((end.name, end_difference(ends[0], end, sequences)) for end in ends[1:]),
        num_tokens=int(common_R.sum()),
        num_drawn=ends[0].logprobs_N.numel(),
        num_layers=subject.spec.num_layers,
        off_forwards=tuple(end.name for end in ends if not _same_bits(end.logprobs_N, forward_N)),
        at_fault=_at_fault(found, passes, subject, sequences),
    )
    return Examined(report, subject, sequences, engine_ends[0].logprobs_N)


def noted(one: Pass, sequences: DrawnSequences) -> Fingerprints:
    fingerprints = Fingerprints(sequences.num_rows, sequences.device)
    one.run(fingerprints)
    return fingerprints


def first_difference(
    reference: Pass,
    other: Pass,
    ours: Fingerprints,
    theirs: Fingerprints,
    subject: ExaminedWorker,
    sequences: DrawnSequences,
) -> Difference | None:
    """The first site where the bits of two passes differ, with its first differing element; None if they are equal."""
    sites = sites_of(subject.spec)
    for site in sites:
        rows = ours.differing_rows(theirs, site)
        if rows.numel():
            break
    else:
        return None
    shape = ours.shapes[site]
    looked_at = rows[: max(1, LOOKED_AT // torch.Size(shape).numel())]
    both = RowValues(site, looked_at), RowValues(site, looked_at)
    for one, kept in zip((reference, other), both, strict=True):
        one.run(kept)
    differing = {
        row: (both[0].values[row].view(torch.int32) != both[1].values[row].view(torch.int32)).nonzero().flatten()
        for row in looked_at.tolist()
    }
    row = next((row for row, elements in differing.items() if elements.numel()), int(rows[0]))
    element = int(differing[row][0]) if differing[row].numel() else 0
    sequence, position = sequences.place_of(row)
    return Difference(
        reference=reference.name,
        other=other.name,
        site=site,
        place=sites.index(site),
        shape=shape,
        sequence=sequence,
        position=position,
        token=int(sequences.token_R[row]),
        element=tuple(int(i) for i in torch.unravel_index(torch.tensor(element), shape)),
        values=(float(both[0].values[row][element]), float(both[1].values[row][element])),
        num_elements=sum(elements.numel() for elements in differing.values()),
        num_rows=rows.numel(),
        of_rows=int((ours.seen_R[site] & theirs.seen_R[site]).sum()),
        looked_at=looked_at.numel(),
    )


def _at_fault(
    found: Sequence[tuple[str, Difference | None]],
    passes: Sequence[Pass],
    subject: ExaminedWorker,
    sequences: DrawnSequences,
) -> str | None:
    """The side at fault for the first difference; None if unknown.

    It is the trainer if two packings differ. Of two fused forwards it is the one that differs from the modules.
    """
    differences = [(difference, one) for (_, difference), one in zip(found, passes[1:], strict=True) if difference]
    if not differences:
        return None
    difference, other = min(differences, key=lambda pair: pair[0].place)
    if other.side == "trainer":
        return "trainer"
    if not subject.is_fused:
        return None
    modules = noted(subject.module_pass(sequences), sequences)
    if difference.site not in modules.bits_R:
        return None
    departs = [
        bool(noted(side, sequences).differing_rows(modules, difference.site).numel()) for side in (passes[0], other)
    ]
    return {(False, True): "engine", (True, False): "trainer"}.get((departs[0], departs[1]))


def forward_logprobs(one: Pass, sequences: DrawnSequences) -> Tensor:
    """Log-probs of the sampled tokens in one pass, float32 [N] on the CPU."""
    rows = sequences.drawn_R.nonzero().flatten().cpu()
    kept = RowValues(LOGPROB, rows)
    one.run(kept)
    return torch.cat([kept.values[row] for row in rows.tolist()])


def end_difference(first: End, other: End, sequences: DrawnSequences) -> EndDifference | None:
    """The difference between an end and the first engine end; None if every bit is equal."""
    other_token_N = first.tokens_N != other.tokens_N
    differs_N = _bits(first.logprobs_N) != _bits(other.logprobs_N)
    if not bool((differs_N | other_token_N).any()):
        return None
    place = int((differs_N | other_token_N).nonzero()[0])
    row = int(sequences.drawn_R.nonzero().flatten()[place])
    sequence, position = sequences.place_of(row)
    return EndDifference(
        name=other.name,
        num_tokens=int(other_token_N.sum()),
        num_logprobs=int(differs_N.sum()),
        max_abs=float((first.logprobs_N - other.logprobs_N).abs().max()),
        sequence=sequence,
        position=position + 1,
        values=(float(first.logprobs_N[place]), float(other.logprobs_N[place])),
    )


def lines_of(title: str, found: Sequence[tuple[str, Difference | EndDifference | None]]) -> list[str]:
    """A section of the report: one line a pass or end."""
    shown = [(name, "equal" if difference is None else _briefly(difference)) for name, difference in found]
    return [title, *(f"  {name:<42}{words}" for name, words in shown)]


def _briefly(difference: Difference | EndDifference) -> str:
    if isinstance(difference, EndDifference):
        return str(difference)
    return f"differs from {difference.site} on"


def _same_bits(a_N: Tensor, b_N: Tensor) -> bool:
    return torch.equal(_bits(a_N), _bits(b_N))


def _bits(x_N: Tensor) -> Tensor:
    return x_N.view(torch.int32)


def _hex(value: float) -> str:
    return f"{int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF:08x}"


# ---------------------------------------------------------------- several workers


@dataclass(frozen=True, slots=True)
class Findings:
    """What one worker found."""

    subject: str
    lines: tuple[str, ...]
    verdict: str
    equal: bool  # engine and trainer
    digest: str  # hash of the tokens and log-probs that the engine drew


def findings_of(recipe: Recipe, examination: Examination, beside: str, device: torch.device) -> Findings:
    """The findings of this process. `beside`: a recipe's file, whose folder may have its modules."""
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
