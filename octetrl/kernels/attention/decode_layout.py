"""How decode is laid out on a GPU: the tile of one program, whether the keys of a sequence are split, and whether draft
rows of one sequence share a program.

No bit depends on any of these. All figures are of an H200 at head size 128 (lab/log.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import triton
from torch import Tensor

from octetrl.fp8.format import is_code
from octetrl.kernels.attention.attention_order import KV_CHUNK

MULTIPROCESSORS = 132  # of an H100 or H200
PADDED_HEAD_SIZES = (80, 96)  # to 128; 16 columns, so that Triton emits wgmma, as for prefill
LARGEST_SHARED_HEAD = 128  # larger heads of several draft rows need more registers than there are
MOST_ROWS = 16  # draft rows of a program
SPLIT_BYTES = 1 << 26  # the largest size of the chunks' outputs


@dataclass(frozen=True)
class DecodeTile:
    """The layout of a decode tile: query columns (8 or 16; 16 if codes are multiplied), tiles in flight, and the
    register limit of a thread (None: no limit)."""

    columns: int
    stages: int
    registers: int | None = None

    @classmethod
    def chosen(cls, k_cache: Tensor, v_cache: Tensor, num_programs: int) -> DecodeTile:
        """The fastest choice on an H200 at head size 128 (lab/log.md).

        With 3 tiles of codes in flight, three programs share a multiprocessor; with 4, two do. Two are slower, but
        still better than a last wave of programs that leaves most multiprocessors idle.
        """
        one_in_codes = is_code(k_cache.dtype) or is_code(v_cache.dtype)
        if k_cache.shape[3] > 128:
            return cls(columns=16, stages=2 if one_in_codes else 1)  # two BF16 tiles do not fit
        if is_code(k_cache.dtype) and is_code(v_cache.dtype):
            by_three, by_two = (_filled(num_programs, each * MULTIPROCESSORS) for each in (3, 2))
            return cls(columns=16, stages=4) if by_two > 1.25 * by_three else cls(columns=16, stages=3, registers=168)
        if one_in_codes or k_cache.shape[3] in PADDED_HEAD_SIZES:
            return cls(columns=16, stages=2)
        return cls(columns=8, stages=3)


def _filled(num_programs: int, places: int) -> float:
    """Share of the places that are used, over all waves of programs."""
    return num_programs / (places * -(-num_programs // places)) if num_programs else 0.0


@dataclass(frozen=True)
class KeySplit:
    """How keys are split: the most chunks of a sequence, and the programs per kv head that share all chunks."""

    max_chunks: int
    programs: int

    @classmethod
    def chosen(cls, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, num_pages: int) -> KeySplit | None:
        """The split for this batch, whose block table has `num_pages` columns; None: a program takes a whole sequence.

        Codes need three programs a multiprocessor to read at full speed, BF16 needs half of one. With fewer sequences
        than that, their keys are split. The lengths are unknown here. Sequences of one length would be up to 16% faster
        whole (32 of 1,500 keys, E4M3); sequences of many lengths are 1.7 times as fast split (48 of 300 to 16,000).
        """
        num_sequences, num_heads, head_size = q_BHD.shape
        num_kv_heads, page_size = k_cache.shape[1:3]
        codes = is_code(k_cache.dtype) and is_code(v_cache.dtype)
        enough, programs = (3 * MULTIPROCESSORS, 2 * MULTIPROCESSORS) if codes else (64, 3 * MULTIPROCESSORS)
        max_chunks = triton.cdiv(num_pages * page_size, KV_CHUNK)
        size = 4 * num_sequences * max_chunks * num_heads * head_size
        if max_chunks == 1 or num_sequences * num_kv_heads >= enough or size > SPLIT_BYTES:
            return None
        return cls(max_chunks, min(num_sequences * max_chunks, triton.cdiv(programs, num_kv_heads)))


class DraftLayout(NamedTuple):
    """How many draft rows of one sequence a program serves, its tile, and how the keys are split."""

    rows: int
    tile: DecodeTile
    split: KeySplit

    @classmethod
    def chosen(
        cls, q_BHD: Tensor, k_cache: Tensor, v_cache: Tensor, num_pages: int, tile: DecodeTile | None = None
    ) -> DraftLayout | None:
        """The layout of a forward with drafts. None: each row reads its keys alone, as without drafts.

        The keys are always split, because the host does not know how many programs have rows. The tile is the widest
        that spills no register for sm_90, with any scales, pages and group. `tile` replaces it, whatever the head size
        and the cache. Rows of a cache with only K or only V in codes stay alone: with K in BF16 and V in codes, an
        earlier form of the kernel had other bits or read outside memory (lab/log.md).
        """
        (num_rows, num_heads, head_size), (num_kv_heads, page_size) = q_BHD.shape, k_cache.shape[1:3]
        codes = is_code(k_cache.dtype)
        if tile is None and (head_size > LARGEST_SHARED_HEAD or codes != is_code(v_cache.dtype)):
            return None
        tile = tile or DecodeTile(columns=16 if codes else 32, stages=3)
        rows = min(tile.columns // triton.next_power_of_2(num_heads // num_kv_heads), MOST_ROWS)
        max_chunks = triton.cdiv(num_pages * page_size, KV_CHUNK)
        if rows < 2 or 4 * num_rows * max_chunks * num_heads * head_size > SPLIT_BYTES:
            return None
        programs = (2 if codes else 3) * MULTIPROCESSORS
        return cls(rows, tile, KeySplit(max_chunks, min(num_rows * max_chunks, triton.cdiv(programs, num_kv_heads))))
