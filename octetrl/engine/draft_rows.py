"""Rows of a decode forward that verify drafts.

A draft of n tokens behind a sequence of L tokens is n rows with that sequence's pages and sampling parameters. Row i
has the i-th draft as its query and L + i tokens. A layer writes K and V of all rows before attention reads them, so
row i reads the drafts before it. B sequences of the forward, D drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class DraftRows(NamedTuple):
    """The drafts of one forward, those of one sequence in order. All int64."""

    owner_D: np.ndarray  # place of the sequence in the batch
    row_D: np.ndarray  # free rows that the drafts take
    token_D: np.ndarray
    length_D: np.ndarray  # tokens of the sequence up to the draft
    slot_D: np.ndarray  # where its K and V go
    query_B: np.ndarray  # the batch's own queries
    query_length_B: np.ndarray
