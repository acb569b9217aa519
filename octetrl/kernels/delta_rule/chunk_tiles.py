"""Device functions that the kernels of the gated delta rule share: where a chunk lies, its operands, and the planes.

Chunks of all sequences are numbered so that no number depends on the host: chunk m of sequence b, counted from the
chunk of its state, has number cu_seqlens[b] // 64 + 2 b + m. Some numbers are not used.

Tiles are transposed: rows of a chunk are columns, so that the long side of a tensor core's product is a head's size.

J rows of a chunk, R rows of a block, K and V sizes of heads, S a slice of V.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.delta_rule.state import QUIET_NAN
from octetrl.shapes.delta_rule import CHUNK, DeltaShape

ROWS = tl.constexpr(CHUNK)
SUB = tl.constexpr(16)  # rows of a block
BLOCKS = tl.constexpr(CHUNK // 16)
NAN_BITS = tl.constexpr(QUIET_NAN)


def key_block(key_size: int) -> int:
    """Length of K in a tile: a power of two, at least the depth of one instruction."""
    return max(16, triton.next_power_of_2(key_size))


def levels(width: int) -> int:
    """Of `tree_sum`."""
    return width.bit_length() - 1


def chunk_numbers(num_tokens: int, num_sequences: int) -> int:
    """How many numbers chunks may have."""
    return num_tokens // CHUNK + 2 * num_sequences


class Chunks(NamedTuple):
    """What does not depend on the state, of each chunk and value head; of numbers that are not used: unspecified."""

    gamma: Tensor  # [N, H, J] float32
    earlier: Tensor  # [N, H, J, J]: -a, where the column belongs to an earlier block, else 0
    own: Tensor  # [N, H, blocks, R, R] float32: a within a block
    p: Tensor  # [N, H, J, J]


def empty_chunks(num_tokens: int, num_sequences: int, shape: DeltaShape, like: Tensor) -> Chunks:
    heads = chunk_numbers(num_tokens, num_sequences), shape.value_heads
    pairs = torch.empty(2, *heads, CHUNK, CHUNK, dtype=like.dtype, device=like.device)
    gamma = torch.empty(*heads, CHUNK, dtype=torch.float32, device=like.device)
    own = torch.empty(*heads, CHUNK // 16, 16, 16, dtype=torch.float32, device=like.device)
    return Chunks(gamma, pairs[0], own, pairs[1])


@triton.jit
def sequence_of(number, cu_seqlens_ptr, num_sequences):
    """The sequence whose chunk may have this number."""
    count = number * 0
    for first in range(0, num_sequences, 128):
        b = first + tl.arange(0, 128)
        start = tl.load(cu_seqlens_ptr + b, mask=b < num_sequences, other=0)
        count += tl.sum(((start // ROWS + 2 * b <= number) & (b < num_sequences)).to(tl.int32), 0)
    return count - 1


@triton.jit
def rows_of(sequence, cu_seqlens_ptr):
    start = tl.load(cu_seqlens_ptr + sequence)
    return start, tl.load(cu_seqlens_ptr + sequence + 1) - start


@triton.jit
def open_rows(sequence, slot_ptr, first_ptr, chunk_ptr, of_head, STRIDE: tl.constexpr, SLOTS: tl.constexpr):
    """slot (-1: idle), number of the state's chunk in its sequence, and how many open rows there are. A slot that does
    not have the rows before the first one has -1 of them."""
    if SLOTS:
        slot = tl.load(slot_ptr + sequence)
        first = tl.load(first_ptr + sequence)
        chunk = tl.load(chunk_ptr + slot * STRIDE + of_head, mask=(slot >= 0) & (first > 0), other=0).to(tl.int64)
        count = first - chunk * ROWS
        count = tl.where((count >= 0) & (count <= ROWS), count, -1)
        return slot, chunk, count.to(tl.int32)
    else:
        return sequence.to(tl.int64) * 0, sequence.to(tl.int64) * 0, sequence * 0


@triton.jit
def load_keys(
    x_ptr, open_ptr, token_J, offset_J, is_new_J, d_K, head, parity,
    HEADS: tl.constexpr, SIZE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Rows [J, K] of k: from the inputs, or from the open rows of one head of a slot."""
    inside_JK = is_new_J[:, None] & (d_K < SIZE)[None, :]
    x_JK = tl.load(x_ptr + (token_J * HEADS + head)[:, None] * SIZE + d_K[None, :], mask=inside_JK, other=0.0)
    if SLOTS:
        row_J = parity * ROWS + tl.arange(0, ROWS)
        is_open_JK = (offset_J < 0)[:, None] & (d_K < SIZE)[None, :]
        open_JK = tl.load(open_ptr + row_J[:, None] * SIZE + d_K[None, :], mask=is_open_JK, other=0.0)
        x_JK = tl.where(is_open_JK, open_JK, x_JK)
    return x_JK


@triton.jit
def high_plane(s):
    """float32 rounded to BF16, ties away from zero."""
    bits = tl.where(s != s, NAN_BITS, s.to(tl.int32, bitcast=True))
    return ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def low_plane(s):
    bits = tl.where(s != s, NAN_BITS, s.to(tl.int32, bitcast=True))
    return bits.to(tl.int16)


@triton.jit
def joined_planes(high, low):
    low_bits = low.to(tl.int32)
    upper = high.to(tl.int16, bitcast=True).to(tl.int32) + (low_bits >> 31)
    return ((upper << 16) | (low_bits & 0xFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def tree_sum(x_RC, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """The sum of each row, by neighbours, then by neighbouring sums, and so on: no layout can change the order."""
    for level in tl.static_range(LEVELS):
        x_RC = tl.sum(tl.reshape(x_RC, [HEIGHT, WIDTH >> (level + 1), 2]), 2)
    return tl.reshape(x_RC, [HEIGHT])


@triton.jit
def column(x_SC, c, COLUMNS: tl.constexpr):
    """Column c of a tile, exactly (a zero becomes positive)."""
    return tl.sum(tl.where(tl.arange(0, COLUMNS)[None, :] == c, x_SC, 0.0), 1)


@triton.jit
def block_of_columns(x_SJ, block, WIDTH: tl.constexpr):
    """Columns of one block of a tile [S, J], exactly: [S, R]."""
    x_SBR = tl.reshape(x_SJ, [WIDTH, BLOCKS, SUB])
    return tl.sum(tl.where(tl.arange(0, BLOCKS)[None, :, None] == block, x_SBR, 0.0), 1)


@triton.jit
def with_block(x_SJ, block_SR, block, WIDTH: tl.constexpr):
    """A tile [S, J] with the columns of one block replaced."""
    x_SBR = tl.reshape(x_SJ, [WIDTH, BLOCKS, SUB])
    x_SBR = tl.where(tl.arange(0, BLOCKS)[None, :, None] == block, block_SR[:, None, :], x_SBR)
    return tl.reshape(x_SBR, [WIDTH, ROWS])


@triton.jit
def fold(s_SK, d_SJ, k_JK, gamma_J):
    """The state after a full chunk."""
    last = tl.sum(tl.where(tl.arange(0, ROWS) == ROWS - 1, gamma_J, 0.0), 0)
    w_JK = (tl.exp(last - gamma_J)[:, None] * k_JK.to(tl.float32)).to(k_JK.dtype)
    return tl.dot(d_SJ, w_JK, tl.exp(last) * s_SK)
