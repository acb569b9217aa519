"""Draft rows that share a program, on a Hopper GPU: every byte is that of rows alone."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.attention.attention_decode import attention_decode_triton
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.decode_layout import DecodeTile, DraftLayout
from tests.gpu.compare import captured, differing
from tests.unit.kernels.attention_cases import CACHES, DraftedRows, PagedCache, random_qkv

pytestmark = pytest.mark.gpu

SCALE = 0.09
KV_HEADS = 2
ONE_KIND = ["none", "calibrated", "dynamic", "int8"]
DRAFTED = [(1, 9), (126, 5), (0, 1), (1020, 16), (1024, 1), (2046, 4), (4090, 8), (0, 1), (0, 1)]  # keys, rows
OTHERS = [(700, 2), (1, 1), (1022, 3), (3000, 16), (90, 1), (2047, 2), (4000, 16), (5, 2), (1500, 3)]  # as many rows


class Forward:
    """Rows of a forward with drafts, over random K and V."""

    def __init__(self, drafted, kv_mode, quantized, head_size, page_size, group):
        self.rows = DraftedRows.of(drafted, "cuda")
        both = (DraftedRows.of(x).lengths for x in (DRAFTED, OTHERS))  # so that one cache serves either
        self.lengths = [max(pair) for pair in zip(*both, strict=True)]
        q, k, v = random_qkv(self.lengths, KV_HEADS, group, head_size, torch.bfloat16, device="cuda")
        self.cache = PagedCache.filled(self.lengths, k, v, kv_mode, quantized, page_size)
        self.q_NHD = q[torch.arange(len(self.rows.context_N), device="cuda") * 7 % len(q)].contiguous()
        self.table_NP = self.cache.block_table[self.rows.sequence_N]
        self.each_N1 = torch.arange(len(self.q_NHD) + 1, dtype=torch.int32, device="cuda")

    def attend(self, window=None, quantize=False, drafts=True):
        """The op, as a layer calls it."""
        cache, rows = self.cache, self.rows
        return attention_paged(
            self.q_NHD, cache.k, cache.v, self.table_NP, self.each_N1, rows.context_N, SCALE,
            max_query_len=1, quantize_out=quantize, window=window, draft_offset_B=rows.offset_N if drafts else None,
        )  # fmt: skip

    def decode(self, tile, drafts):
        """The kernel with a tile of one's own."""
        cache, rows = self.cache, self.rows
        tables = (self.q_NHD, cache.k, cache.v, self.table_NP, rows.context_N, SCALE)
        if not drafts:
            return attention_decode_triton(*tables)
        return attention_decode_triton(*tables, tile=tile, draft_offset_B=rows.offset_N)

    def layout(self, tile=None):
        pages = self.cache.k.pages, self.cache.v.pages
        return DraftLayout.chosen(self.q_NHD, *pages, self.table_NP.shape[1], tile)


def assert_equal_bytes(ours, theirs):
    assert not differing([ours], [theirs])


@pytest.mark.parametrize("kv_mode", ONE_KIND)
@pytest.mark.parametrize(
    ("head_size", "page_size", "group", "window"),
    [
        (128, 128, 4, None),
        (128, 16, 5, None),
        (128, 64, 8, 700),
        (64, 128, 2, 1500),
        (80, 32, 1, None),
        (96, 128, 3, 9),
    ],
)
def test_rows_together_have_the_bytes_of_rows_alone(kv_mode, head_size, page_size, group, window):
    forward = Forward(DRAFTED, kv_mode, "both", head_size, page_size, group)
    assert forward.layout() is not None
    for quantize in (False, True) if head_size == 128 else (False,):
        alone = forward.attend(window, quantize, drafts=False)
        for _ in range(3):
            assert_equal_bytes(forward.attend(window, quantize), alone)


@pytest.mark.parametrize("kv_mode", ONE_KIND)
@pytest.mark.parametrize(
    ("head_size", "page_size", "group", "columns"), [(192, 16, 4, 16), (256, 128, 2, 16), (128, 128, 12, 32)]
)
def test_tiles_that_are_not_chosen_have_them_too(kv_mode, head_size, page_size, group, columns):
    forward = Forward(DRAFTED, kv_mode, "both", head_size, page_size, group)
    tile = DecodeTile(columns, 1 if head_size > 128 else 2)
    assert forward.layout(tile) is not None
    assert_equal_bytes(forward.decode(tile, drafts=True), forward.decode(None, drafts=False))


@pytest.mark.parametrize(("kv_mode", "quantized"), [one for one in CACHES if one.values[1] != "both"])
def test_rows_of_other_caches_stay_alone(kv_mode, quantized):
    forward = Forward(DRAFTED, kv_mode, quantized, 128, 128, 4)
    assert forward.layout() is None
    assert_equal_bytes(forward.attend(), forward.attend(drafts=False))


@pytest.mark.parametrize("kv_mode", ONE_KIND)
def test_a_captured_graph_serves_other_rows(kv_mode):
    """Which rows are of one sequence is read on the device: the graph is replayed with other sequences and drafts."""
    forward, others = (Forward(drafted, kv_mode, "both", 128, 128, 4) for drafted in (DRAFTED, OTHERS))
    want = others.attend(drafts=False)
    forward.attend()
    graph, out = captured(forward.attend)
    graph.replay()
    assert_equal_bytes(out, forward.attend(drafts=False))
    for mine, other in (
        (forward.q_NHD, others.q_NHD),
        (forward.table_NP, others.table_NP),
        (forward.rows.context_N, others.rows.context_N),
        (forward.rows.offset_N, others.rows.offset_N),
    ):
        mine.copy_(other)
    graph.replay()
    assert_equal_bytes(out, want)
