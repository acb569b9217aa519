"""Speculation without a draft model: several tokens of a sequence in one decode forward, with the bits of one by one.

    plan      a draft source proposes next tokens; each becomes a row of its own in the forward (draft_rows.py)
    forward   an ordinary decode forward: no bit of a row depends on how many rows there are
    parts     a draft is right if the row before it samples just this token; what follows a wrong one is dropped

Sampling is counted (sampler.py): the token at a place is a function of seed, sibling, place and logits. The row of a
right draft therefore has the token, the log-prob and the K and V that decoding one by one would have. Whatever the
drafts are, answers keep their bits; drafts only decide how many forwards they take.

What wrong drafts leave in the cache lies behind the sequence's end. Attention multiplies it by 0, and the next forwards
overwrite it. Only a NaN would survive a product with 0. So if any row of the forward is not finite, the forward is
undone: its counts are taken back, the drafts' slots are zeroed, and the batch is decoded without drafts.

The device itself moves each sequence on by its right drafts (kernels/rows/settle_drafts.py). But the host has to know
the tokens before it can propose more, so forwards are not launched ahead while drafts are made (session.py). Whatever
can wait is done while the device works: `prepare`. Drafts are made while few sequences run and where they pay
(draft_budget.py). While a sequence with options for its logits runs (logit_options.py), nothing is drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from octetrl.config.schema import SpeculationConfig
from octetrl.engine.draft_budget import DraftBudget, DraftLosses, DraftSwitch, ForwardTimes
from octetrl.engine.draft_rows import DraftRows, num_right
from octetrl.engine.forward_graphs import padded_batch
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.metrics import DraftTally, Tally
from octetrl.engine.model_runner import ModelRunner, Results, Sampled
from octetrl.engine.request import RunningSequence, Step
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.transcript import Batch, Transcript

PAUSE = 64  # forwards without drafts after one that was not finite


class DraftSource(Protocol):
    """Proposes tokens. It may propose anything: only the number of forwards depends on it."""

    losses: DraftLosses  # what its drafts have cost, in all sessions

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of a sequence's completion."""

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow."""

    def index(self) -> None:
        """Prepares what was taken for later proposals. Called while the device works, after every launch."""

    def end(self, sequence: RunningSequence, *, keeps: bool = True) -> None:
        """The sequence has ended; `token_ids` has all of its tokens. `keeps` false: it was cancelled."""

    def reset(self) -> None:
        """A new session: no sequence of the last one comes back."""


class Speculator:
    """Drafts of one session."""

    def __init__(
        self,
        config: SpeculationConfig,
        source: DraftSource | None,
        transcript: Transcript,
        scheduler: Scheduler,
        runner: ModelRunner,
        cache: KVCache,
        tally: Tally,
    ) -> None:
        self._config, self._source = config, source
        self._transcript, self._scheduler, self._runner, self._cache = transcript, scheduler, runner, cache
        self._tally = tally
        self._counts = DraftTally()
        self._num_known: dict[RunningSequence, int] = {}  # tokens of each completion that the source has
        losses = DraftLosses() if source is None else source.losses
        self._switch, self._times = DraftSwitch(config.min_gain, losses), ForwardTimes()
        self._budget = DraftBudget(config.max_draft_tokens, tally.max_batch, runner.padded_rows, self._times)
        self._most: tuple[Batch, list[int]] | None = None  # drafts of each sequence in the next forward, at most
        self._on: Batch | None = None  # the batch of the forward that was launched while drafts are made
        self._undone = 0  # forwards until the next drafts
        self._last_read: tuple[float, float, bool] | None = None  # when, seconds of captures, drafts are made
        self._unnoted: list[Callable[[], None]] = []  # what was read since the last launch
        if source is not None:
            source.reset()
            tally.drafts = self._counts

    def is_on(self, batch: Batch) -> bool:
        """Whether the next decode forward of this batch may have drafts."""
        if self._source is None or self._undone or batch.edited:
            return False
        num_sequences = len(batch.sequences)
        return num_sequences <= self._config.max_sequences and self._switch.is_on(self._size(num_sequences))

    def _size(self, num_sequences: int) -> int:
        return padded_batch(num_sequences, self._tally.max_batch)

    def plan(self, step: Step, batch: Batch, results_pending: bool) -> DraftRows | None:
        """Proposes drafts for the step, which decodes `batch`, and allocates their pages. None: no drafts."""
        if self._source is None:
            return None
        self._on = None
        if not step.decode:
            self._note()
            self._last_read = None
            return None
        if not self.is_on(batch):
            self._undone = max(0, self._undone - 1)
            return None
        if results_pending:
            return None
        self._on = batch
        if self._most is None or self._most[0] is not batch:
            self._note()
            self._choose(batch)
        assert self._most is not None, "numbers of drafts were chosen"
        clock, num_new = self._scheduler.clock, self._transcript.num_new(batch)
        rows: list[int] = []
        tokens: list[int] = []
        offsets: list[int] = []
        first: list[int] = []
        drafted: list[int] = []
        for sequence, most, new in zip(batch.sequences, self._most[1], num_new, strict=True):
            drafts = self._drafts_of(sequence, most, new, sequence.length(clock), step)
            first.append(len(rows))
            rows += [sequence.row] * (1 + len(drafts))
            tokens.append(0)
            tokens += drafts
            offsets += range(1 + len(drafts))
            drafted.append(len(drafts))
        if len(rows) == len(first):
            return None
        arrays = (np.array(values, dtype=np.int64) for values in (rows, tokens, offsets, first, drafted))
        return DraftRows(*arrays)

    def _drafts_of(self, sequence: RunningSequence, most: int, new: int, length: int, step: Step) -> Sequence[int]:
        """`new`: tokens of the completion that the transcript has since the sequence joined; `length`: of all."""
        assert self._source is not None, "drafts need a source"
        told, known = self._num_known.get(sequence, -1), len(sequence.token_ids) - sequence.prompt_length + new
        if told < known:
            self._source.extend(sequence, self._transcript.since(sequence, max(told, 0))[0])
            self._num_known[sequence] = known
        most = min(most, sequence.limit - length - 1, -length % self._runner.draft_chunk)
        drafts = self._source.propose(sequence, most) if most > 0 else ()
        assert len(drafts) <= max(most, 0), "the source proposed too many drafts"
        if drafts and length + len(drafts) > sequence.writable:
            return drafts[: self._scheduler.grow_for_drafts(sequence, len(drafts), step)]
        return drafts

    def prepare(self, batch: Batch) -> None:
        """What the next forward needs, as far as it can be known while the device works on this one."""
        self._note()
        if self._source is not None and self._on is batch:
            self._source.index()
            self._choose(batch)

    def _note(self) -> None:
        """Notes times and right drafts. No launch waits for this, because the device waits for a launch."""
        for note in self._unnoted:
            note()
        self._unnoted.clear()

    def _choose(self, batch: Batch) -> None:
        at_least = int(self._switch.in_trial)
        self._most = batch, self._budget.drafts(batch.row_B, batch.epoch_B, at_least)

    def parts(self, batch: Batch, results: Results) -> Iterator[tuple[Batch, Sampled]]:
        """Reads a forward's results as those of several forwards without drafts, one after the other.

        The caller adds each part to the transcript, and removes the sequences that end, before it asks for the next.
        Sequences that have drafts and do not end are not in any part: their tokens are added here.
        """
        token_N, logprob_N = results.read()
        num_open = self._transcript.num_added(batch)
        self._tally.count_results(num_open)
        drafts = results.drafts
        if drafts is None:
            self._was_read(batch, None, num_open)
            yield batch, Sampled(token_N, logprob_N)
            return
        if (token_N < 0).any():  # perhaps of a draft, which then spoilt the rows before it
            again = self._again(batch, drafts)
            yield batch, again.read()
            return
        right_B = num_right(drafts, token_N)
        self._accept(batch, drafts, right_B)
        row_n, ends_B = self._transcript.add_runs(batch, drafts.first_B, right_B + 1, token_N, logprob_N)
        self._tell(batch, drafts, right_B, ends_B, token_N)
        if ends_B.any():
            kept = [row_n]
            for part, row_b in _rounds(batch, drafts.first_B, right_B, ends_B):
                is_open_b = self._transcript.is_open(part)
                kept.append(row_b[is_open_b])
                yield part, Sampled(token_N[row_b], logprob_N[row_b])
            row_n = np.concatenate(kept)
        accepted = len(row_n) - num_open
        self._tally.count_accepted(accepted, len(batch.sequences))
        self._runner.keep_rows(row_n, len(token_N))
        self._was_read(batch, len(token_N), len(row_n))

    def _tell(
        self, batch: Batch, drafts: DraftRows, right_B: np.ndarray, ends_B: np.ndarray, token_N: np.ndarray
    ) -> None:
        """Extends the source by a forward's tokens, of sequences that do not end. It has all earlier ones."""
        assert self._source is not None, "drafts need a source"
        tokens: list[int] = token_N.tolist()
        runs = zip(batch.sequences, drafts.first_B.tolist(), right_B.tolist(), ends_B.tolist(), strict=True)
        for sequence, first, right, may_end in runs:
            if not may_end and sequence in self._num_known:
                self._source.extend(sequence, tokens[first : first + 1 + right])
                self._num_known[sequence] += 1 + right

    def _again(self, batch: Batch, drafts: DraftRows) -> Results:
        """Decodes without drafts what a forward with drafts should have decoded."""
        page_size, clock = self._cache.page.page_size, self._scheduler.clock - 1
        slots = []
        for sequence, first, count in zip(batch.sequences, drafts.first_B, drafts.drafted_B, strict=True):
            query = sequence.length(clock) - 1
            for position in query + drafts.offset_N[first + 1 : first + 1 + count]:
                slots.append(sequence.pages[position // page_size] * page_size + position % page_size)
        self._runner.forget_drafts(slots, self._cache)
        self._undone, self._last_read, self._on = PAUSE, None, None
        again = self._runner.launch(Step(decode=batch.sequences), batch, self._cache)
        assert again is not None, "a decode forward has results"
        return again

    def _accept(self, batch: Batch, drafts: DraftRows, right_B: np.ndarray) -> None:
        """Counts right drafts, as the device has."""
        for place in right_B.nonzero()[0].tolist():
            self._scheduler.accept(batch.sequences[place], int(right_B[place]))
        self._unnoted.append(partial(self._budget.note, batch.row_B, batch.epoch_B, drafts.drafted_B, right_B))
        self._counts.forwards += 1
        self._counts.drafted += len(drafts.row_N) - len(drafts.first_B)

    def _was_read(self, batch: Batch, num_rows: int | None, num_tokens: int) -> None:
        """A forward's results have arrived. `num_rows`: of one with drafts."""
        if self._source is not None:
            captured = 0.0 if self._runner.graphs is None else self._runner.graphs.seconds
            read = time.perf_counter(), captured, batch is self._on
            self._unnoted.append(partial(self._note_time, read, len(batch.sequences), num_rows, num_tokens))

    def _note_time(
        self, read: tuple[float, float, bool], num_sequences: int, num_rows: int | None, num_tokens: int
    ) -> None:
        """Notes the time since the results of the forward before, if both were forwards of one kind."""
        now, captured, is_on = read
        last, self._last_read = self._last_read, read
        seconds = now - last[0] if last is not None and (is_on or not last[2]) else None
        captures = last is not None and last[1] != captured
        if not is_on:
            self._switch.count_plain(self._size(num_sequences), None if captures else seconds)
            return
        self._switch.count_drafted(self._size(num_sequences), seconds, num_tokens / num_sequences, captures)
        if seconds is not None and not captures and self._config.min_gain > 0:
            self._times.add(self._runner.padded_rows(num_rows or num_sequences), seconds)

    def end(self, sequence: RunningSequence, *, keeps: bool = True) -> None:
        """Forgets a sequence that has ended. `keeps`: its tokens become drafts of others."""
        if self._source is None:
            return
        self._num_known.pop(sequence, None)
        self._source.end(sequence, keeps=keeps)


def _rounds(
    batch: Batch, first_B: np.ndarray, right_B: np.ndarray, of_B: np.ndarray
) -> Iterator[tuple[Batch, np.ndarray]]:
    """Parts of a forward with their rows: these sequences' own, then those whose first draft is right, and so on."""
    for step in range(int(right_B[of_B].max()) + 1):
        (place_b,) = (of_B & (right_B >= step)).nonzero()
        sequences = tuple(batch.sequences[place] for place in place_b)
        yield Batch(sequences, batch.row_B[place_b], batch.epoch_B[place_b], ()), first_B[place_b] + step
