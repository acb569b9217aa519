"""Tokens of prompts as rows of one captured forward (forward_graphs.py): each a query of its own, like rows of decode.

A prefill forward is launched kernel by kernel. For a few short chunks, such as the new messages of conversations, the
host takes several times as long for that as the device for the work, in which nobody decodes.

R rows, T of them with tokens, C chunks, P pages of the longest, W pages of the longest possible block table.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from octetrl.engine.forward_graphs import ForwardGraphs
from octetrl.engine.kv_cache import KVCache
from octetrl.engine.pinned import to_device
from octetrl.layers.context import PagedContext

PROMPT_SIZES = (64, 128, 256, 512)
MOST_KEYS = 1 << 18  # that the rows of a forward may read, added up

Forward = Callable[[Tensor, Tensor, PagedContext], Tensor]


class PromptRows:
    """At most `PROMPT_SIZES[-1]` rows, with the pages of sequences of at most `max_tokens` tokens. An idle row has a
    context of 0. forward: of tokens and positions, returns the last hidden states."""

    def __init__(self, graphs: ForwardGraphs, forward: Forward, max_tokens: int, page_size: int) -> None:
        rows, device = PROMPT_SIZES[-1], graphs.device
        self._graphs, self._forward, self._max_tokens = graphs, forward, max_tokens
        self._columns_3R = torch.zeros(3, rows, dtype=torch.int64, device=device)  # token, position, slot
        self._context_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self._table_RW = torch.zeros(rows, -(-max_tokens // page_size), dtype=torch.int32, device=device)
        self._cu_seqlens_R1 = torch.arange(rows + 1, dtype=torch.int32, device=device)

    def size(self, position_T: np.ndarray) -> int | None:
        """The number of rows for tokens at these positions, idle ones included. None for more work than launching
        kernel by kernel costs: each row reads its keys alone."""
        if position_T.sum() + len(position_T) > MOST_KEYS:
            return None
        return next((size for size in PROMPT_SIZES if size >= len(position_T)), None)

    def run(
        self, columns_3T: np.ndarray, lengths_C: np.ndarray, table_CP: np.ndarray, size: int, cache: KVCache
    ) -> Tensor:
        """The last hidden states of chunks' tokens, and of idle rows up to `size`. columns_3T: token, position and
        slot. The next run overwrites the result."""
        rows, device = columns_3T.shape[1], self._columns_3R.device
        columns_5R = np.zeros((5, size), dtype=np.int64)
        columns_5R[2, rows:] = -1
        columns_5R[:3, :rows] = columns_3T
        columns_5R[3, :rows] = columns_3T[1] + 1
        columns_5R[4, :rows] = np.repeat(np.arange(len(lengths_C)), lengths_C)
        columns = to_device(columns_5R, device)
        self._columns_3R[:, :size].copy_(columns[:3])
        self._context_R[:size].copy_(columns[3])
        self._table_RW[:size, : table_CP.shape[1]] = to_device(table_CP, device)[columns[4]]
        return self._graphs.run(self._prefill, size, False, False, cache)

    def _prefill(self, size: int, draws: bool, filters: bool, cache: KVCache) -> Tensor:
        """What is captured. Nothing is sampled."""
        token_R, position_R, slot_R = self._columns_3R[:, :size].unbind()
        context = PagedContext(
            layers=cache.layers,
            slot_mapping_T=slot_R,
            block_table_BP=self._table_RW[:size],
            cu_seqlens_q_B1=self._cu_seqlens_R1[: size + 1],
            context_lens_B=self._context_R[:size],
            max_query_len=1,
            max_context_len=self._max_tokens,
        )
        return self._forward(token_R, position_R, context)
