"""The packed attention backward on a Hopper GPU: right, and the same from run to run."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention import attention_packed as packed
from octetrl.kernels.attention.attention_packed_backward import attention_packed_backward_triton
from octetrl.kernels.attention.kv_store import kv_replay
from tests.gpu.compare import captured
from tests.unit.kernels.attention_cases import CACHES, cu_seqlens_of, random_qkv, replay_of

pytestmark = pytest.mark.gpu

SCALE = 0.09
LENGTHS = [1, 127, 129, 700, 64, 300]
REST = 37  # rows past the last sequence


def saved_case(kv_mode="none", quantized="both", head_size=128, group=4, lengths=LENGTHS, rest=REST):
    q, k, v = random_qkv([*lengths, rest], 2, group, head_size, torch.bfloat16, device="cuda")
    kv = kv_replay(k, v, replay_of(k, v, kv_mode, quantized))
    shape = (cu_seqlens_of(lengths, "cuda"), max(lengths), SCALE)
    out, lse2 = packed.attention_packed_forward_triton(q, kv, *shape)
    return (torch.randn_like(out), q, kv, out, lse2, *shape)


def expected(dout, q, kv, _out, _lse2, _cu_seqlens, _max_seqlen, scale, lengths=LENGTHS):
    """Float32 autograd over the K and V that the forward saw."""
    codes = ((kv.k_TKD, kv.k_scale), (kv.v_TKD, kv.v_scale))
    seen = [x.float() if s is None else x.float() * s[..., None] for x, s in codes]
    inputs = [x.detach().clone().requires_grad_() for x in (q.float(), *seen)]
    used = sum(lengths)
    outs = []
    for q_s, k_s, v_s in zip(*(x[:used].split(lengths) for x in inputs), strict=True):
        heads = (x.transpose(0, 1) for x in (q_s, k_s, v_s))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=scale, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.autograd.grad(torch.cat(outs), inputs, dout[:used].float())


def assert_close(got, wants, limit=1e-2):
    used = sum(LENGTHS)
    for g, w in zip(got, wants, strict=True):
        assert g.dtype == torch.bfloat16 and g.shape == w.shape
        assert relative_error(g[:used], w[:used]) < limit
        assert not g[used:].any()


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize(("head_size", "group"), [(16, 1), (64, 2), (128, 4), (256, 2)])
def test_ours_is_right_and_repeats_its_bits(kv_mode, quantized, head_size, group):
    saved = saved_case(kv_mode, quantized, head_size, group)
    got = attention_packed_backward_triton(*saved)
    assert_close(got, expected(*saved))
    for g, again in zip(got, attention_packed_backward_triton(*saved), strict=True):
        assert torch.equal(g, again)


def test_a_sequences_gradients_do_not_depend_on_its_neighbours():
    """Not even where they are NaN: tiles reach into the next sequence."""
    dout, q, kv, out, lse2, *shape = saved_case()
    whole = attention_packed_backward_triton(dout, q, kv, out, lse2, *shape)
    end = sum(LENGTHS[:4])
    dout, q, k, v, out, lse2 = (x.clone() for x in (dout, q, kv.k_TKD, kv.v_TKD, out, lse2))
    for x in (dout, q, k, v, out, lse2):
        x[end:] = float("nan")
    got = attention_packed_backward_triton(dout, q, kv._replace(k_TKD=k, v_TKD=v), out, lse2, *shape)
    for g, w in zip(got, whole, strict=True):
        assert torch.equal(g[:end], w[:end])


def test_more_sequences_than_one_search():
    lengths = [5] * 300 + [200]
    saved = saved_case(lengths=lengths, rest=0)
    for g, w in zip(attention_packed_backward_triton(*saved), expected(*saved, lengths=lengths), strict=True):
        assert relative_error(g, w) < 1e-2


def test_it_runs_in_a_cuda_graph_with_other_lengths():
    saved = saved_case()
    cu_seqlens = saved[5]
    attention_packed_backward_triton(*saved)
    graph, got = captured(lambda: attention_packed_backward_triton(*saved))
    lengths = [600, 64, 1, 300, 229, 127]
    cu_seqlens.copy_(cu_seqlens_of(lengths, "cuda"))
    _, q, kv, out, lse2, *shape = saved
    for kept, new in zip((out, lse2), packed.attention_packed_forward_triton(q, kv, *shape), strict=True):
        kept.copy_(new)
    graph.replay()
    wants = expected(*saved, lengths=lengths)
    assert_close(got, wants)
