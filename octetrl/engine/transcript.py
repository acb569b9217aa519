"""The sampled tokens of the batch's sequences, as their results arrive on the host.

There is one row for each place in the batch, so a few array operations store a step's results, whatever the batch size.
Results arrive late. The row's `epoch` shows which belong to a sequence that has ended or left its place; they are
dropped. Most stops are found with array operations too (the model's own stop tokens, the limit). Rows with stop strings
or stop tokens of their own are checked token by token (stopping.py).

R places, B sequences of a batch, N tokens of a completion.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from octetrl.engine.logit_options import SequenceLogits
from octetrl.engine.request import NO_ROW, RunningSequence


class Batch(NamedTuple):
    """The sequences of a decode forward, and their rows when it was launched."""

    sequences: tuple[RunningSequence, ...]
    row_B: np.ndarray  # int64
    epoch_B: np.ndarray  # int64
    edited: tuple[tuple[int, SequenceLogits], ...]  # place in the batch, of sequences with options for their logits


class Transcript:
    """For `max_batch` places and completions of at most `max_tokens` tokens. `eos_token_ids`: where most rows stop."""

    def __init__(self, max_batch: int, max_tokens: int, eos_token_ids: frozenset[int]) -> None:
        self._tokens_RN = np.zeros((max_batch, max_tokens), dtype=np.int32)  # untouched pages cost nothing
        self._logprobs_RN = np.zeros((max_batch, max_tokens), dtype=np.float32)
        self._count_R = np.zeros(max_batch, dtype=np.int64)
        self._limit_R = np.zeros(max_batch, dtype=np.int64)
        self._epoch_R = np.zeros(max_batch, dtype=np.int64)
        self._stops_at_eos_R = np.zeros(max_batch, dtype=bool)
        self._watched_R = np.zeros(max_batch, dtype=bool)
        self._eos_token_ids = eos_token_ids
        self._eos = np.array(sorted(eos_token_ids), dtype=np.int32)

    def open(self, sequences: Iterable[RunningSequence]) -> None:
        """Starts recording these sequences; each has its row."""
        for sequence in sequences:
            row, stopping = sequence.row, sequence.stopping
            self._count_R[row] = 0
            self._limit_R[row] = sequence.limit - len(sequence.token_ids)
            self._stops_at_eos_R[row] = stopping.stop_token_ids == self._eos_token_ids
            self._watched_R[row] = stopping.watches_text or not (
                self._stops_at_eos_R[row] or not stopping.stop_token_ids
            )

    def batch(self, sequences: tuple[RunningSequence, ...]) -> Batch:
        row_B = np.fromiter((sequence.row for sequence in sequences), np.int64, len(sequences))
        edited = tuple((place, one.logits) for place, one in enumerate(sequences) if one.logits is not None)
        return Batch(sequences, row_B, self._epoch_R[row_B], edited)

    def add(self, batch: Batch, token_B: np.ndarray, logprob_B: np.ndarray) -> list[RunningSequence]:
        """Stores one forward's results. Returns the sequences that may have ended with it."""
        (kept_b,) = np.nonzero(self.is_open(batch))
        row_b, token_b = batch.row_B[kept_b], token_B[kept_b]
        count_b = self._count_R[row_b]
        self._tokens_RN[row_b, count_b] = token_b
        self._logprobs_RN[row_b, count_b] = logprob_B[kept_b]
        self._count_R[row_b] = count_b + 1
        attention_b = (count_b + 1 == self._limit_R[row_b]) | self._watched_R[row_b] | (token_b < 0)
        attention_b |= self._stops_at_eos_R[row_b] & self._is_eos(token_b)
        return [batch.sequences[i] for i in kept_b[attention_b]]

    def add_runs(
        self, batch: Batch, first_B: np.ndarray, count_B: np.ndarray, token_N: np.ndarray, logprob_N: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Stores one forward's results where sequence b has those of `count_B[b]` rows from `first_B[b]` on.

        Returns the rows stored, int64 [n], and bool [B]: sequences that may end within their run. Of those nothing is
        stored; `add` takes their tokens one by one.
        """
        before_B = count_B.cumsum() - count_B
        own_n = np.arange(int(count_B.sum()))
        row_n = np.repeat(first_B - before_B, count_B) + own_n
        token_n, known_B, stops_B = token_N[row_n], self._count_R[batch.row_B], self._stops_at_eos_R[batch.row_B]
        ends_B = self._watched_R[batch.row_B] | (known_B + count_B >= self._limit_R[batch.row_B])
        if len(self._eos):
            ends_B |= stops_B & np.logical_or.reduceat(self._is_eos(token_n), before_B)
        is_open_B = self.is_open(batch)
        ends_B &= is_open_B
        count_B = np.where(is_open_B & ~ends_B, count_B, 0)
        if len(own_n) > count_B.sum():
            before_B = count_B.cumsum() - count_B
            own_n = np.arange(int(count_B.sum()))
            row_n = np.repeat(first_B - before_B, count_B) + own_n
            token_n = token_N[row_n]
        place_n, column_n = np.repeat(batch.row_B, count_B), np.repeat(known_B - before_B, count_B) + own_n
        self._tokens_RN[place_n, column_n] = token_n
        self._logprobs_RN[place_n, column_n] = logprob_N[row_n]
        self._count_R[batch.row_B] = known_B + count_B
        return row_n, ends_B

    def _is_eos(self, token_n: np.ndarray) -> np.ndarray:
        """bool [n]. For the few stop tokens of a model, `np.isin` takes several times as long."""
        is_eos_n: np.ndarray = (token_n[:, None] == self._eos).any(axis=1)
        return is_eos_n

    def num_new(self, batch: Batch) -> list[int]:
        """For each sequence, the number of tokens whose results arrived since it joined the batch."""
        counts: list[int] = self._count_R[batch.row_B].tolist()
        return counts

    def last_token(self, sequence: RunningSequence) -> int:
        return int(self._tokens_RN[sequence.row, self._count_R[sequence.row] - 1])

    def since(self, sequence: RunningSequence, skip: int) -> tuple[list[int], list[float]]:
        """Known tokens of its completion and their log-probs, without the first `skip`."""
        token_ids, logprobs = sequence.token_ids[sequence.prompt_length + skip :], sequence.logprobs[skip:]
        if sequence.row != NO_ROW:
            begin, count = max(0, skip - len(sequence.logprobs)), self._count_R[sequence.row]
            token_ids += self._tokens_RN[sequence.row, begin:count].tolist()
            logprobs += self._logprobs_RN[sequence.row, begin:count].tolist()
        return token_ids, logprobs

    def num_tokens(self, sequence: RunningSequence) -> int:
        """Number of tokens of prompt and completion whose results have arrived."""
        added = 0 if sequence.row == NO_ROW else int(self._count_R[sequence.row])
        return len(sequence.token_ids) + added

    def is_open(self, batch: Batch) -> np.ndarray:
        """bool [B]: which of a batch's sequences still need its results."""
        is_open_B: np.ndarray = self._epoch_R[batch.row_B] == batch.epoch_B
        return is_open_B

    def num_added(self, batch: Batch) -> int:
        """Number of a batch's sequences that still need its results."""
        return int(self.is_open(batch).sum())

    def close(self, sequence: RunningSequence, row: int) -> None:
        """Ends the recording in `row`: moves its tokens into the sequence; later results are dropped."""
        count = self._count_R[row]
        sequence.token_ids += self._tokens_RN[row, :count].tolist()
        sequence.logprobs += self._logprobs_RN[row, :count].tolist()
        self._count_R[row] = 0
        self._epoch_R[row] += 1
