"""Which draft rows share a program. test_attention_triton.py compares their bytes with those of rows alone."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention.decode_layout import DecodeTile, DraftLayout, KeySplit


def layout(k_dtype=E4M3, v_dtype=E4M3, heads=32, head_size=128, rows=48, pages=64):
    k, v = (torch.empty(1, 8, 128, head_size, dtype=dtype, device="meta") for dtype in (k_dtype, v_dtype))
    return DraftLayout.chosen(torch.empty(rows, heads, head_size, device="meta"), k, v, pages)


def test_rows_share_the_columns_of_a_tile():
    assert layout() == DraftLayout(4, DecodeTile(16, 3), KeySplit(8, 33))
    assert layout(torch.int8, torch.int8, heads=8, pages=8) == DraftLayout(16, DecodeTile(16, 3), KeySplit(1, 33))
    bf16 = layout(torch.bfloat16, torch.bfloat16, heads=40)
    assert bf16 == DraftLayout(4, DecodeTile(32, 3), KeySplit(8, 50)), "five heads of a group in eight columns"


@pytest.mark.parametrize(
    "alone",
    [
        {"k_dtype": torch.bfloat16},  # other bits on a GPU (lab/log.md)
        {"v_dtype": torch.bfloat16},
        {"head_size": 256},  # registers would be spilled
        {"heads": 72},  # nine heads of a group: a tile of 16 columns has room for one row
        {"rows": 512, "pages": 128},  # the chunks' outputs would take 134 MB
    ],
)
def test_other_rows_read_their_keys_alone(alone):
    assert layout(**alone) is None
