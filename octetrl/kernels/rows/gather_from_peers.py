"""Gather the columns of all workers of a tensor-parallel group through the memory of their GPUs, in one kernel.

    out[M, C] = the workers' x[M, W], side by side        and, in the same kernel, their flat words one after another

NCCL takes 25 to 32 us for the small tensors of a decode step. Here every program writes its part of x into the inbox of
each peer, raises a flag there, waits for the peers' flags in its own memory, and copies what has arrived. Nothing waits
for the host and no argument changes from call to call, so the kernel can be captured in a CUDA graph.

No word is overwritten before it is read. A program has two slots in each inbox, uses them in turn and counts its
calls. A peer writes a slot again two calls later, after its call in between has ended. For that it needed this
program's flag of the call in between, which began after the earlier call, with all its reads, had ended. All workers
make the same calls with the same shapes, each on one stream.

A program writes before it waits, and waits only for the programs of its number. So workers cannot block each other,
however many programs run at a time. After `polls` looks at a flag it gives up: the missing words become bytes of 255,
which are NaN in BF16, float32 and E4M3, and `late` is set. The worker then calls no more. If it did, its flag could be
two calls ahead of a slow peer's, which takes that as missing too.

Layout: x and out row-major, rows of whole 4-byte words. An inbox is int32 [programs, 2, R, TILES, TILE], flags are
int32 [programs, R]. An own word costs 4 bytes read, 4 written and 4 (R - 1) sent, a peer's word 4 read and 4 written.

M rows, W words of a row of x, C words of a row of out, R workers, F flat words of one worker.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 128  # at most: fewer than the multiprocessors of a Hopper GPU, so all run at once
TILE = 2048  # words, 8 KB
TILES = 8  # of a program in one call; more are gathered in several
WARPS = 4


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """Memory of this worker that its peers write, and the addresses of theirs. All tensors are on this worker's GPU.

    `inbox_P`, `flags_P`: int64 addresses of every worker's inbox and flags, as this GPU sees them.
    """

    rank: int
    count: int  # workers
    inbox: Tensor  # int32, `inbox_words(count)`
    flags: Tensor  # int32 [PROGRAMS, count], 0 at first
    inbox_P: Tensor
    flags_P: Tensor
    calls: Tensor  # int32 [PROGRAMS], 0 at first
    late: Tensor  # int32 [1]: 1 after a peer did not write in time
    polls: int  # of a flag, before a program gives up

    @property
    def has_failed(self) -> bool:
        """Whether a peer did not write in time. Waits for the device."""
        return bool(self.late.item())


def inbox_words(count: int) -> int:
    """The size of an inbox of `count` workers."""
    return PROGRAMS * 2 * count * TILES * TILE


@triton.jit
def _tile(tile, num_rows, WIDEST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows and columns of a tile, and its words' places in an inbox."""
    across: tl.constexpr = (WIDEST + COLUMNS - 1) // COLUMNS
    row_R = tile // across * ROWS + tl.arange(0, ROWS)
    column_C = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    word_RC = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    return row_R.to(tl.int64)[:, None], column_C[None, :], (row_R < num_rows)[:, None], word_RC


@triton.jit(do_not_specialize=["num_rows", "flat_words", "polls"])
def _gather_from_peers_kernel(
    x_ptr, flat_ptr, out_ptr, out_flat_ptr, inbox_ptrs, flags_ptrs, inbox_ptr, flag_ptr, calls_ptr, late_ptr,
    num_rows, flat_words, polls,
    STARTS: tl.constexpr, RANK: tl.constexpr, COUNT: tl.constexpr, WIDEST: tl.constexpr, FLAT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    SIZE: tl.constexpr = ROWS * COLUMNS
    TOTAL: tl.constexpr = STARTS[COUNT]
    WIDTH: tl.constexpr = STARTS[RANK + 1] - STARTS[RANK]
    program = tl.program_id(0)
    row_tiles = tl.cdiv(num_rows, ROWS) * ((WIDEST + COLUMNS - 1) // COLUMNS)
    num_tiles = row_tiles
    flat_words = tl.multiple_of(flat_words, 4)
    if FLAT:
        num_tiles += tl.cdiv(flat_words, SIZE)
    num_places = tl.cdiv(num_tiles - program, tl.num_programs(0))  # tiles of this program
    call = tl.load(calls_ptr + program) + 1
    slot = (program * 2 + (call & 1)) * COUNT
    flat_S = tl.arange(0, SIZE)
    for place in range(num_places):
        tile = program + place * tl.num_programs(0)
        if tile < row_tiles:
            row_RC, column_RC, inside_RC, word_RC = _tile(tile, num_rows, WIDEST, ROWS, COLUMNS)
            inside_RC = inside_RC & (column_RC < WIDTH)
            own_RC = tl.load(x_ptr + row_RC * WIDTH + column_RC, mask=inside_RC, other=0)
            tl.store(out_ptr + row_RC * TOTAL + STARTS[RANK] + column_RC, own_RC, mask=inside_RC)
            for peer in tl.static_range(COUNT):
                if peer != RANK:
                    theirs = tl.multiple_of(tl.load(inbox_ptrs + peer).to(tl.pointer_type(tl.int32)), 16)
                    at = ((slot + RANK) * TILES + place).to(tl.int64) * SIZE
                    tl.store(theirs + at + word_RC, own_RC, mask=inside_RC)
        elif FLAT:
            word_S = (tile - row_tiles) * SIZE + flat_S
            inside_S = word_S < flat_words
            own_S = tl.load(flat_ptr + word_S, mask=inside_S, other=0)
            tl.store(out_flat_ptr + RANK * flat_words + word_S, own_S, mask=inside_S)
            for peer in tl.static_range(COUNT):
                if peer != RANK:
                    theirs = tl.multiple_of(tl.load(inbox_ptrs + peer).to(tl.pointer_type(tl.int32)), 16)
                    at = ((slot + RANK) * TILES + place).to(tl.int64) * SIZE
                    tl.store(theirs + at + flat_S, own_S, mask=inside_S)

    tl.debug_barrier()  # all words of this program are written before its flags
    missing = 0
    for peer in tl.static_range(COUNT):
        if peer != RANK:
            their_flags = tl.load(flags_ptrs + peer).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(their_flags + program * COUNT + RANK, call, sem="release", scope="sys")
    for peer in tl.static_range(COUNT):
        if peer != RANK:
            own_flag = flag_ptr + program * COUNT + peer
            behind = tl.atomic_add(own_flag, 0, sem="acquire", scope="sys") - call
            looked = 0
            while (behind < 0) & (looked < polls):
                behind = tl.atomic_add(own_flag, 0, sem="acquire", scope="sys") - call
                looked += 1
            missing += tl.where((behind < 0) | (behind > 1), 1, 0)  # a peer two calls ahead has written over its words
    if missing > 0:
        tl.atomic_xchg(late_ptr, 1, sem="relaxed")
    tl.debug_barrier()

    for place in range(num_places):
        tile = program + place * tl.num_programs(0)
        if tile < row_tiles:
            row_RC, column_RC, within_RC, word_RC = _tile(tile, num_rows, WIDEST, ROWS, COLUMNS)
            for peer in tl.static_range(COUNT):
                if peer != RANK:
                    inside_RC = within_RC & (column_RC < STARTS[peer + 1] - STARTS[peer])
                    at = ((slot + peer) * TILES + place).to(tl.int64) * SIZE
                    came_RC = tl.load(inbox_ptr + at + word_RC, mask=inside_RC, other=0, cache_modifier=".cg")
                    came_RC = tl.where(missing > 0, -1, came_RC)
                    tl.store(out_ptr + row_RC * TOTAL + STARTS[peer] + column_RC, came_RC, mask=inside_RC)
        elif FLAT:
            word_S = (tile - row_tiles) * SIZE + flat_S
            inside_S = word_S < flat_words
            for peer in tl.static_range(COUNT):
                if peer != RANK:
                    at = ((slot + peer) * TILES + place).to(tl.int64) * SIZE
                    came_S = tl.load(inbox_ptr + at + flat_S, mask=inside_S, other=0, cache_modifier=".cg")
                    came_S = tl.where(missing > 0, -1, came_S)
                    tl.store(out_flat_ptr + peer * flat_words + word_S, came_S, mask=inside_S)
    tl.store(calls_ptr + program, call)


def gather_from_peers(
    memory: PeerMemory, x_MW: Tensor, starts: tuple[int, ...] | None = None, flat_F: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The columns of all workers, [M, C] of x's dtype, and their flat tensors, [R F] (empty without `flat_F`). Behind
    the M rows there is memory for a multiple of four, as `empty_rows` of quantize_activation.py has it.

    x_MW: contiguous, on this worker's GPU; a row has a whole number of 4-byte words. `starts`: the first column of each
    worker, and C, in elements; None: all workers have as many. flat_F: contiguous, of a 4-byte dtype, a multiple of
    four elements. Every worker calls it in the same order, with the same shapes. No gradient.
    """
    per_word, width = 4 // x_MW.element_size(), x_MW.shape[1]
    starts = tuple(width * rank for rank in range(memory.count + 1)) if starts is None else starts
    assert len(starts) == memory.count + 1 and starts[memory.rank + 1] - starts[memory.rank] == width, "another part"
    assert x_MW.is_contiguous() and all(start % per_word == 0 for start in starts), "rows are no whole words"
    assert x_MW.shape[0] or flat_F is None or not flat_F.numel(), "flat words travel with rows"
    assert flat_F is None or (flat_F.is_contiguous() and flat_F.element_size() == 4 and flat_F.numel() % 4 == 0), "flat"
    rows = x_MW.shape[0]
    out_MC = x_MW.new_empty(-(-rows // 4) * 4, starts[-1])[:rows]
    words = tuple(start // per_word for start in starts)
    flat_words = 0 if flat_F is None else flat_F.numel()
    out_flat = x_MW.new_empty(0) if flat_F is None else flat_F.new_empty(memory.count * flat_words)
    x_words, out_words = _words_of(x_MW), _words_of(out_MC)
    at_once = rows_of_a_call(max(right - left for left, right in pairwise(words)), flat_words)
    for first in range(0, rows, at_once):
        some = slice(first, first + at_once)
        _launch(memory, x_words[some], out_words[some], words, flat_F, out_flat)
        flat_F = None  # it travels with the first rows
    return out_MC, out_flat


def rows_of_a_call(widest: int, flat_words: int = 0) -> int:
    """How many rows of at most `widest` words one call gathers, beside `flat_words`."""
    rows, columns = _shape_of_tile(widest)
    room = PROGRAMS * TILES - triton.cdiv(flat_words, rows * columns)
    found = room // triton.cdiv(widest, columns) * rows
    assert found > 0, f"{widest} words of a row and {flat_words} flat ones do not fit into an inbox"
    return found


def _shape_of_tile(widest: int) -> tuple[int, int]:
    columns = min(TILE, triton.next_power_of_2(max(widest, 1)))
    return TILE // columns, columns


def _words_of(values: Tensor) -> Tensor:
    return values.view(torch.uint8).view(torch.int32)


def _launch(
    memory: PeerMemory,
    x_MW: Tensor,
    out_MC: Tensor,
    starts: tuple[int, ...],
    flat_F: Tensor | None,
    out_flat: Tensor,
) -> None:
    widest = max(right - left for left, right in pairwise(starts))
    rows, columns = _shape_of_tile(widest)
    flat_words = 0 if flat_F is None else flat_F.numel()
    tiles = triton.cdiv(x_MW.shape[0], rows) * triton.cdiv(widest, columns) + triton.cdiv(flat_words, TILE)
    flat = x_MW if flat_F is None else flat_F.view(-1).view(torch.int32)
    out_flat = out_MC if flat_F is None else out_flat.view(torch.int32)
    options = {"enable_fp_fusion": False} if x_MW.is_cuda else {}
    _gather_from_peers_kernel[(min(tiles, PROGRAMS),)](
        x_MW, flat, out_MC, out_flat, memory.inbox_P, memory.flags_P, memory.inbox, memory.flags, memory.calls,
        memory.late, x_MW.shape[0], flat_words, memory.polls,
        STARTS=starts, RANK=memory.rank, COUNT=memory.count, WIDEST=widest, FLAT=flat_words > 0,
        ROWS=rows, COLUMNS=columns, TILES=TILES, num_warps=WARPS, **options,
    )  # fmt: skip


def gather_from_peers_reference(parts: list[Tensor], flats: list[Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """The same from the tensors of all workers, in the order of ranks."""
    whole_MC = torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(parts[0].dtype)
    return whole_MC, torch.cat(flats) if flats else parts[0].new_empty(0)
