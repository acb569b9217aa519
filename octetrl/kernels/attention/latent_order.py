"""The one order in which MLA's attention is summed, for rollout and training alike.

It is the order of `attention_order.py` with these differences:

- All heads read one latent and one rotary key of each token. A score is one sum over the latent's C elements and then
  over the R of the rotary key, into one accumulator.
- V is the latent, so a tile has one matrix in two roles. Tiles have `LATENT_TILE` keys, because the output of a row is
  four times as wide as a head's; chunks have `KV_CHUNK` keys.
- Latents are BF16 values, so there are no scales of keys. An FP8 cache's codes become values before they are multiplied
  (`latent_store.py`).
- The row sum's tree adds over bits 3 and 0 of a key's place in its tile, which has six bits. The other four bits are
  the 16 classes. In both layouts these two bits lie in registers or neighbouring lanes.

`latent_rows.py` has queries on the tensor core's long side, `latent_decode.py` keys. The CPU form is `attend_latents`
in latent_packed.py.

R query rows, C query columns, N keys of a tile, X classes, L latent elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octetrl.kernels.attention.attention_order import CLASSES, load_pages

LATENT_TILE = 64


@triton.jit
def update_latent_rows(s_RN, m_R, l_RX, o_RL, v_NL, ROWS: tl.constexpr):
    """One tile for `ROWS` queries: scaled, masked scores, and some columns of the latents; returns new m, l, o."""
    m_new_R = tl.maximum(m_R, tl.max(s_RN, 1))
    alpha_R = tl.exp2(m_R - m_new_R)
    p_RN = tl.exp2(s_RN - m_new_R[:, None])
    sums = tl.sum(tl.reshape(p_RN, [ROWS, 4, 2, 8]), 2)
    sums = tl.sum(tl.reshape(sums, [ROWS, CLASSES, 2]), 2)
    l_RX = l_RX * alpha_R[:, None] + sums
    o_RL = tl.dot(p_RN.to(v_NL.dtype), v_NL, o_RL * alpha_R[:, None])
    return m_new_R, l_RX, o_RL


@triton.jit
def update_latent_columns(s_NC, m_C, l_XC, o_LC, v_NL, COLUMNS: tl.constexpr):
    """The same transposed: keys are rows, queries columns."""
    m_new_C = tl.maximum(m_C, tl.max(s_NC, 0))
    alpha_C = tl.exp2(m_C - m_new_C)
    p_NC = tl.exp2(s_NC - m_new_C[None, :])
    sums = tl.sum(tl.reshape(p_NC, [4, 2, 8, COLUMNS]), 1)
    sums = tl.sum(tl.reshape(sums, [CLASSES, 2, COLUMNS]), 1)
    l_XC = l_XC * alpha_C[None, :] + sums
    o_LC = tl.dot(tl.trans(v_NL), p_NC.to(v_NL.dtype), o_LC * alpha_C[None, :])
    return m_new_C, l_XC, o_LC


@triton.jit
def latent_row_numbers(
    table_ptr, start, num_keys, first_key, PAGE_SIZE: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Rows of a tile's keys in the table of latents: pages one after another, or packed tokens if `PAGE_SIZE` is 0."""
    if PAGE_SIZE == 0:
        row_N = (first_key + start).to(tl.int64) + tl.arange(0, N)
    else:
        page = load_pages(table_ptr, start, num_keys, PAGE_SIZE, N)
        row_N = page.to(tl.int64) * PAGE_SIZE + (start + tl.arange(0, N)) % PAGE_SIZE
    return row_N


@triton.jit
def load_values(ptr, scale_ptr, row_N, there_N, first, SIZE: tl.constexpr, BLOCK: tl.constexpr, CODES: tl.constexpr):
    """Columns from `first` of rows [N, SIZE] of the table, as BF16 values; zeros where there is no key."""
    column_L = first + tl.arange(0, BLOCK)
    mask_NL = there_N[:, None] & (column_L < SIZE)[None, :]
    x_NL = tl.load(ptr + row_N[:, None] * SIZE + column_L[None, :], mask=mask_NL, other=0.0)
    if CODES:
        scale_N = tl.load(scale_ptr + row_N, mask=there_N, other=0.0)
        x_NL = (x_NL.to(tl.float32) * scale_N[:, None]).to(tl.bfloat16)
    return x_NL
