"""What the device knows of each place in the batch, so that a decode forward needs nothing from the host.

    token, length      the next query and the number of tokens up to it; every forward moves both on
    prompt, key ...    of the sampler (sampler.py)
    table              the sequence's pages
    active             the rows of the running batch, in its order, then the idle row

The host writes only what changes, in one copy of numbers and one of pages a step at most, from pinned memory: it never
waits for the device. The last row is idle for ever: length 0, so that attention gives zeros and nothing is written to
the cache. Batches are padded with it.

R places and the idle one, B sequences of a forward, W pages of the longest possible block table.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from octetrl.engine.request import Sequence
from octetrl.engine.sampler import SamplingRows, sequence_key

TOKEN, LENGTH, PROMPT, KEY, TOP_K = range(5)
TEMPERATURE, TOP_P, MIN_P = range(3)


class DecodeInputs(NamedTuple):
    """A decode forward's input: one query for each row of the batch."""

    active_B: Tensor  # int64: its rows
    token_B: Tensor  # int64
    length_B: Tensor  # int64: the query is the last of so many tokens; 0 in idle rows
    position_B: Tensor  # int64
    table_BW: Tensor  # int32
    slot_B: Tensor  # int64; -1 in idle rows
    rows: SamplingRows


class BatchRows:
    """Rows for `max_batch` sequences of at most `max_tokens` tokens, on `device`."""

    def __init__(self, *, max_batch: int, max_tokens: int, page_size: int, device: torch.device) -> None:
        self._device, self._page_size, self._idle = device, page_size, max_batch
        rows = max_batch + 1
        self._integers_5R = torch.zeros(5, rows, dtype=torch.int64, device=device)
        self._fractions_3R = torch.ones(3, rows, dtype=torch.float32, device=device)
        self._table_RW = torch.zeros(rows, -(-max_tokens // page_size), dtype=torch.int32, device=device)
        self._active_R = torch.full((rows,), max_batch, dtype=torch.int64, device=device)
        self._draws_R = np.zeros(rows, dtype=bool)
        self._filters_R = np.zeros(rows, dtype=bool)

    def reset(self) -> None:
        """Forgets the pages of an earlier cache."""
        self._table_RW.zero_()

    def join(self, sequences: Many[Sequence]) -> None:
        """Their rows hold the last known token of each and its sampling parameters from now on."""
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

    def write_pages(self, pages: Many[tuple[int, int, int]]) -> None:
        """Entries (row, index, page) of the block tables."""
        if pages:
            row_n, index_n, page_n = self._to_device(np.array(pages, dtype=np.int64).T).unbind()
            self._table_RW.index_put_((row_n, index_n), page_n.int())

    def activate(self, row_B: np.ndarray, padded: int) -> None:
        """The batch from now on: these rows, then idle ones up to `padded`."""
        active = np.full(padded, self._idle, dtype=np.int64)
        active[: len(row_B)] = row_B
        self._active_R[:padded].copy_(self._to_device(active))

    def samples_how(self, row_B: np.ndarray) -> tuple[bool, bool]:
        """Whether some row draws, and whether some row has top-k, top-p or min-p."""
        return bool(self._draws_R[row_B].any()), bool(self._filters_R[row_B].any())

    # ------------------------------------------------------------ in the forward, on the device alone

    def gather(self, batch: int, draws: bool, filters: bool) -> DecodeInputs:
        """The first `batch` active rows."""
        active_B = self._active_R[:batch]
        integers_5B = self._integers_5R.index_select(1, active_B)
        temperature_B, top_p_B, min_p_B = self._fractions_3R.index_select(1, active_B).unbind()
        length_B = integers_5B[LENGTH]
        position_B = (length_B - 1).clamp_min_(0)
        table_BW = self._table_RW.index_select(0, active_B)
        page_B = table_BW.gather(1, (position_B // self._page_size)[:, None])[:, 0].long()
        slot_B = page_B * self._page_size + position_B % self._page_size
        rows = SamplingRows(
            key_N=integers_5B[KEY],
            counter_N=length_B - integers_5B[PROMPT],
            temperature_N=temperature_B,
            top_k_N=integers_5B[TOP_K],
            top_p_N=top_p_B,
            min_p_N=min_p_B,
            draws=draws,
            filters=filters,
        )
        return DecodeInputs(
            active_B, integers_5B[TOKEN], length_B, position_B, table_BW, slot_B.masked_fill_(length_B == 0, -1), rows
        )

    def advance(self, inputs: DecodeInputs, token_B: Tensor) -> None:
        """Each row's token becomes its next query; the idle row stays as it is."""
        idle_B = inputs.length_B == 0
        moved_2B = torch.stack((token_B.clamp_min(0).masked_fill(idle_B, 0), inputs.length_B + ~idle_B))
        self._integers_5R[TOKEN : LENGTH + 1].index_copy_(1, inputs.active_B, moved_2B)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array, self._device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy; to a GPU through pinned memory, so that the host goes on at once."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
