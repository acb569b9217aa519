"""The packed attention against plain softmax attention by autograd: values, gradients, every KV mode."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octetrl.fp8.quantize import quantize_kv, quantize_kv_per_head
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention import attention_reference
from octetrl.kernels.attention.attention_packed import attention_packed, attention_packed_forward
from octetrl.kernels.attention.records import Replay
from tests.unit.kernels.attention_cases import CACHES, cu_seqlens_of, random_qkv, scales_of

SCALE = 0.2


def plain_attention(q, k, v, lengths):
    """Float32 or float64 softmax attention, one sequence at a time."""
    outs = []
    for q_s, k_s, v_s in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
        heads = (x.transpose(0, 1) for x in (q_s, k_s, v_s))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, scale=SCALE, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


def dequantised(x, kv_mode, scale):
    """What the cache returns for x, with a straight-through gradient."""
    if kv_mode == "none":
        return x
    quantised = quantize_kv_per_head(x, scale) if kv_mode == "calibrated" else quantize_kv(x, kv_mode)
    value = quantised.codes.to(x.dtype) * quantised.scale[..., None].to(x.dtype)
    return x + (value - x).detach()


@pytest.mark.parametrize("head_size", [16, 32, 64, 80, 96, 128, 192, 256])
def test_float32_matches_plain_attention(head_size):
    lengths = [1, 127, 129, 30]
    q, k, v = (x.double() for x in random_qkv(lengths, 2, 2, head_size, torch.float32))
    out = attention_packed(q.float(), k.float(), v.float(), cu_seqlens_of(lengths), 129, SCALE)
    assert relative_error(out, plain_attention(q, k, v, lengths)) < 1e-6


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize("group", [1, 4])
def test_values_and_gradients(kv_mode, quantized, group):
    lengths = [1, 131, 33]
    inputs = [x.contiguous().requires_grad_() for x in random_qkv(lengths, 2, group, 32, torch.float32, seed=group)]
    with torch.no_grad():  # BF16 values, so that the quantisers round nothing before they quantise
        for x in inputs:
            x.copy_(x.bfloat16())
    q, k, v = inputs
    k_scale, v_scale = scales_of(k.detach(), v.detach(), kv_mode)
    k_seen = dequantised(k, kv_mode, k_scale) if quantized != "v" else k
    v_seen = dequantised(v, kv_mode, v_scale) if quantized != "k" else v
    want = plain_attention(q, k_seen, v_seen, lengths)
    dout = torch.randn_like(want)
    gradients = torch.autograd.grad(want, inputs, dout)
    replay = Replay(kv_mode, k_scale, v_scale, quantized)
    out = attention_packed(q, k, v, cu_seqlens_of(lengths), 131, SCALE, replay)
    rounding = {"none": 1e-5, "calibrated": 1e-3, "dynamic": 1e-2, "int8": 1e-2}[kv_mode]  # of P, to the operand dtype
    assert relative_error(out, want) < rounding
    for got, expected in zip(torch.autograd.grad(out, inputs, dout), gradients, strict=True):
        assert relative_error(got, expected) < rounding


@pytest.mark.parametrize("window", [1, 5, 40, 200])
def test_a_windows_values_and_gradients_are_float64s(window, monkeypatch):
    """Chunks of one tile, so that whole chunks lie outside of the window."""
    monkeypatch.setattr(attention_reference, "KV_CHUNK", 128)
    lengths, q_k_v = [1, 331, 33], random_qkv([1, 331, 33], 2, 2, 80, torch.float32)
    inputs = [x.contiguous().requires_grad_() for x in q_k_v]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    outs = []
    for q_s, k_s, v_s in zip(*(x.split(lengths) for x in exact), strict=True):
        age = torch.arange(len(q_s))[:, None] - torch.arange(len(q_s))
        heads = (x.transpose(0, 1) for x in (q_s, k_s, v_s))
        is_read = (age >= 0) & (age < window)
        out = F.scaled_dot_product_attention(*heads, attn_mask=is_read, scale=SCALE, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    want = torch.cat(outs)
    out = attention_packed(*inputs, cu_seqlens_of(lengths), 331, SCALE, window=window)
    assert relative_error(out, want) < 1e-6
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(want, exact, dout.double())
    for got, gradient in zip(torch.autograd.grad(out, inputs, dout), expected, strict=True):
        assert (got.double() - gradient).norm() < 1e-5 * dout.double().norm()


def test_bf16_stays_close_and_returns_bf16_gradients():
    lengths = [60, 61]
    inputs = [x.contiguous().requires_grad_() for x in random_qkv(lengths, 2, 2, 64, torch.bfloat16)]
    want = plain_attention(*(x.float() for x in inputs), lengths)
    out = attention_packed(*inputs, cu_seqlens_of(lengths), 61, SCALE)
    assert relative_error(out, want) < 5e-3
    dout = torch.randn_like(out)
    expected = torch.autograd.grad(want, inputs, dout.float())
    for got, e, x in zip(torch.autograd.grad(out, inputs, dout), expected, inputs, strict=True):
        assert got.dtype == x.dtype and relative_error(got, e) < 1e-2


def test_lse2_is_the_base_2_log_sum_exp():
    q, k, v = random_qkv([40], 1, 1, 32, torch.float32)
    _, lse2 = attention_packed_forward(q, k, v, cu_seqlens_of([40]), 40, SCALE)
    scores = torch.einsum("thd,skd->hts", q, k) * SCALE
    scores = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), float("-inf"))
    torch.testing.assert_close(lse2[:, 0] * 0.6931471805599453, scores[0].logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_sequences_do_not_see_one_another_and_rows_past_the_last_are_zero():
    q, k, v = random_qkv([10, 10, 4], 1, 2, 32, torch.bfloat16)
    cu_seqlens = cu_seqlens_of([10, 10])
    out = attention_packed(q, k, v, cu_seqlens, 10, SCALE)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:10] = 1.0
    assert torch.equal(attention_packed(*changed, cu_seqlens, 10, SCALE)[10:], out[10:])
    assert not out[20:].any()


def test_dynamic_scales_survive_tiny_and_huge_values():
    q, k, v = random_qkv([70], 1, 1, 32, torch.bfloat16)
    cu_seqlens = cu_seqlens_of([70])
    out = attention_packed(q, k, v, cu_seqlens, 70, SCALE, Replay("dynamic"))
    for factor in (2.0**-30, 2.0**30):
        scaled = attention_packed(q, k, v * factor, cu_seqlens, 70, SCALE, Replay("dynamic"))
        assert torch.equal(scaled, out * factor)


def test_many_short_sequences_and_one_long_one_share_a_pack():
    lengths = [7] * 20 + [300] + [9] * 20
    q, k, v = (x.contiguous() for x in random_qkv(lengths, 2, 2, 32, torch.float32))
    out = attention_packed(q, k, v, cu_seqlens_of(lengths), 300, SCALE)
    assert relative_error(out, plain_attention(q, k, v, lengths)) < 1e-5


def test_a_k_that_fp8_would_ruin_stays_whole_beside_an_fp8_v():
    """Qwen2.5's bias puts some channels of K far from zero, where E4M3's steps are wider than the keys' differences."""
    lengths = [90]
    q, k, v = random_qkv(lengths, 1, 2, 32, torch.float32)
    k = k.clone()
    k[..., :4] = 400.0 + 8.0 * k[..., :4]
    want = plain_attention(q.double(), k.double(), v.double(), lengths)
    scales = [x.abs().amax(dim=(0, 2)) / 448 for x in (k, v)]
    distances = []
    for quantized in ("both", "v"):
        out = attention_packed(q, k, v, cu_seqlens_of(lengths), 90, SCALE, Replay("calibrated", *scales, quantized))
        distances.append(relative_error(out, want))
    assert distances[0] > 0.2 and distances[1] < 0.04
