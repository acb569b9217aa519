"""gpt-oss on a GPU: sinks in all attention kernels, ragged experts with biases, the clamped gate, and whole models."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch import Tensor

from octetrl.config.schema import LoraConfig
from octetrl.fp8.quantize import Quantized
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.attention_order import KV_CHUNK
from octetrl.kernels.attention.attention_packed import attention_packed
from octetrl.kernels.attention.attention_paged import attention_paged
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.gemm.grouped_bf16_gemm import grouped_bf16_gemm, grouped_bias_gradient
from octetrl.kernels.gemm.grouped_fp8_gemm import FEW, FP8_MANY, MANY, SOME, grouped_fp8_gemm, grouped_fp8_gemm_triton
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.kernels.rows.add_rms_norm import add_rms_norm, add_rms_norm_both
from octetrl.kernels.rows.clamped_glu import (
    clamped_glu,
    clamped_glu_backward,
    clamped_glu_backward_reference,
    clamped_glu_quantize,
    clamped_glu_reference,
)
from octetrl.kernels.rows.combine_experts import ExpertSum, combine_experts
from octetrl.kernels.rows.gather_codes import gather_codes
from octetrl.kernels.rows.sort_and_gather import sort_and_gather
from octetrl.kernels.rows.sort_by_expert import sort_by_expert
from octetrl.layers.stacked import Float8StackedLinear, group_rows
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.moe.layout import GptOssMixtureLayout, Routing
from octetrl.shapes.blocks import LayerBlocks
from tests.gpu.compare import differing
from tests.gpu.test_moe import LOADS, WIDE, first_rows, random_matrix
from tests.gpu.test_rollout_forward import ordered_modules
from tests.parity import sides as parity
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.parity.sides import Pages, Sides, random_chunks, random_requests, random_sequences, random_tokens
from tests.parity.situations import check_some_situations
from tests.unit.kernels.attention_cases import PagedCache, cu_seqlens_of, random_qkv, replay_of

pytestmark = pytest.mark.gpu
SCALE, LENGTHS = 0.125, [1, 127, 128, KV_CHUNK + 1, 1000, 3000]
CACHES = [("none", "both"), ("calibrated", "v"), ("dynamic", "v")]  # K stays BF16 in this family
EXPERTS, N, K = 16, 2880, 2880
LAYERS = tuple(
    LayerBlocks(AttentionLayout(window, sinks=True), GptOssMixtureLayout(Routing(32, 4, "softmax", True), 240))
    for window in (128, None)
)
SPEC = replace(WIDE, family="gpt_oss", hidden_size=576, qk_norm=False, qkv_bias=True, o_bias=True, blocks=LAYERS)


@pytest.mark.parametrize(("kv_mode", "quantized"), CACHES)
@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize(("page_size", "group"), [(128, 8), (16, 2)])
def test_packed_prefill_and_decode_with_sinks_have_equal_bits(kv_mode, quantized, window, page_size, group):
    q, k, v = random_qkv(LENGTHS, 2, group, 64, torch.bfloat16, device="cuda")
    how = {"window": window, "sinks_H": torch.linspace(-3, 9, 2 * group, device="cuda").bfloat16()}
    cu_seqlens = cu_seqlens_of(LENGTHS, "cuda")
    out = attention_packed(q, k, v, cu_seqlens, 3000, SCALE, replay_of(k, v, kv_mode, quantized), **how)
    without = attention_packed(q, k, v, cu_seqlens, 3000, SCALE, replay_of(k, v, kv_mode, quantized), window)
    assert not torch.equal(out, without)
    cache = PagedCache.filled(LENGTHS, k, v, kv_mode, quantized, page_size)
    contexts = torch.tensor(LENGTHS, dtype=torch.int32, device="cuda")
    tables = (cache.k, cache.v, cache.block_table)
    assert torch.equal(attention_paged(q, *tables, cu_seqlens, contexts, SCALE, 3000, **how), out)
    counts = [1, 1, 100, 77, 333, 130]  # the last queries of each, as one chunk
    rows = torch.cat([torch.arange(e - n, e) for n, e in zip(counts, cu_seqlens.tolist()[1:], strict=True)]).cuda()
    chunk = attention_paged(q[rows], *tables, cu_seqlens_of(counts, "cuda"), contexts, SCALE, **how)
    assert torch.equal(chunk, out[rows])

    generator = torch.Generator().manual_seed(3)
    sequence = torch.randint(0, len(LENGTHS), (512,), generator=generator)
    position = (torch.rand(512, generator=generator) * torch.tensor(LENGTHS)[sequence]).long()
    rows = (cu_seqlens.cpu().long()[sequence] + position).cuda()
    for batch in (512, 30, 3):  # in the first every program takes a sequence, in the others the keys are split
        part = slice(0, batch)
        table = cache.block_table[sequence[part].cuda()]
        each = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
        lengths = (position[part] + 1).to(torch.int32).cuda()
        decoded = attention_paged(q[rows[part]], cache.k, cache.v, table, each, lengths, SCALE, 1, **how)
        assert torch.equal(decoded, out[rows[part]]), batch


@pytest.mark.parametrize("window", [None, 128])
def test_gradients_with_sinks_are_the_references_and_repeat(window):
    lengths = [300, 1, 1500]
    q, k, v = random_qkv(lengths, 2, 8, 64, torch.bfloat16)
    inputs = [x.contiguous() for x in (q, k, v, torch.linspace(-2, 4, 16).bfloat16())]
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    found = []
    for device in ("cpu", "cuda", "cuda"):
        leaves = [x.to(device).requires_grad_() for x in inputs]
        cu_seqlens = cu_seqlens_of(lengths, device)
        out = attention_packed(*leaves[:3], cu_seqlens, 1500, SCALE, window=window, sinks_H=leaves[3])
        found.append([out, *torch.autograd.grad(out, leaves, dout.to(device))])
    for want, got, again in zip(*found, strict=True):
        assert relative_error(got, want) < 1e-2 and torch.equal(got, again)


def ragged_weight(seed: int) -> Quantized:
    """Of experts of 2,880 x 2,880, whose blocks begin at their first rows."""
    linear = Float8StackedLinear(K, N, EXPERTS, device="cuda", backend="scaled_mm", power_of_two=True)
    assert linear.weight is not None
    linear.weight.data.copy_(random_matrix(EXPERTS * N, K, seed))
    linear.codes_transposed = torch.empty(K, EXPERTS * N, dtype=linear.codes.dtype, device="cuda")
    linear.requantize()
    assert torch.equal(linear.codes_transposed.view(torch.uint8), linear.codes.view(torch.uint8).t())
    own = quantize_weight(linear.weight.detach()[N : 2 * N], True)
    assert not differing([linear.of_expert(linear.quantized, 1)], [own])
    return linear.quantized


@pytest.mark.parametrize("name", LOADS)
def test_ragged_products_have_the_bits_of_single_ones(name: str) -> None:
    load = LOADS[name]
    first_X1 = first_rows(load)
    x_PK, w8 = random_matrix(sum(load), K, 1), ragged_weight(2)
    x8, blocks = quantize_activation(x_PK, True), -(-N // 128)
    found = grouped_fp8_gemm(x8, w8, first_X1)
    for expert, (start, stop) in enumerate(pairwise([0, *accumulate(load)])):
        own = Quantized(w8.codes[expert * N : (expert + 1) * N], w8.scale[expert * blocks : (expert + 1) * blocks])
        if start < stop:
            assert torch.equal(found[start:stop], fp8_gemm(quantize_activation(x_PK[start:stop], True), own)), expert
    for tile in (FEW, SOME, MANY, FP8_MANY):
        assert torch.equal(grouped_fp8_gemm_triton(x8, w8, first_X1, tile), found), tile
    turned = Quantized(w8.codes.view(torch.uint8).t().contiguous().view(w8.codes.dtype), w8.scale.t())
    dx_PK = grouped_fp8_gemm(quantize_activation(x_PK, True), turned, first_X1, turned=True)
    for expert, (start, stop) in enumerate(pairwise([0, *accumulate(load)])):
        if start < stop:
            want = x_PK[start:stop].float() @ random_matrix(EXPERTS * N, K, 2)[expert * N : (expert + 1) * N].float()
            assert relative_error(dx_PK[start:stop], want) < 5e-2, expert


@pytest.mark.parametrize("tokens", [1, 60, 500, 4000])
def test_biases_are_added_before_the_rounding_with_owners_too(tokens: int) -> None:
    expert_TS = torch.rand(tokens, EXPERTS, device="cuda").topk(4).indices.sort(1).values
    groups, bias_N = group_rows(expert_TS, EXPERTS), 3 * random_matrix(1, EXPERTS * N, 5)[0]
    x_PK, w_NK = random_matrix(4 * tokens, K, 1), random_matrix(EXPERTS * N, K, 2) / 50
    w8, x8 = ragged_weight(2), quantize_activation(x_PK, True)
    found = grouped_fp8_gemm(x8, w8, groups.first_X1, bias=bias_N)
    owned = grouped_fp8_gemm(x8, w8, groups.first_X1, bias=bias_N, owner_O3=groups.owner_O3)
    assert torch.equal(found, owned)
    in_bf16 = grouped_bf16_gemm(x_PK, w_NK, groups.first_X1, bias=bias_N)
    for expert, (start, stop) in enumerate(pairwise(groups.first_X1.tolist())):
        rows = slice(expert * N, (expert + 1) * N)
        sums = bf16_gemm_straight(x_PK[start:stop].contiguous(), w_NK[rows], torch.float32)
        assert torch.equal(in_bf16[start:stop], (sums + bias_N[rows].float()).bfloat16()), expert
    dbias_N = grouped_bias_gradient(in_bf16, groups.first_X1, torch.bfloat16)
    parts = in_bf16.float().split(groups.load_X.tolist())
    want_N = torch.cat([part.sum(0) for part in parts])
    torch.testing.assert_close(dbias_N.float(), want_N, rtol=1e-2, atol=0.5)


@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_rows_of_22_blocks_and_a_half_have_the_bytes_of_the_separate_ops(tokens: int) -> None:
    """Of the norm that adds up experts, and of what sorts and gathers codes."""
    rows_PE, weight_E, residual_TE = (
        random_matrix(4 * tokens, K, 1),
        random_matrix(1, K, 2)[0],
        random_matrix(tokens, K, 3),
    )
    weight_TS, row_TS = torch.rand(tokens, 4, device="cuda"), torch.randperm(4 * tokens, device="cuda").view(tokens, 4)
    delta_TE = combine_experts(rows_PE, weight_TS, row_TS, None)
    hidden_TE, values_TE = add_rms_norm(delta_TE, residual_TE.clone(), weight_E, 1e-5, quantize=False)
    codes = quantize_activation(values_TE, True)
    both = add_rms_norm_both(ExpertSum(rows_PE, weight_TS, row_TS, None), residual_TE, weight_E, 1e-5, True)
    assert not differing(both, (hidden_TE, values_TE, codes))
    expert_TS = torch.rand(tokens, 32, device="cuda").topk(4).indices.sort(1).values
    want = sort_by_expert(expert_TS, 32)
    found, gathered = sort_and_gather(expert_TS, 32, codes)
    assert not differing((*found, gathered), (*want, gather_codes(codes, want.token_P)))


@pytest.mark.parametrize("size", [2880, 240, 1024])
def test_the_clamped_gate_is_its_reference_and_its_codes_are_its_values(size: int) -> None:
    gate_up: Tensor = 5 * random_matrix(300, 2 * size, 1)
    gate_up[3, 5] = torch.nan
    y = clamped_glu(gate_up)
    torch.testing.assert_close(y, clamped_glu_reference(gate_up), rtol=1e-2, atol=1e-6, equal_nan=True)
    for power_of_two in (False, True):
        assert not differing([clamped_glu_quantize(gate_up, power_of_two)], [quantize_activation(y, power_of_two)])
    dy = random_matrix(300, size, 2)
    got, want = clamped_glu_backward(gate_up, dy), clamped_glu_backward_reference(gate_up, dy)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_the_fused_rollout_has_the_bits_of_modules_and_trainer(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, lengths = random.Random(1), [300, 1, 70]
    sides = Sides(SPEC, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), SPEC, 300)])
    sequences = random_sequences(draw, SPEC, lengths)
    chunks = [*random_chunks(draw, [length - 1 for length in lengths], (1, 16, 100))]
    chunks.append([(index, length - 1, length) for index, length in enumerate(lengths)])
    fused, trainers = Pages(sides, sequences, 64).filled(chunks), sides.packed(sequences)
    ordered_modules(monkeypatch)
    monkeypatch.setattr(parity, "can_fuse", lambda model: False)
    modules = Pages(sides, sequences, 64).filled(chunks)
    for ours, module, trainer in zip(fused, modules, trainers, strict=True):
        assert torch.equal(ours, module) and torch.equal(ours, trainer)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "fp8_full"])
def test_what_happens_in_engine_and_trainer_changes_nothing(precision: str) -> None:
    draw = random.Random(4)
    sides = Sides(SPEC, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), SPEC, 300)])
    asked = random_requests(draw, SPEC, 1, prompts=(1, 10), answers=(60, 70), siblings=(8, 8), temperature=0.9)
    asked += random_requests(draw, SPEC, 3, prompts=(1, 250), answers=(20, 40), temperature=0.9)
    check_some_situations(sides, asked)


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=8, experts=True)])
def test_twenty_steps_repeat_their_bits_and_no_step_has_a_mismatch(lora: LoraConfig | None) -> None:
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024, "lora": lora}
    runs = [short_run(SPEC, "fp8_full", "cuda", 20, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert_learned(runs[0])
