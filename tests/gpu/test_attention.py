"""Attention on a Hopper GPU: close to the references, equal bits in all three kernels, right gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention import attention_packed as packed
from octetrl.kernels.attention.attention_order import KV_CHUNK
from octetrl.kernels.attention.attention_paged import attention_paged, attention_paged_reference
from octetrl.kernels.attention.attention_rows import attention_rows
from octetrl.kernels.attention.kv_store import (
    by_key,
    kv_replay,
    kv_replay_reference,
    kv_store,
    kv_store_reference,
)
from octetrl.kernels.attention.records import CachedPages, Replay
from octetrl.kernels.gluon import gave_up
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from tests.gpu.compare import differing
from tests.unit.kernels.attention_cases import CACHES, PagedCache, cu_seqlens_of, random_qkv, replay_of

pytestmark = pytest.mark.gpu

SCALE = 0.09
BOTH, ONE_SIDED = ([cache.values for cache in CACHES if (cache.values[1] == "both") == both] for both in (True, False))


def crossed(*shapes, one_sided):
    """Every shape with every cache whose K and V have one format, and `one_sided` shapes with the others too: kernels
    are compiled for each of these, which takes most of the time."""
    cases = [(*cache, *shape) for shape in shapes for cache in BOTH]
    return cases + [(*cache, *shape) for shape in one_sided for cache in ONE_SIDED]


def on_cpu(cached):
    return CachedPages(*(None if x is None else x.cpu() for x in (cached.pages, cached.scale, cached.token_scale)))


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize(("head_size", "page_size"), [(32, 16), (128, 128), (256, 32)])
def test_kv_store_writes_the_reference_bytes(kv_mode, quantized, head_size, page_size):
    lengths = [1, 63, 300]
    _, k, v = random_qkv(lengths, 4, 1, head_size, torch.bfloat16)
    replay = replay_of(k, v, kv_mode, quantized)
    pages = (lengths, 4, head_size, page_size, kv_mode, torch.bfloat16)
    want = PagedCache(*pages, replay.k_scale_K, replay.v_scale_K, quantized=quantized)
    counter = torch.zeros(2, 4, dtype=torch.int64)
    kv_store_reference(k, v, want.k, want.v, want.slots(lengths), counter)

    k_gpu, v_gpu = k.cuda(), v.cuda()
    scales = [None if scale is None else scale.cuda() for scale in replay[1:3]]
    got = PagedCache(*pages, *scales, "cuda", quantized)
    counter_gpu = torch.zeros(2, 4, dtype=torch.int64, device="cuda")
    kv_store(k_gpu, v_gpu, got.k, got.v, got.slots(lengths), counter_gpu)
    for ours, theirs in ((got.k, want.k), (got.v, want.v)):
        assert (ours.token_scale is None) == (theirs.token_scale is None)
        assert not differing(*([x for x in (one.pages, one.token_scale) if x is not None] for one in (ours, theirs)))
    assert torch.equal(counter_gpu.cpu(), counter)
    if kv_mode != "none":
        replayed = kv_replay(k_gpu, v_gpu, Replay(kv_mode, *scales, quantized))
        expected = kv_replay_reference(k, v, replay)
        assert torch.equal(replayed.k_TKD.cpu(), expected.k_TKD) and torch.equal(replayed.v_TKD.cpu(), expected.v_TKD)


@pytest.mark.parametrize(
    ("kv_mode", "quantized", "head_size", "page_size", "group"),
    crossed((32, 16, 2), (64, 128, 1), (128, 32, 8), (256, 128, 4), one_sided=[(32, 16, 2), (128, 32, 8)]),
)
def test_close_to_the_reference(kv_mode, quantized, head_size, page_size, group):
    lengths = [1, 127, 128, 129, 300]
    q, k, v = random_qkv(lengths, 2, group, head_size, torch.bfloat16, device="cuda")
    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, page_size)
    cu_seqlens = cu_seqlens_of(lengths, "cuda")
    contexts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    tables = (cache.k, cache.v, cache.block_table)
    out = attention_paged(q, *tables, cu_seqlens, contexts, SCALE, max_query_len=300)
    q, table, cu_seqlens, contexts = (x.cpu() for x in (q, cache.block_table, cu_seqlens, contexts))
    want = attention_paged_reference(q, on_cpu(cache.k), on_cpu(cache.v), table, cu_seqlens, contexts, SCALE)
    assert relative_error(out, want) < 1e-2


@pytest.mark.parametrize(
    ("kv_mode", "quantized", "head_size", "page_size", "group"),
    crossed(
        *((64, 16, 4), (64, 128, 2), (128, 128, 4), (128, 16, 2), (128, 128, 7), (256, 128, 2), (256, 16, 4)),
        one_sided=[(64, 16, 4), (128, 128, 7)],
    ),
)
def test_packed_prefill_and_decode_have_equal_bits(kv_mode, quantized, head_size, page_size, group):
    lengths = [1, 127, 128, KV_CHUNK + 1, 1000, 4096]
    q, k, v = random_qkv(lengths, 2, group, head_size, torch.bfloat16, device="cuda")
    replay = replay_of(k, v, kv_mode, quantized)
    cu_seqlens = cu_seqlens_of(lengths, "cuda")
    out = packed.attention_packed(q, k, v, cu_seqlens, 4096, SCALE, replay)
    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, page_size)
    contexts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    tables = (cache.k, cache.v, cache.block_table)
    whole = attention_paged(q, *tables, cu_seqlens, contexts, SCALE, max_query_len=4096)
    assert torch.equal(whole, out)
    replayed = kv_replay(k, v, replay)
    _, lse2 = packed.attention_packed_forward_triton(q.contiguous(), replayed, cu_seqlens, 4096, SCALE)
    ends = cu_seqlens.tolist()
    for start, end in (ends[1:3], ends[3:5], ends[5:]):  # one sequence alone: the log-sum-exp of its rows
        few = type(replayed)(*(x if x is None or x.dim() < 2 else x[start:end] for x in replayed))
        alone = packed.attention_packed_forward_triton(
            q[start:end].contiguous(), few, cu_seqlens_of([end - start], "cuda"), end - start, SCALE
        )
        assert torch.equal(alone[0], out[start:end]) and torch.equal(alone[1], lse2[start:end])

    for counts in ([1, 1, 100, 77, 333, 130], [1, 127, 1, 2, 999, 1025]):  # the last queries of each, as one chunk
        rows = torch.cat([torch.arange(e - n, e) for n, e in zip(counts, cu_seqlens.tolist()[1:], strict=True)]).cuda()
        chunk = attention_paged(q[rows], *tables, cu_seqlens_of(counts, "cuda"), contexts, SCALE)
        assert torch.equal(chunk, out[rows])

    generator = torch.Generator().manual_seed(3)
    sequence = torch.randint(0, len(lengths), (512,), generator=generator)
    position = (torch.rand(512, generator=generator) * torch.tensor(lengths)[sequence]).long()
    rows = (cu_seqlens.cpu().long()[sequence] + position).cuda()
    rows[:6] = cu_seqlens[1:] - 1
    sequence[:6], position[:6] = torch.arange(6), torch.tensor(lengths) - 1
    for batch in (512, 30, 3):  # in the first every program takes a sequence, in the others the keys are split
        for first in range(0, 120 if batch < 512 else 512, batch):
            part = slice(first, first + batch)
            decoded = attention_paged(
                q[rows[part]],
                cache.k,
                cache.v,
                cache.block_table[sequence[part].cuda()],
                torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
                (position[part] + 1).to(torch.int32).cuda(),
                SCALE,
                max_query_len=1,
            )
            assert torch.equal(decoded, out[rows[part]])


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
def test_gluon_and_triton_have_equal_bits(kv_mode, quantized):
    """Of whole sequences, packed and in pages, of chunks, and beside a sequence that is not finite."""
    lengths = [1, 127, 128, KV_CHUNK + 1, 130, 3 * KV_CHUNK]
    q, k, v = random_qkv(lengths, 2, 4, 128, torch.bfloat16, device="cuda")
    cu_seqlens = cu_seqlens_of(lengths, "cuda")
    replayed = kv_replay(k, v, replay_of(k, v, kv_mode, quantized))
    shape = (cu_seqlens, 3 * KV_CHUNK, SCALE, replayed.k_scale, replayed.v_scale)
    ways = [attention_rows(q, replayed.k_TKD, replayed.v_TKD, *shape, gluon=gluon) for gluon in (False, True)]
    assert torch.equal(ways[0][0], ways[1][0]) and torch.equal(ways[0][1], ways[1][1])
    last = int(cu_seqlens[-2])
    not_finite = replayed.v_TKD.clone()  # without a cache's format it is v itself
    not_finite[last:] = float("nan")
    beside, _ = attention_rows(q, replayed.k_TKD, not_finite, *shape)
    assert torch.equal(beside[:last], ways[0][0][:last])

    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, 128)
    contexts = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    scales = [cache.k.scale_in_use, cache.v.scale_in_use]
    for counts in (lengths, [1, 127, 1, 2, 99, 1025]):  # the last queries of each
        rows = torch.cat([torch.arange(e - n, e) for n, e in zip(counts, cu_seqlens.tolist()[1:], strict=True)]).cuda()
        pages = (cache.k.pages, by_key(cache.v.pages), cu_seqlens_of(counts, "cuda"), max(counts), SCALE, *scales)
        for gluon in (False, True):
            out, _ = attention_rows(q[rows], *pages, cache.block_table, contexts, gluon=gluon)
            assert torch.equal(out, ways[0][0][rows])
    assert not gave_up("attention_rows_gluon")


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize(("longest", "page_size"), [(1, 128), (1, 32), (4, 128)])
def test_a_quantised_output_has_the_quantisers_bytes(kv_mode, quantized, longest, page_size):
    lengths = [1, 127, 3 * KV_CHUNK - 7, 128]
    q, k, v = random_qkv(lengths, 2, 4, 128, torch.bfloat16, device="cuda")
    cache = PagedCache.filled(lengths, k, v, kv_mode, quantized, page_size)
    table = torch.cat([cache.block_table, torch.full_like(cache.block_table[:1], -1)])  # and a padding sequence
    contexts = torch.tensor([*lengths, 0], dtype=torch.int32, device="cuda")
    counts = [1, longest, longest, 1, 1]
    arguments = (q[: sum(counts)], cache.k, cache.v, table, cu_seqlens_of(counts, "cuda"), contexts, SCALE)
    out = attention_paged(*arguments, max_query_len=longest)
    for power_of_two in (False, True):
        want = quantize_activation(out.flatten(1), power_of_two)
        got = attention_paged(*arguments, max_query_len=longest, quantize_out=True, power_of_two=power_of_two)
        assert not differing(got, want) and got.scale.stride(0) == 1
        assert got.codes[-1].view(torch.uint8).count_nonzero() == 0 and (got.scale[-1] == 1).all()


@pytest.mark.parametrize(
    ("kv_mode", "quantized", "head_size", "group"),
    crossed((32, 2), (64, 1), (128, 4), (256, 2), one_sided=[(64, 1), (128, 4)]),
)
def test_gradients(kv_mode, quantized, head_size, group):
    lengths = [1, 127, 129, 500]
    inputs = [
        x.contiguous().requires_grad_() for x in random_qkv(lengths, 2, group, head_size, torch.bfloat16, device="cuda")
    ]
    q, k, v = inputs
    replay = replay_of(k.detach(), v.detach(), kv_mode, quantized)
    replayed = kv_replay(k.detach(), v.detach(), replay)
    values = []
    for x, codes, scale in ((k, replayed.k_TKD, replayed.k_scale), (v, replayed.v_TKD, replayed.v_scale)):
        seen = codes.float() if scale is None else codes.float() * scale[..., None]
        values.append(x.float() + (seen - x.float()).detach())
    wants = []
    for q_s, k_s, v_s in zip(q.float().split(lengths), *(x.split(lengths) for x in values), strict=True):
        heads = [q_s.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(group, 0) for x in (k_s, v_s))]
        wants.append(F.scaled_dot_product_attention(*heads, is_causal=True, scale=SCALE).transpose(0, 1))
    want = torch.cat(wants)
    out = packed.attention_packed(q, k, v, cu_seqlens_of(lengths, "cuda"), 500, SCALE, replay)
    assert relative_error(out, want) < 1e-2
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(want, inputs, dout.float())
    got = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    for g, e in zip(got, expected, strict=True):
        assert relative_error(g, e) < 1e-2
    for g, again in zip(got, torch.autograd.grad(out, inputs, dout), strict=True):
        assert torch.equal(g, again)


def test_a_padding_sequence_gives_zeros():
    q, k, v = random_qkv([8], 2, 4, 128, torch.bfloat16, device="cuda")
    cache = PagedCache.filled([8], k, v, "calibrated", page_size=16)
    table = torch.cat([cache.block_table, torch.full_like(cache.block_table, -1)])
    contexts = torch.tensor([8, 0], dtype=torch.int32, device="cuda")
    cu_seqlens = cu_seqlens_of([1, 1], "cuda")
    for longest in (1, 2):
        out = attention_paged(q[:2], cache.k, cache.v, table, cu_seqlens, contexts, SCALE, max_query_len=longest)
        assert out[0].isfinite().all() and out[0].any() and not out[1].any()
