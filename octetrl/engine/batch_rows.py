"""The state of each place in the batch, on the device. A decode forward needs nothing else from the host.

    token, length      the next query and the number of tokens up to it; every forward advances both
    prompt, key ...    of the sampler (sampler.py)
    table              the sequence's pages
    active             the rows of the running batch, in its order, then the idle row

The host writes only what changes: per step at most one copy of numbers and one of pages, from pinned memory. It never
waits for the device. The last row is always idle. Its length is 0, so attention returns zeros for it and nothing is
written to the cache. Batches are padded with it.

R places and the idle row, B sequences of a forward, W pages of the longest possible block table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octetrl.engine.pinned import to_device
from octetrl.engine.request import RunningSequence
from octetrl.engine.sampler import sequence_key
from octetrl.kernels.rows.advance_rows import advance_rows
from octetrl.kernels.rows.gather_rows import DecodeRows, gather_rows


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
        self._active_R = torch.full((rows,), max_batch, dtype=torch.int64, device=device)
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

    def join_drafts(self, owner_D: np.ndarray, row_D: np.ndarray, token_D: np.ndarray, length_D: np.ndarray) -> None:
        """Makes rows for drafts: the owner's row with another query. `length_D`: tokens up to it."""
        owner, row, token, length = self._to_device(np.stack((owner_D, row_D, token_D, length_D))).unbind()
        integers = self._integers_5R.index_select(1, owner)
        integers[0], integers[1] = token, length
        self._integers_5R.index_copy_(1, row, integers)
        self._fractions_3R.index_copy_(1, row, self._fractions_3R.index_select(1, owner))
        self._table_RW.index_copy_(0, row, self._table_RW.index_select(0, owner))

    def set_queries(self, row_B: np.ndarray, token_B: np.ndarray, length_B: np.ndarray) -> None:
        """Sets the next query of these rows, and the number of tokens up to it."""
        row, *query = self._to_device(np.stack((row_B, token_B, length_B))).unbind()
        self._integers_5R[:2].index_copy_(1, row, torch.stack(query))

    def write_pages(self, pages: Sequence[tuple[int, int, int]]) -> None:
        """Writes entries (row, index, page) of the block tables."""
        if pages:
            row_n, index_n, page_n = self._to_device(np.array(pages, dtype=np.int64).T).unbind()
            self._table_RW.index_put_((row_n, index_n), page_n.int())

    def activate(self, row_B: np.ndarray, padded: int) -> None:
        """Sets the batch: these rows, then idle ones up to `padded`."""
        active = np.full(padded, self._idle, dtype=np.int64)
        active[: len(row_B)] = row_B
        self._active_R[:padded].copy_(self._to_device(active))

    def samples_how(self, row_B: np.ndarray) -> tuple[bool, bool]:
        """Whether some row is not greedy, and whether some row has top-k, top-p or min-p."""
        return bool(self._draws_R[row_B].any()), bool(self._filters_R[row_B].any())

    # ------------------------------------------------------------ in the forward, on the device alone

    def gather(self, batch: int) -> DecodeRows:
        """The first `batch` active rows: one query each."""
        active_B = self._active_R[:batch]
        return gather_rows(active_B, self._integers_5R, self._fractions_3R, self._table_RW, self._page_size)

    def advance(self, batch: int, token_B: Tensor, logprob_B: Tensor) -> Tensor:
        """Each row's token becomes its next query; returns both as int32 [2, B], the log-probs bit by bit."""
        return advance_rows(token_B, logprob_B, self._active_R[:batch], self._integers_5R)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)
