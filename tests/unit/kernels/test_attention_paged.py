"""Decode and chunked prefill against plain softmax attention over what the cache returns, in every KV mode.

That their bits are the packed forward's is for test_attention_parity; the Triton kernels are for test_attention_triton.
"""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.kernels.attention import attention_reference
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.attention.decode_layout import KeySplit
from octetrl.kernels.attention.kv_store import by_key
from octetrl.kernels.attention.records import CachedPages
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from tests.unit.kernels.attention_cases import CACHES, PagedCache, cu_seqlens_of, random_qkv

SCALE = 0.2
LENGTHS = [5, 140, 33]
CHUNKS = [1, 9, 33]  # the last queries of each sequence


@pytest.fixture(autouse=True)
def short_chunks(monkeypatch):
    """One tile a chunk, so that short sequences have several chunks."""
    monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)


def as_the_cache_gives_it(table, cached, pages, length):
    """K or V [length, K, D] of one sequence in float64, dequantised."""
    value = table.double()
    if cached.token_scale is not None:
        value = value * cached.token_scale[..., None]
    elif table.element_size() == 1:
        value = value * cached.scale[:, None, None]
    return value[pages].transpose(1, 2).flatten(0, 1)[:length]


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize(("group", "page_size"), [(1, 128), (3, 16)])
def test_values(kv_mode, quantized, group, page_size):
    q, k, v = random_qkv(LENGTHS, 2, group, 32, torch.bfloat16)
    cache = PagedCache.filled(LENGTHS, k, v, kv_mode, quantized, page_size)
    rows = torch.cat([part[-count:] for part, count in zip(q.split(LENGTHS), CHUNKS, strict=True)])
    contexts = torch.tensor(LENGTHS, dtype=torch.int32)
    tables = (cache.k, cache.v, cache.block_table)
    out = attention_paged(rows, *tables, cu_seqlens_of(CHUNKS), contexts, SCALE)

    for sequence, (queries, got) in enumerate(zip(rows.split(CHUNKS), out.split(CHUNKS), strict=True)):
        length, count = LENGTHS[sequence], CHUNKS[sequence]
        pages = cache.block_table[sequence].long()
        k_seen = as_the_cache_gives_it(cache.k.pages, cache.k, pages, length)
        v_seen = as_the_cache_gives_it(by_key(cache.v.pages), cache.v, pages, length)
        k_seen, v_seen = (x.repeat_interleave(group, 1) for x in (k_seen, v_seen))
        scores = torch.einsum("qhd,shd->hqs", queries.double(), k_seen) * SCALE
        unseen = torch.ones(count, length).triu(length - count + 1).bool()
        want = torch.einsum("hqs,shd->qhd", scores.masked_fill(unseen, -torch.inf).softmax(-1), v_seen)
        assert (got.double() - want).norm() / want.norm() < 5e-3  # BF16: of P, where V is BF16 or dynamic, and of out


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("chunks", [[1, 1, 1], [2, 1, 30]])
def test_a_quantised_output_is_the_quantised_output(chunks, power_of_two):
    q, k, v = random_qkv(LENGTHS, 2, 2, 128, torch.bfloat16)
    cache = PagedCache.filled(LENGTHS, k, v, "calibrated")
    rows = torch.cat([part[-count:] for part, count in zip(q.split(LENGTHS), chunks, strict=True)])
    contexts = torch.tensor(LENGTHS, dtype=torch.int32)
    arguments = (rows, cache.k, cache.v, cache.block_table, cu_seqlens_of(chunks), contexts, SCALE)
    want = quantize_activation(attention_paged(*arguments).flatten(1), power_of_two)
    got = attention_paged(*arguments, quantize_out=True, power_of_two=power_of_two)
    assert torch.equal(got.codes.view(torch.uint8), want.codes.view(torch.uint8))
    assert torch.equal(got.scale, want.scale) and got.scale.shape == (len(rows), 4)


def test_an_fp8_cache_without_scales_is_refused():
    q, k, v = random_qkv([4], 1, 1, 16, torch.bfloat16)
    cache = PagedCache.filled([4], k, v, "calibrated", "v", 16)
    without = CachedPages(cache.v.pages)
    contexts = torch.tensor([4], dtype=torch.int32)
    with pytest.raises(ValueError, match="needs either per-head scales"):
        attention_paged(q, cache.k, without, cache.block_table, cu_seqlens_of([4]), contexts, SCALE)


@pytest.mark.parametrize(
    ("dtype", "sequences", "pages", "want"),
    [
        (E4M3, 1, 128, KeySplit(16, 16)),  # one sequence of 16,384: a chunk a program
        (E4M3, 48, 128, KeySplit(16, 33)),  # 264 programs on 132 multiprocessors
        (E4M3, 50, 128, None),  # enough sequences
        (E4M3, 8, 8, None),  # one chunk each
        (torch.bfloat16, 4, 128, KeySplit(16, 50)),
        (torch.bfloat16, 8, 128, None),
        (E4M3, 40, 1024, None),  # the chunks' outputs would take 84 MB
    ],
)
def test_the_keys_of_a_few_sequences_are_split(dtype, sequences, pages, want):
    cache = torch.empty(1, 8, 128, 128, dtype=dtype, device="meta")
    assert KeySplit.chosen(torch.empty(sequences, 32, 128, device="meta"), cache, cache, pages) == want
