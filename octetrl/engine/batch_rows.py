"""The state of each place in the batch, on the device. A decode forward needs nothing else from the host.

    token, length      the next query and the number of tokens up to it; every forward advances both
    prompt, key ...    of the sampler (sampler.py)
    table              the sequence's pages
    plan               the rows of the running batch, in its order, then the idle row; and each row's draft

The host writes only what changes: per step at most one copy of numbers and one of pages, from pinned memory. It never
waits for the device. The last row is always idle. Its length is 0, so attention returns zeros for it and nothing is
written to the cache. Batches are padded with it.

A forward with drafts has several rows of one sequence. Its plan is one copy from one pinned buffer (draft_rows.py).

R places and the idle row, B sequences of a forward, N rows of one with drafts, W pages of the longest possible block
table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octetrl.engine.draft_rows import DraftRows
from octetrl.engine.pinned import to_device
from octetrl.engine.request import RunningSequence
from octetrl.engine.sampler import sequence_key
from octetrl.kernels.rows.advance_rows import advance_rows
from octetrl.kernels.rows.gather_rows import DecodeRows, gather_rows
from octetrl.kernels.rows.settle_drafts import settle_drafts


class BatchRows:
    """Rows for `max_batch` sequences of at most `max_tokens` tokens, on `device`."""

    def __init__(self, *, max_batch: int, max_tokens: int, page_size: int, device: torch.device) -> None:
        self._device, self._page_size, self._idle = device, page_size, max_batch
        rows = max_batch + 1
        self._integers_5R = torch.zeros(
            5, rows, dtype=torch.int64, device=device
        )  # as kernels/rows/gather_rows.py has them
        self._fractions_3R = torch.ones(3, rows, dtype=torch.float32, device=device)
        self._table_RW = torch.zeros(rows, -(-max_tokens // page_size), dtype=torch.int32, device=device)
        # row of the sequence, draft, offset of the draft; rows of the forward before that are kept, and their number
        self._plan_4R = torch.full((4, rows), max_batch, dtype=torch.int64, device=device)
        self._next_4R = torch.zeros(4, rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._next = self._next_4R.numpy()
        self.kept_R = self._plan_4R[3]  # as kernels/rows/count_kept_rows.py has it
        self._draws_R = np.zeros(rows, dtype=bool)
        self._filters_R = np.zeros(rows, dtype=bool)

    def reset(self) -> None:
        """Clears the block tables of an earlier cache."""
        self._table_RW.zero_()

    def join(self, sequences: Sequence[RunningSequence]) -> None:
        """Writes the last known token and the sampling parameters of each sequence into its row."""
        if not sequences:
            return
        integers_n6 = np.empty((len(sequences), 6), dtype=np.int64)
        fractions_n3 = np.empty((len(sequences), 3), dtype=np.float32)
        for n, sequence in enumerate(sequences):
            request, tokens = sequence.group.request, sequence.token_ids
            sampling = request.sampling
            key = sequence_key(request.seed, sequence.sibling)
            integers_n6[n] = sequence.row, tokens[-1], len(tokens), sequence.prompt_length, key, sampling.top_k
            fractions_n3[n] = sampling.temperature, sampling.top_p, sampling.min_p
            filters = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
            self._draws_R[sequence.row] = sampling.temperature > 0
            self._filters_R[sequence.row] = filters and sampling.temperature > 0
        integers = self._to_device(integers_n6)
        self._integers_5R.index_copy_(1, integers[:, 0], integers[:, 1:].t())
        self._fractions_3R.index_copy_(1, integers[:, 0], self._to_device(fractions_n3).t())

    def write_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Writes entries (row, index, page) of the block tables."""
        if pages:
            row_n, index_n, page_n = self._to_device(np.array(pages, dtype=np.int64).T).unbind()
            self._table_RW.index_put_((row_n, index_n), page_n.int())

    def activate(self, row_B: np.ndarray, padded: int) -> None:
        """Sets the batch: these rows, then idle ones up to `padded`."""
        active = np.full(padded, self._idle, dtype=np.int64)
        active[: len(row_B)] = row_B
        self._plan_4R[0, :padded].copy_(self._to_device(active))

    def activate_drafts(self, drafts: DraftRows, padded: int, kept: tuple[np.ndarray, int]) -> None:
        """Sets the rows of a forward with drafts, then idle ones up to `padded`. `kept`: rows of the last such forward
        whose tokens were kept, and the number of all its rows. All launched forwards have been read."""
        size, plan_4R = len(drafts.row_N), self._next
        plan_4R[0, :size], plan_4R[1, :size], plan_4R[2, :size] = drafts.row_N, drafts.token_N, drafts.offset_N
        plan_4R[0, size:padded] = self._idle
        plan_4R[2, size:padded] = 0
        plan_4R[3] = 0
        plan_4R[3, kept[0]] = 1
        plan_4R[3, -1] = kept[1]
        self._plan_4R.copy_(self._next_4R, non_blocking=True)

    def samples_how(self, row_B: np.ndarray) -> tuple[bool, bool]:
        """Whether some row is not greedy, and whether some row has top-k, top-p or min-p."""
        return bool(self._draws_R[row_B].any()), bool(self._filters_R[row_B].any())

    # ------------------------------------------------------------ in the forward, on the device alone

    def gather(self, batch: int, *, drafts: bool = False) -> DecodeRows:
        """The first `batch` rows of the plan: one query each."""
        state = (self._integers_5R, self._fractions_3R, self._table_RW, self._page_size)
        return gather_rows(self._plan_4R[0, :batch], *state, self._plan_4R[1:3, :batch] if drafts else None)

    def draft_offsets(self, batch: int) -> Tensor:
        """How far the draft of each row lies behind its sequence's query, int64 [batch]; 0 in a sequence's own row."""
        return self._plan_4R[2, :batch]

    def advance(self, batch: int, token_B: Tensor, logprob_B: Tensor, *, drafts: bool = False) -> Tensor:
        """Each sequence's token, or the last that its right drafts led to, becomes its next query. Returns tokens and
        log-probs as int32 [2, B], the log-probs bit by bit."""
        if drafts:
            return settle_drafts(token_B, logprob_B, self._plan_4R[:3, :batch], self._integers_5R)
        return advance_rows(token_B, logprob_B, self._plan_4R[0, :batch], self._integers_5R)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
