"""Rows of a decode forward that verify drafts.

A draft of n tokens behind a sequence of L tokens is n rows with that sequence's pages and sampling parameters. Row i
has the i-th draft as its query and L + i tokens. A layer writes K and V of all rows before attention reads them, so
row i reads the drafts before it. A sequence's drafts follow its own row. B sequences of the forward, N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NONE_WRONG = np.int64(1 << 30)


class DraftRows(NamedTuple):
    """The rows of one forward. All int64."""

    row_N: np.ndarray  # of the sequence, in the batch
    token_N: np.ndarray  # the draft; 0 in a sequence's own row
    offset_N: np.ndarray  # how far the draft lies behind the sequence's query; 0 in its own row
    first_B: np.ndarray  # a sequence's own row in the forward
    drafted_B: np.ndarray  # number of drafts of each sequence


def num_right(drafts: DraftRows, token_N: np.ndarray) -> np.ndarray:
    """Number of right drafts of each sequence, int64 [B]. token_N: what each row sampled."""
    wrong_N = np.full(len(token_N), NONE_WRONG)
    is_wrong_N = drafts.token_N[1:] != token_N[:-1]
    np.copyto(wrong_N[1:], drafts.offset_N[1:], where=is_wrong_N & (drafts.offset_N[1:] > 0))
    first_wrong_B = np.minimum.reduceat(wrong_N, drafts.first_B)
    right_B: np.ndarray = np.minimum(first_wrong_B - 1, drafts.drafted_B)
    return right_B
