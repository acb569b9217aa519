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

The host has to know the tokens before it can propose more, so forwards are not launched ahead while drafts are made
(session.py). Drafts are made while few sequences run and while recent drafts gained enough tokens. Otherwise drafting
pauses for `PAUSE` forwards. While a sequence with options for its logits runs (logit_options.py), nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from octetrl.config.speculation import SpeculationConfig
from octetrl.engine.draft_rows import DraftRows
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.metrics import DraftTally, Tally
from octetrl.engine.model_runner import ModelRunner, Results, Sampled
from octetrl.engine.request import RunningSequence, Step
from octetrl.engine.scheduler import Scheduler
from octetrl.engine.transcript import Batch, Transcript

PAUSE = 64  # forwards without drafts after drafts that gained too little
SMOOTHING = 0.1  # weight of the last forward in the mean gain
FIRST_DRAFT = 4  # tokens of a sequence's first draft


class DraftSource(Protocol):
    """Proposes tokens. It may propose anything: only the number of forwards depends on it."""

    def extend(self, sequence: RunningSequence, token_ids: Sequence[int]) -> None:
        """Takes the next tokens of a sequence's completion."""

    def propose(self, sequence: RunningSequence, most: int) -> Sequence[int]:
        """At most `most` tokens that may follow."""

    def end(self, sequence: RunningSequence) -> None:
        """The sequence has ended; `token_ids` has all of its tokens."""

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
        self._told: dict[RunningSequence, int] = {}  # tokens of each completion that the source has
        self._reach: dict[RunningSequence, int] = {}  # drafts of the next forward, at most
        self._pause = 0
        self._gain = 2 * config.min_gain
        if source is not None:
            source.reset()
            tally.drafts = self._counts

    def is_on(self, batch: Batch) -> bool:
        """Whether the next decode forward of this batch may have drafts."""
        if self._source is None or self._pause or batch.edited:
            return False
        return len(batch.sequences) <= self._config.max_sequences

    def plan(self, step: Step, batch: Batch, results_pending: bool) -> DraftRows | None:
        """Proposes drafts for the step, which decodes `batch`, and allocates their pages. None: no drafts."""
        if not step.decode or not self.is_on(batch):
            self._pause = max(0, self._pause - bool(step.decode))
            return None
        if results_pending:
            return None
        drafts: list[tuple[int, int, int, int]] = []  # place, token, tokens up to it, slot
        rows = self._scheduler.free_rows
        for place, sequence in enumerate(batch.sequences):
            room = (len(rows) - len(drafts)) // (len(batch.sequences) - place)
            drafts += self._drafts_of(place, sequence, room, step)
        if not drafts:
            self._learn(0.0)
            return None
        owner_D, token_D, length_D, slot_D = np.array(drafts, dtype=np.int64).T
        clock = self._scheduler.clock
        return DraftRows(
            owner_D,
            np.array(rows[: len(drafts)], dtype=np.int64),
            token_D,
            length_D,
            slot_D,
            np.array([self._last_token(sequence) for sequence in batch.sequences], dtype=np.int64),
            np.array([sequence.length(clock) for sequence in batch.sequences], dtype=np.int64),
        )

    def _drafts_of(
        self, place: int, sequence: RunningSequence, room: int, step: Step
    ) -> list[tuple[int, int, int, int]]:
        assert self._source is not None, "drafts need a source"
        told = self._told.get(sequence, 0)
        token_ids, _ = self._transcript.since(sequence, told)
        self._told[sequence] = told + len(token_ids)
        self._source.extend(sequence, token_ids)
        length = sequence.length(self._scheduler.clock)
        most = min(self._reach.get(sequence, FIRST_DRAFT), self._config.max_draft_tokens)
        most = min(most, room, sequence.group.limit - length - 1)
        proposed = self._source.propose(sequence, most) if most > 0 else ()
        if not proposed:
            return []
        assert len(proposed) <= most, "the source proposed too many drafts"
        fitting = self._scheduler.grow_for_drafts(sequence, len(proposed), step)
        page_size, drafts = self._cache.page.page_size, []
        for index, token in enumerate(proposed[:fitting]):
            position = length + index
            slot = sequence.pages[position // page_size] * page_size + position % page_size
            drafts.append((place, token, position + 1, slot))
        return drafts

    def _last_token(self, sequence: RunningSequence) -> int:
        known = self._transcript.num_tokens(sequence) - sequence.prompt_length
        if known == 0:
            return sequence.group.request.prompt_token_ids[-1]
        return self._transcript.since(sequence, known - 1)[0][0]

    def parts(self, batch: Batch, results: Results) -> Iterator[tuple[Batch, Sampled]]:
        """Reads a forward's results as those of several forwards without drafts, one after the other.

        The caller adds each part to the transcript, and removes the sequences that end, before it asks for the next.
        """
        token_N, logprob_N = results.read()
        self._tally.count_results(self._transcript.num_added(batch))
        drafts = results.drafts
        if drafts is None:
            yield batch, Sampled(token_N, logprob_N)
            return
        if (token_N < 0).any():  # perhaps of a draft, which then spoilt the rows before it
            self._runner.forget_drafts(batch, drafts, self._cache)
            for place in np.unique(drafts.owner_D):
                self._scheduler.accept(batch.sequences[place], 0)
            self._pause = PAUSE
            again = self._runner.launch(Step(decode=batch.sequences), batch, self._cache)
            assert again is not None, "a decode forward has results"
            yield batch, again.read()
            return
        rounds = accepted_rows(len(batch.sequences), drafts, token_N)
        accepted_B = self._accept(batch, drafts, token_N, rounds)
        kept: list[int] = []
        for index, (place_b, row_b) in enumerate(rounds):
            sequences = tuple(batch.sequences[place] for place in place_b)
            part = Batch(sequences, batch.row_B[place_b], batch.epoch_B[place_b], ())
            is_open_b = self._transcript.is_open(part)
            kept += np.array(row_b)[is_open_b].tolist()
            yield part, Sampled(token_N[row_b], logprob_N[row_b])
            if index:
                self._tally.count_accepted(int(is_open_b.sum()), len(batch.sequences))
        self._cache.count_rows(kept)
        self._learn(float(accepted_B.mean()))

    def _accept(
        self, batch: Batch, drafts: DraftRows, token_N: np.ndarray, rounds: list[tuple[list[int], list[int]]]
    ) -> np.ndarray:
        """Moves scheduler and rows on by the right drafts. Returns their number for each sequence, int64 [B]."""
        accepted_B = np.zeros(len(batch.sequences), dtype=np.int64)
        last_B = np.arange(len(batch.sequences))
        for place_b, row_b in rounds[1:]:
            accepted_B[place_b] += 1
            last_B[place_b] = row_b
        drafted_B = np.bincount(drafts.owner_D, minlength=len(batch.sequences))
        for place in np.flatnonzero(drafted_B):
            sequence, accepted = batch.sequences[place], int(accepted_B[place])
            self._scheduler.accept(sequence, accepted)
            all_right = accepted == drafted_B[place]
            self._reach[sequence] = (
                2 * max(accepted, self._reach.get(sequence, FIRST_DRAFT)) if all_right else accepted + 1
            )
        self._runner.settle(batch, token_N[last_B].astype(np.int64), drafts.query_length_B + 1 + accepted_B)
        self._counts.forwards += 1
        self._counts.drafted += len(drafts.owner_D)
        return accepted_B

    def _learn(self, gain: float) -> None:
        """`gain`: tokens for each sequence beyond one, in the last forward."""
        self._gain += SMOOTHING * (gain - self._gain)
        if self._gain < self._config.min_gain:
            self._gain, self._pause = 2 * self._config.min_gain, PAUSE

    def end(self, sequence: RunningSequence) -> None:
        """Forgets a sequence that has ended; its tokens become drafts of others."""
        if self._source is None:
            return
        self._told.pop(sequence, None)
        self._reach.pop(sequence, None)
        self._source.end(sequence)


def accepted_rows(num_sequences: int, drafts: DraftRows, token_N: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """Places and rows of each part of a forward: first all sequences, then those whose first draft is right, and so on.

    token_N: what each row sampled, the drafts' rows behind the batch's.
    """
    rounds = [(list(range(num_sequences)), list(range(num_sequences)))]
    expected = token_N[:num_sequences].tolist()  # the next token of each sequence; None: a draft was wrong
    count = [0] * num_sequences
    pairs = zip(drafts.owner_D.tolist(), drafts.token_D.tolist(), strict=True)
    for row, (place, token) in enumerate(pairs, start=num_sequences):
        if expected[place] != token:
            expected[place] = None
            continue
        expected[place] = int(token_N[row])
        count[place] += 1
        if count[place] == len(rounds):
            rounds.append(([], []))
        rounds[count[place]][0].append(place)
        rounds[count[place]][1].append(row)
    return rounds
