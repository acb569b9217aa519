"""Packed forward, chunked prefill and decode give one query row the same bits, whatever the KV cache."""

from __future__ import annotations

import random

import pytest
import torch

from octetrl.kernels.attention import attention_reference
from octetrl.kernels.attention.attention_packed import attention_packed
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.kv_store import kv_store
from octetrl.kernels.attention.records import Replay
from tests.unit.kernels.attention_cases import CACHES, PagedCache, cu_seqlens_of, random_qkv, replay_of, scales_of

BORDERS = [*range(3), *range(14, 18), *range(62, 66), *range(126, 131), *range(254, 258), 299]  # of pages, of chunks


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """One tile a chunk, so that short sequences have several chunks."""
    monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)


def run_paged(q, cache, lengths, chunks_of, window=None):
    """Feed every sequence to the engine's attention in chunks; `chunks_of(length)` cuts one sequence."""
    outs = [torch.empty_like(part) for part in q.split(lengths)]
    starts = [0] * len(lengths)
    plans = [chunks_of(length) for length in lengths]
    for step in range(max(len(plan) for plan in plans)):
        counts = [plan[step] if step < len(plan) else 0 for plan in plans]
        contexts = [start + count for start, count in zip(starts, counts, strict=True)]
        rows = [part[s:e] for part, s, e in zip(q.split(lengths), starts, contexts, strict=True)]
        out = attention_paged(
            torch.cat(rows),
            cache.k,
            cache.v,
            cache.block_table,
            cu_seqlens_of(counts),
            torch.tensor(contexts, dtype=torch.int32),
            q.shape[-1] ** -0.5,
            window=window,
        )
        for target, piece, s, e in zip(outs, out.split(counts), starts, contexts, strict=True):
            target[s:e] = piece
        starts = contexts
    return torch.cat(outs)


def decode_rows(q, cache, lengths, positions, window=None):
    """Rows of `q` at these positions of each sequence that has them, and their attention: all decoded in one batch."""
    places = [(index, at) for index, length in enumerate(lengths) for at in positions if at < length]
    sequences, contexts = torch.tensor([index for index, _ in places]), torch.tensor([at + 1 for _, at in places])
    rows = cu_seqlens_of(lengths)[sequences] + contexts - 1
    out = attention_paged(
        q[rows],
        cache.k,
        cache.v,
        cache.block_table[sequences],
        cu_seqlens_of([1] * len(places)),
        contexts.int(),
        q.shape[-1] ** -0.5,
        window=window,
    )
    return rows, out


def random_chunks(length, generator):
    chunks = []
    while sum(chunks) < length:
        chunks.append(min(generator.choice([1, 7, 16, 64, 130]), length - sum(chunks)))
    return chunks


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize(("group", "head_size", "page_size"), [(1, 64, 128), (2, 80, 16), (4, 16, 32), (8, 128, 16)])
def test_packed_prefill_and_decode_have_equal_bits(kv_mode, quantized, group, head_size, page_size):
    generator = random.Random(group)
    lengths = [1, 127, 128, 129, 300, generator.randint(2, 90)]
    q, k, v = random_qkv(lengths, kv_heads=2, group=group, head_size=head_size, dtype=torch.bfloat16)
    replay = replay_of(k, v, kv_mode, quantized)
    packed = attention_packed(q, k, v, cu_seqlens_of(lengths), 300, head_size**-0.5, replay)
    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, page_size)
    assert torch.equal(packed, run_paged(q, cache, lengths, lambda n: [n]))
    assert torch.equal(packed, run_paged(q, cache, lengths, lambda n: random_chunks(n, generator)))
    for positions in (BORDERS, [299]):
        rows, decoded = decode_rows(q, cache, lengths, positions)
        assert torch.equal(packed[rows], decoded)


@pytest.mark.parametrize("window", [1, 100, 129, 290])
@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES[:2])
def test_a_window_has_equal_bits_wherever_the_first_chunk_begins(kv_mode, quantized, window):
    lengths = [1, 128, 300, 20]
    q, k, v = random_qkv(lengths, kv_heads=2, group=2, head_size=96, dtype=torch.bfloat16)
    replay = replay_of(k, v, kv_mode, quantized)
    packed = attention_packed(q, k, v, cu_seqlens_of(lengths), 300, 96**-0.5, replay, window)
    full = attention_packed(q, k, v, cu_seqlens_of(lengths), 300, 96**-0.5, replay)
    reached = torch.cat([torch.arange(length) for length in lengths]) < window
    assert torch.equal(packed[reached], full[reached]) and not (packed == full).flatten(1).all(1)[~reached].any()
    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, 16)
    generator = random.Random(window)
    assert torch.equal(packed, run_paged(q, cache, lengths, lambda n: [n], window))
    assert torch.equal(packed, run_paged(q, cache, lengths, lambda n: random_chunks(n, generator), window))
    rows, decoded = decode_rows(q, cache, lengths, BORDERS, window)
    assert torch.equal(packed[rows], decoded)


def test_a_row_does_not_depend_on_who_else_is_in_the_batch():
    lengths = [40, 131, 77]
    q, k, v = random_qkv(lengths, kv_heads=2, group=2, head_size=32, dtype=torch.bfloat16)
    packed = attention_packed(q, k, v, cu_seqlens_of(lengths), 131, 0.2, Replay("dynamic"))
    for out, *alone in zip(*(x.split(lengths) for x in (packed, q, k, v)), strict=True):
        assert torch.equal(out, attention_packed(*alone, cu_seqlens_of([len(out)]), 131, 0.2, Replay("dynamic")))


def test_what_lies_past_the_context_is_never_read():
    q, k, v = random_qkv([20], kv_heads=2, group=2, head_size=32, dtype=torch.bfloat16)
    cache = PagedCache([20], 2, 32, 16, "calibrated", torch.bfloat16, *scales_of(k, v, "calibrated"))
    for table in (cache.k, cache.v):
        table.pages.view(torch.uint8).fill_(0x7F)  # NaN codes
    kv_store(k, v, cache.k, cache.v, cache.slots([20]))
    assert torch.isfinite(run_paged(q, cache, [20], lambda n: [5, 15])).all()


def test_padding_sequences_give_zeros():
    q, k, v = random_qkv([3], kv_heads=1, group=2, head_size=32, dtype=torch.bfloat16)
    cache = PagedCache([1], 1, 32, 16, "none", torch.bfloat16, None, None)
    kv_store(k[:1], v[:1], cache.k, cache.v, cache.slots([1]))
    table = torch.tensor([[cache.block_table[0, 0]], [-1], [-1]], dtype=torch.int32)
    contexts = torch.tensor([1, 0, 0], dtype=torch.int32)
    out = attention_paged(q, cache.k, cache.v, table, cu_seqlens_of([1, 1, 1]), contexts, 0.2)
    assert out[0].any() and not out[1:].any()
