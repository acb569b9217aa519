"""Mixtures of experts on a GPU: the grouped products have the bits of single ones, whatever the loads. Engine and
trainer agree to the bit, in captured graphs too, and runs repeat their bits."""

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
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_reference, bf16_gemm_straight
from octetrl.kernels.gemm.fp8_gemm import fp8_gemm
from octetrl.kernels.gemm.grouped_bf16_gemm import (
    BF16_MANY,
    NARROW_WGRAD,
    WIDE_WGRAD,
    Part,
    grouped_bf16_gemm,
    grouped_bf16_gemm_triton,
    grouped_wgrad,
    grouped_wgrad_reference,
    grouped_wgrad_triton,
)
from octetrl.kernels.gemm.grouped_fp8_gemm import FEW, FP8_MANY, MANY, SOME, grouped_fp8_gemm, grouped_fp8_gemm_triton
from octetrl.kernels.gluon import fallbacks
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.kernels.rows.add_rms_norm import add_rms_norm, add_rms_norm_both
from octetrl.kernels.rows.combine_experts import ExpertSum, combine_experts, combine_experts_reference
from octetrl.kernels.rows.combine_experts_backward import (
    combine_experts_backward,
    combine_experts_backward_reference,
)
from octetrl.kernels.rows.gather_codes import gather_codes, gather_codes_reference
from octetrl.kernels.rows.route_tokens import RoutingRule, route_tokens, route_tokens_reference
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.kernels.rows.sort_and_gather import sort_and_gather
from octetrl.kernels.rows.sort_by_expert import sort_by_expert, sort_by_expert_reference
from octetrl.layers.stacked import Float8StackedLinear, StackedLinear, group_rows
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.moe.experts import run_experts
from octetrl.models.blocks.moe.layout import GatedMixtureLayout, MixtureLayout, Routing
from octetrl.models.blocks.moe.module import gather
from octetrl.models.families import DENSE
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import ModelSpec
from tests.gpu.compare import differing
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_learned, assert_same, short_run
from tests.parity.sides import Sides, random_requests, random_tokens
from tests.parity.situations import check_situations, check_some_situations

pytestmark = pytest.mark.gpu
EXPERTS, N, K = 16, 1536, 2048  # an expert's gate and up of Qwen3-30B-A3B
LOADS = {
    "ragged": [1, 0, 2, 15, 16, 17, 64, 65, 127, 128, 129, 0, 5, 300, 1, 33],
    "one has all": [0] * 9 + [512] + [0] * 6,
    "one row": [0] * 15 + [1],
}
ROUTINGS = {
    "softmax": (128, RoutingRule(8, softmax=True, renormalise=True)),
    "sigmoid": (64, RoutingRule(6, softmax=False, renormalise=True, scale=2.446)),
    "groups": (256, RoutingRule(8, softmax=False, renormalise=True, num_groups=8, kept_groups=4, scale=2.5)),
}
SIGMOID = Routing(16, 3, "sigmoid", True, corrected=True, num_groups=4, kept_groups=2, scale=2.5)
WIDE = replace(TINY["qwen3"], hidden_size=512, intermediate_size=1152, num_heads=8, head_size=64, vocab_size=4096)
LAYERS = {
    "softmax": (LayerBlocks(AttentionLayout(), MixtureLayout(Routing(32, 4, "softmax", True), 256)),),
    "sigmoid": (*DENSE, LayerBlocks(AttentionLayout(), MixtureLayout(SIGMOID, 256, 512))),
    "gated": (
        LayerBlocks(AttentionLayout(rotated=32), GatedMixtureLayout(Routing(32, 4, "softmax", False), 256, 512)),
    ),
}
MIXTURES: dict[str, ModelSpec] = {name: replace(WIDE, blocks=blocks) for name, blocks in LAYERS.items()}


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(rows, columns, generator=generator, device="cuda").bfloat16()


def first_rows(load: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(load)], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("name", LOADS)
def test_grouped_products_have_the_bits_of_single_ones(name: str) -> None:
    load = LOADS[name]
    first_X1, bounds = first_rows(load), [0, *accumulate(load)]
    x_PK, w_NK = random_matrix(sum(load), K, 1), random_matrix(EXPERTS * N, K, 2)
    x8, w8 = quantize_activation(x_PK), quantize_weight(w_NK)
    found8, found = grouped_fp8_gemm(x8, w8, first_X1), grouped_bf16_gemm(x_PK, w_NK, first_X1)
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        w_rows, blocks = slice(expert * N, (expert + 1) * N), slice(expert * N // 128, (expert + 1) * N // 128)
        own = Quantized(w8.codes[w_rows], w8.scale[blocks])
        assert torch.equal(found8[start:stop], fp8_gemm(quantize_activation(x_PK[start:stop]), own)), expert
        assert torch.equal(found[start:stop], bf16_gemm_straight(x_PK[start:stop], w_NK[w_rows])), expert
    for tile in (FEW, SOME, MANY, FP8_MANY):
        assert torch.equal(grouped_fp8_gemm_triton(x8, w8, first_X1, tile), found8), tile
    for tile in (FEW, SOME, MANY, BF16_MANY):
        assert torch.equal(grouped_bf16_gemm_triton(x_PK, w_NK, first_X1, tile), found), tile


@pytest.mark.parametrize(
    ("tokens", "depth"), [(1, 512), (8, 512), (63, 512), (256, 512), (512, 512), (3000, 512), (5000, 512), (5000, 384)]
)
def test_tiles_with_owners_have_the_bits_of_those_that_search(tokens: int, depth: int) -> None:
    """Also if the last experts have all rows, or the first ones. From 256 rows an expert on they run in Gluon."""
    experts = 128
    w8 = quantize_weight(random_matrix(experts * 256, depth, 2))
    turned = Quantized(w8.codes.t().contiguous(), w8.scale.t())
    for liked in (0, 20, -20):
        liking_TX = torch.rand(tokens, experts, device="cuda") + torch.linspace(liked, 0, experts, device="cuda")
        groups = group_rows(liking_TX.topk(8).indices.sort(1).values, experts)
        x8, dy8 = (quantize_activation(random_matrix(8 * tokens, columns, 1)) for columns in (depth, 256))
        want = grouped_fp8_gemm(x8, w8, groups.first_X1)
        want_dx = grouped_fp8_gemm(dy8, turned, groups.first_X1, turned=True)
        for _ in range(2):
            assert torch.equal(grouped_fp8_gemm(x8, w8, groups.first_X1, owner_O3=groups.owner_O3), want), liked
            found = grouped_fp8_gemm(dy8, turned, groups.first_X1, turned=True, owner_O3=groups.owner_O3)
            assert torch.equal(found, want_dx), liked
    assert "grouped_fp8_gemm_gluon" not in fallbacks


@pytest.mark.parametrize("name", LOADS)
def test_gradients_are_near_the_references(name: str) -> None:
    load = LOADS[name]
    first_X1, bounds = first_rows(load), [0, *accumulate(load)]
    x_PK, dy_PN, w_NK = random_matrix(sum(load), K, 1), random_matrix(sum(load), N, 3), random_matrix(EXPERTS * N, K, 2)
    dx_PK = grouped_bf16_gemm(dy_PN, w_NK, first_X1, turned=True)
    w8 = quantize_weight(w_NK)
    turned = Quantized(w8.codes.t().contiguous(), w8.scale.t())
    dx8_PK = grouped_fp8_gemm(quantize_activation(dy_PN), turned, first_X1, turned=True)
    for expert, (start, stop) in enumerate(pairwise(bounds)):
        if start < stop:
            want = dy_PN[start:stop].float() @ w_NK[expert * N : (expert + 1) * N].float()
            assert relative_error(dx_PK[start:stop], want) < 5e-3
            assert relative_error(dx8_PK[start:stop], want) < 5e-2
    dw_NK = grouped_wgrad(dy_PN, x_PK, first_X1, torch.bfloat16)
    assert relative_error(dw_NK, grouped_wgrad_reference(dy_PN, x_PK, first_X1, torch.float32)) < 5e-3
    for tile in (WIDE_WGRAD, NARROW_WGRAD):
        assert torch.equal(grouped_wgrad_triton(dy_PN, x_PK, first_X1, torch.bfloat16, tile), dw_NK), tile
    narrow_P9 = dy_PN[:, :9].contiguous()  # TMA does not read it
    assert torch.equal(grouped_wgrad(narrow_P9, x_PK, first_X1, torch.bfloat16)[:9], dw_NK[:9])
    assert all(not part.any() for part, rows in zip(dw_NK.chunk(EXPERTS), load, strict=True) if not rows)


@pytest.mark.parametrize(("rows", "columns"), [(1, 128), (1023, 2048), (4096, 7168)])
def test_rows_of_codes_are_copied(rows: int, columns: int) -> None:
    x8 = quantize_activation(random_matrix(256, columns, 1))
    token_P = torch.randint(256, (rows,), device="cuda")
    assert not differing([gather_codes(x8, token_P)], [gather_codes_reference(x8, token_P)])


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_are_the_references_and_a_tokens_own(name: str) -> None:
    experts, rule = ROUTINGS[name]
    x_TE, w_XE = random_matrix(512, 2048, 1), random_matrix(experts, 2048, 2) / 45
    logits_TX = bf16_gemm_straight(x_TE, w_XE, torch.float32)
    torch.testing.assert_close(logits_TX, bf16_gemm_reference(x_TE, w_XE, torch.float32), rtol=1e-4, atol=1e-4)
    for rows in (1, 3, 16, 64, 65, 200):
        assert torch.equal(bf16_gemm_straight(x_TE[:rows], w_XE, torch.float32), logits_TX[:rows]), rows
    bias_X = None if rule.softmax else torch.randn(experts, device="cuda") / 10
    routed, want = route_tokens(logits_TX, bias_X, rule), route_tokens_reference(logits_TX, bias_X, rule)
    same_T = (routed.expert_TS == want.expert_TS).all(1)
    assert same_T.float().mean() > 0.99, "another choice only where two are equal to rounding"
    torch.testing.assert_close(routed.weight_TS[same_T], want.weight_TS[same_T], rtol=1e-5, atol=1e-7)
    for rows in (slice(0, 1), slice(7, 40)):
        part = route_tokens(logits_TX[rows].contiguous(), bias_X, rule)
        assert all(torch.equal(one, whole[rows]) for one, whole in zip(part, routed, strict=True))
    equal = route_tokens(torch.zeros(4, experts, device="cuda"), None, rule).expert_TS
    assert equal.tolist() == [list(range(rule.top_k))] * 4, "ties go to the lowest ids"


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_of_what_is_not_finite_are_the_references(name: str) -> None:
    """One NaN, several in one group, a row of NaN, infinities: every token gets `top_k` different experts, and NaN
    shows in its weights."""
    experts, rule = ROUTINGS[name]
    logits_TX = torch.randn(8, experts, device="cuda", generator=torch.Generator("cuda").manual_seed(3)).round()
    logits_TX[0, 5] = logits_TX[1, [3, 4, experts - 1]] = torch.nan
    logits_TX[2] = torch.nan
    logits_TX[3, 7], logits_TX[4, 9] = torch.inf, -torch.inf
    bias_X = None if rule.softmax else torch.randn(experts, device="cuda").round() / 4
    routed, want = route_tokens(logits_TX, bias_X, rule), route_tokens_reference(logits_TX, bias_X, rule)
    assert all(len(set(row)) == rule.top_k for row in routed.expert_TS.tolist())
    not_finite = [0, 1, 2] if not rule.softmax else [0, 1, 2, 3]  # softmax of an infinity is NaN in the whole row
    assert torch.equal(routed.expert_TS[not_finite[:3]], want.expert_TS[not_finite[:3]])
    assert torch.equal(routed.weight_TS.isnan(), want.weight_TS.isnan())
    assert routed.weight_TS[not_finite].isnan().any(1).all()


@pytest.mark.parametrize("tokens", [1, 2, 63, 256, 1023, 1025, 4097, 32768])
def test_slots_are_sorted_as_by_the_stable_sort(tokens: int) -> None:
    for experts, slots in ((64, 6), (128, 8), (256, 8), (60, 4)):
        skewed_TX = torch.rand(tokens, experts, device="cuda") + torch.linspace(0.5, 0, experts, device="cuda")
        expert_TS = skewed_TX.topk(slots).indices.sort(1).values
        found, want = sort_by_expert(expert_TS, experts), sort_by_expert_reference(expert_TS, experts)
        assert all(torch.equal(one, other) for one, other in zip(found, want, strict=True)), (experts, slots)


def test_the_sum_of_experts_has_the_references_bits() -> None:
    y_PE, shared_TE = random_matrix(800, 2048, 1), random_matrix(100, 2048, 2)
    weight_TS, row_TS = torch.rand(100, 8, device="cuda"), torch.randperm(800, device="cuda").view(100, 8)
    for shared in (None, shared_TE):
        found = combine_experts(y_PE, weight_TS, row_TS, shared)
        assert torch.equal(found, combine_experts_reference(y_PE, weight_TS, row_TS, shared))


@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize(("size", "slots"), [(2048, 6), (2048, 8), (512, 4), (2560, 8)])
def test_the_norm_adds_the_experts_with_the_bits_of_their_sum(tokens: int, size: int, slots: int) -> None:
    rows_PE, weight_E = random_matrix(tokens * slots, size, 1), random_matrix(1, size, 2)[0]
    weight_TS = torch.rand(tokens, slots, device="cuda")
    row_TS = torch.randperm(tokens * slots, device="cuda").view(tokens, slots)
    rows_PE[0, 3] = torch.nan
    for shared_TE in (None, random_matrix(tokens, size, 3)):
        experts, residual_TE = ExpertSum(rows_PE, weight_TS, row_TS, shared_TE), random_matrix(tokens, size, 4)
        delta_TE = combine_experts(*experts)
        hidden_TE, values_TE = add_rms_norm(delta_TE, residual_TE.clone(), weight_E, 1e-6, quantize=False)
        codes = quantize_activation(values_TE)
        both = add_rms_norm_both(experts, residual_TE.clone(), weight_E, 1e-6)
        assert not differing(both, (hidden_TE, values_TE, codes))
        assert not differing(add_rms_norm(experts, residual_TE, weight_E, 1e-6, quantize=True), (hidden_TE, codes))


@pytest.mark.parametrize("tokens", [1, 7, 64, 300, 512])
def test_sorting_and_gathering_in_one_launch_have_the_bytes_of_two(tokens: int) -> None:
    """Skewed loads, experts of no row, and one expert of all rows."""
    for experts, slots, columns in ((64, 6, 2048), (128, 8, 2048), (256, 8, 7168), (60, 4, 512)):
        x8 = quantize_activation(random_matrix(tokens, columns, 1))
        skewed_TX = torch.rand(tokens, experts, device="cuda") + torch.linspace(0.5, 0, experts, device="cuda")
        first_TS = torch.arange(slots, device="cuda").expand(tokens, slots)
        for expert_TS in (skewed_TX.topk(slots).indices.sort(1).values, first_TS.contiguous()):
            want = sort_by_expert(expert_TS, experts)
            found, codes = sort_and_gather(expert_TS, experts, x8)
            assert not differing((*found, codes), (*want, gather_codes(x8, want.token_P)))


def test_the_gradient_of_the_sum_is_the_references() -> None:
    y_PE, dout_TE = random_matrix(800, 2048, 1), random_matrix(100, 2048, 2)
    weight_TS, row_TS = torch.rand(100, 8, device="cuda"), torch.randperm(800, device="cuda").view(100, 8)
    found = combine_experts_backward(dout_TE, y_PE, weight_TS, row_TS)
    want = combine_experts_backward_reference(dout_TE, y_PE, weight_TS, row_TS)
    assert torch.equal(found[0], want[0])
    torch.testing.assert_close(found[1], want[1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", [StackedLinear, Float8StackedLinear])
@pytest.mark.parametrize("tokens", [1, 64, 500])
def test_the_fused_experts_have_the_bits_of_the_separate_ops(
    tokens: int, kind: type[StackedLinear] | type[Float8StackedLinear]
) -> None:
    """Values and gradients; some experts have no row."""
    fp8 = {"backend": "scaled_mm"} if kind is Float8StackedLinear else {}
    gate_up, down = (kind(*sizes, EXPERTS, device="cuda", **fp8) for sizes in ((512, 768), (384, 512)))  # type: ignore[arg-type]
    for linear in (gate_up, down):
        if isinstance(linear, Float8StackedLinear):
            linear.requantize()
    expert_TS = torch.rand(tokens, EXPERTS - 3, device="cuda").topk(4).indices.sort(1).values
    groups, found = group_rows(expert_TS, EXPERTS), []
    for fused in (True, False):
        x_TE = random_matrix(tokens, 512, 1).requires_grad_()
        if fused:
            out_PE = run_experts(x_TE, groups, gate_up, down).down_PE
        else:
            out_PE = down(silu_mul(gate_up(gather(x_TE, groups), groups)), groups)
        leaves = [x_TE, gate_up.weight, down.weight]
        found.append([out_PE, *torch.autograd.grad(out_PE, leaves, random_matrix(4 * tokens, 512, 2))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_part_of_each_matrix_has_the_bits_of_a_copy() -> None:
    w, first_X1 = random_matrix(16 * 256, 512, 1), torch.arange(0, 17 * 40, 40, dtype=torch.int32, device="cuda")
    for part, turned in ((Part(0, 128), True), (Part(128), False)):
        rows = part.of(256)
        copy = w.view(16, 256, 512)[:, rows.start : rows.stop].reshape(-1, 512)
        x_PK = random_matrix(640, 128 if turned else 512, 2)
        found = grouped_bf16_gemm(x_PK, w, first_X1, turned=turned, part=part)
        assert torch.equal(found, grouped_bf16_gemm(x_PK, copy, first_X1, turned=turned))


@pytest.mark.parametrize("precision", ["bf16", "fp8_full"])
def test_adapters_of_experts_change_no_parity(precision: str) -> None:
    spec, draw = MIXTURES["sigmoid"], random.Random(5)
    calibrate_on = [random_tokens(random.Random(0), spec, 300)]
    lora = LoraConfig(rank=8, experts=True)
    sides = Sides(spec, precision, "cuda", calibrate_on=calibrate_on, lora=lora)
    asked = random_requests(draw, spec, 4, prompts=(1, 200), answers=(20, 40), siblings=(1, 4), temperature=0.9)

    engine, trainer = (
        ("one_by_one", "small_chunks", "small_batches"),
        ("one sequence a micro-batch", "layers run again"),
    )
    check_situations(sides, asked, engine=engine, trainer=trainer)


@pytest.mark.parametrize(
    ("routing", "precision"),
    [("softmax", "fp8_full"), ("sigmoid", "bf16"), ("sigmoid", "fp8_full"), ("gated", "fp8_full")],
)
def test_what_happens_in_engine_and_trainer_changes_nothing(routing: str, precision: str) -> None:
    spec, draw = MIXTURES[routing], random.Random(4)
    sides = Sides(spec, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), spec, 300)])
    for name, parameter in sides.trainer_model.named_parameters():
        if name.endswith("e_score_correction_bias"):
            parameter.data.normal_(std=0.1)
    asked = random_requests(draw, spec, 1, prompts=(1, 10), answers=(60, 70), siblings=(8, 8), temperature=0.9)
    asked += random_requests(draw, spec, 3, prompts=(1, 250), answers=(20, 40), temperature=0.9)
    check_some_situations(sides, asked)


@pytest.mark.parametrize("routing", ["softmax", "sigmoid"])
def test_twenty_steps_repeat_their_bits_and_no_step_has_a_mismatch(routing: str) -> None:
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024}
    runs = [short_run(MIXTURES[routing], "fp8_full", "cuda", 20, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert_learned(runs[0])
