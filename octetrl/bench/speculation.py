"""Measures speculation: a workload without drafts, with n-gram drafts, and with drafts that are right at a given rate.

Drafts are made where they pay, as in a run, or always. One engine serves a precision and a workload. It generates the
workload twice without drafts; the second time counts. Then it generates it for each kind of drafts until no graph is
captured, five times at most; the last time counts. A rate p means that each draft is the token of the first pass with
probability p, given that those before it are. Every answer is compared with the first pass, bit for bit.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from octetrl.bench.model import give_memory_back
from octetrl.bench.rollout import Bench, build_arm, warm_up
from octetrl.bench.turns import Row
from octetrl.bench.workload import Workload
from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.draft_budget import DraftLosses
from octetrl.engine.engine import Engine
from octetrl.engine.ngram_drafts import NGramDrafts
from octetrl.engine.request import RunningSequence
from octetrl.engine.speculation import DraftSource
from octetrl.records import Completion

NGRAM = "ngram"
MOST_TURNS = 5  # of a kind of drafts
Answers = dict[tuple[str, int], Sequence[int]]


class ForcedDrafts:
    """Each draft is right with probability `rate`, given that those before it are."""

    def __init__(self, answers: Answers, rate: float, vocab_size: int, seed: int = 0) -> None:
        self._answers, self._rate, self._vocab_size = answers, rate, vocab_size
        self._draw = random.Random(seed)
        self._known: dict[tuple[str, int], int] = {}
        self.losses = DraftLosses()

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        name = (sequence.group.request.id, sequence.sibling)
        self._known[name] = self._known.get(name, 0) + len(token_ids)

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        name = (sequence.group.request.id, sequence.sibling)
        right = self._answers[name][self._known[name] :][:most]
        return [token if self._draw.random() < self._rate else (token + 1) % self._vocab_size for token in right]

    def index(self) -> None:
        """Nothing to do: the answers are known."""

    def end(self, sequence: RunningSequence, *, keeps: bool = True) -> None:
        """Nothing to do: the answers are known."""

    def reset(self) -> None:
        self._known.clear()


def measure_speculation(
    bench: Bench, drafts: Sequence[str], settings: SpeculationConfig, say: Callable[[str], None]
) -> list[Row]:
    """A row for each workload, precision and kind of drafts, "none" first. `drafts`: "ngram", or rates as text."""
    bench = replace(bench, speculation=settings)
    rows: list[Row] = []
    for workload in bench.workloads:
        for precision in bench.precisions:
            rows += _rows(bench, precision, workload, drafts, say)
            give_memory_back(bench.device)
    return rows


def _rows(
    bench: Bench, precision: str, workload: Workload, drafts: Sequence[str], say: Callable[[str], None]
) -> list[Row]:
    arm = build_arm(bench, precision, workload)
    engine, settings = arm.engine, bench.speculation
    assert settings is not None, "the bench has no speculation"
    warm_up(arm, workload, bench.warmup_tokens)
    expected = engine.generate(workload.requests)
    answers: Answers = {
        (request.id, request.first_sibling + number): completion.token_ids
        for request, siblings in zip(workload.requests, expected, strict=True)
        for number, completion in enumerate(siblings)
    }
    vocab_size = bench.model.spec.vocab_size

    def source_of(kind: str) -> DraftSource | None:
        if kind == "none":
            return None
        return NGramDrafts(settings) if kind == NGRAM else ForcedDrafts(answers, float(kind), vocab_size, bench.seed)

    rows: list[Row] = []
    plain, plain_steps = 0.0, 0
    for kind in ("none", *drafts):
        for _ in range(MOST_TURNS):
            engine.draft_source = source_of(kind)
            row = _measured(engine, workload, expected)
            if not row.get("time/capture"):  # else the measured times led to a new size of batch
                break
        speed = float(row["rollout/tokens_per_second"])
        if kind == "none":
            plain, plain_steps = speed, int(row["rollout/steps"])
        else:
            row["rollout/forwards_saved"] = plain_steps - int(row["rollout/steps"])
        row |= {"precision": precision, "workload": workload.name, "rollout/drafts": kind}
        rows.append(row | {"rollout/speedup": speed / plain})
        say(f"{workload.name}  {precision}  drafts {kind}: {speed:,.0f} tokens/s, {speed / plain:.2f} of none")
    engine.sleep()
    return rows


def _measured(engine: Engine, workload: Workload, expected: list[list[Completion]]) -> Row:
    engine.forget_prefixes()
    drawn = engine.generate(workload.requests)
    metrics = engine.metrics
    assert metrics is not None, "generate sets the metrics"
    pairs = zip(drawn, expected, strict=True)
    unequal = sum(one != other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True))
    row: Row = {
        "rollout/tokens_per_second": metrics.tokens_per_second,
        "time/rollout": metrics.seconds,
        "rollout/steps": metrics.steps,
        "rollout/unequal_answers": unequal,
    }
    if metrics.session_capture_seconds is not None:
        row["time/capture"] = metrics.session_capture_seconds
    row.update({} if metrics.drafts is None else metrics.drafts.named())
    return row
