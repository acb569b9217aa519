"""Latent attention on a GPU, at Moonlight's head sizes: decode, prefill and the packed forward have the same bits, with
BF16 and FP8 latents. Engine and trainer agree to the bit, in captured graphs too, and runs repeat their bits."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from torch import Tensor

from octetrl.fp8.format import E4M3
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.latent_backward import (
    LatentGradients,
    latent_backward,
    latent_backward_reference,
    latent_backward_triton,
)
from octetrl.kernels.attention.latent_decode import latent_decode
from octetrl.kernels.attention.latent_packed import latent_packed
from octetrl.kernels.attention.latent_paged import latent_paged
from octetrl.kernels.attention.latent_prepare import latent_prepare_reference, latent_prepare_triton
from octetrl.kernels.attention.latent_rows import latent_rows
from octetrl.kernels.attention.latent_store import latent_replay, latent_replay_reference
from octetrl.kernels.attention.records import CachedPages
from octetrl.kernels.gemm.grouped_bf16_gemm import NARROW, Part, grouped_bf16_gemm
from octetrl.kernels.gemm.grouped_fp8_gemm import FEW, MANY, SOME
from octetrl.kernels.gemm.head_gemm import CODES_TILES, can_run, head_gemm, head_gemm_codes_triton, head_gemm_triton
from octetrl.kernels.gluon import fallbacks
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.rows.rope import rope_reference, rope_triton
from octetrl.layers.context import PackedContext
from octetrl.layers.rotary import RotaryTable
from octetrl.models.blocks.mla.absorbed import HeadSizes, absorb, attention_gradients, expand, expand_codes
from octetrl.models.blocks.mla.layout import LatentAttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.shapes.blocks import LayerBlocks
from octetrl.shapes.spec import ModelSpec
from tests.gpu.compare import captured, differing
from tests.parity.shapes import TINY
from tests.parity.short_run import assert_equal_in_every_step, assert_same, short_run
from tests.parity.sides import Sides, random_requests, random_tokens
from tests.parity.situations import check_some_situations
from tests.unit.kernels import latent_gradient_cases as gradients
from tests.unit.kernels.latent_cases import (
    SCALE,
    Latents,
    bytes_of_pages,
    empty_pages,
    latents,
    moved,
    paged,
    written_out,
)

pytestmark = pytest.mark.gpu
HEADS, LATENT, ROTARY = 16, 512, 64
LENGTHS = (1, 63, 200, 1_024, 2_300)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=["bf16", "e4m3"])
SIZES = HeadSizes(128, 128)

ROUTING = Routing(16, 3, "sigmoid", True, corrected=True, num_groups=4, kept_groups=2, scale=2.5)
MIXTURE = MixtureLayout(ROUTING, 256, 512)
DIRECT, LOW_RANK = (LatentAttentionLayout(256, rank, 64, 64, value) for rank, value in ((0, 128), (256, 64)))
WIDE_HEADS = LatentAttentionLayout(LATENT, 256, 192, ROTARY, 256)  # as GLM-4.7-Flash's; their backward is padded
_WIDE = replace(
    TINY["qwen3"], hidden_size=512, intermediate_size=1152, num_heads=8, num_kv_heads=8, head_size=128, vocab_size=4096,
    qk_norm=False,
)  # fmt: skip
MODELS: dict[str, ModelSpec] = {
    "direct": replace(_WIDE, blocks=(LayerBlocks(DIRECT, MLPLayout()), LayerBlocks(DIRECT, MIXTURE))),
    "low_rank": replace(_WIDE, blocks=(LayerBlocks(LOW_RANK, MIXTURE),)),
    "wide_heads": replace(
        _WIDE, num_heads=20, num_kv_heads=20, head_size=256, blocks=(LayerBlocks(WIDE_HEADS, MIXTURE),)
    ),
}


def on_gpu(case: Latents) -> Latents:
    return Latents(*(x.cuda() if isinstance(x, Tensor) else x for x in case))


@DTYPES
@pytest.mark.parametrize("tokens", [1, 7, 256, 2048])
def test_one_kernel_before_attention_has_the_bytes_of_four(tokens: int, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    q_THR = draw(tokens, HEADS, SIZES.nope + ROTARY).bfloat16()[..., SIZES.nope :]
    kv_a_TX, weight_C = (3 * draw(tokens, LATENT + ROTARY)).bfloat16(), draw(LATENT).bfloat16()
    angle_TP = draw(tokens, ROTARY // 2)
    pages = tokens // 64 + 2
    slot_T = torch.randperm(pages * 64, device="cuda", generator=generator)[:tokens]
    slot_T[tokens // 2] = -1
    angles, results = (angle_TP.cos(), angle_TP.sin()), []
    for prepare in (latent_prepare_triton, latent_prepare_reference):
        cached = [moved(one) for one in empty_pages(pages, 64, LATENT, ROTARY, dtype)]
        turned_THR = prepare(q_THR, kv_a_TX, weight_C, 1e-6, angles, True, *cached, slot_T)
        results.append(bytes_of_pages([CachedPages(turned_THR), *cached]))
    assert results[0] == results[1]


@DTYPES
@pytest.mark.parametrize("heads", [HEADS, 20])
def test_decode_prefill_and_packed_forward_have_the_same_bits(heads: int, dtype: torch.dtype) -> None:
    case = latents(LENGTHS, heads, LATENT, ROTARY, dtype)
    device = on_gpu(case)
    packed_THC = latent_packed(*device[:4], device.cu_seqlens_B1.cuda(), max(LENGTHS), SCALE)
    assert relative_error(packed_THC.cpu(), written_out(case)) < 5e-3
    for counts in ((1,) * len(LENGTHS), (1, 20, 200, 77, 300)):
        for page_size in (16, 128):
            cache, token_Q = paged(case, counts, page_size, dtype)
            on_device = cache.cuda()
            found = latent_paged(*on_device, max_query_len=max(counts))
            assert torch.equal(found[:-1], packed_THC[token_Q.cuda()]), (counts, page_size)
            assert not found[-1].any(), "a padding sequence has zeros"
            if max(counts) == 1:
                tables = *on_device[:5], on_device.context_lens_B, SCALE
                assert all(torch.equal(latent_decode(*tables, split=split), found) for split in (False, True))


BORDERS = (0, 1, 2, 63, 64, 65, 127, 129, 640, 1_023, 1_024, 1_025, 2_047, 2_049, 3_001)


def decode_tables(
    contexts: list[int], heads: int, page_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, CachedPages, CachedPages, Tensor, Tensor, float]:
    """Sequences read random pages, some of them the same; the table has -1 past each sequence's last page."""
    generator = torch.Generator("cuda").manual_seed(len(contexts) + heads)
    count, pages, columns = len(contexts), 300, -(-max(*contexts, 1) // page_size) + 1

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16()

    q_latent_BHC, q_rotary_BHR = draw(heads, count, LATENT).transpose(0, 1), draw(count, heads, ROTARY)
    scale = torch.rand(pages, 1, page_size, generator=generator, device="cuda") + 0.5 if dtype == E4M3 else None
    context_B = torch.tensor(contexts, dtype=torch.int32, device="cuda")
    table_BP = torch.randint(pages, (count, columns), generator=generator, device="cuda", dtype=torch.int32)
    first_P = torch.arange(columns, device="cuda") * page_size
    table_BP = torch.where(first_P < context_B[:, None], table_BP, -1)
    latent = CachedPages(draw(pages, page_size, LATENT).to(dtype), token_scale=scale)
    key = CachedPages(draw(pages, page_size, ROTARY))
    return q_latent_BHC, q_rotary_BHR, latent, key, table_BP, context_B, SCALE


@DTYPES
@pytest.mark.parametrize(
    ("count", "heads", "page_size"),
    [(1, 16, 128), (15, 5, 32), (17, 20, 64), (131, 16, 128), (700, 16, 128)],
)
def test_every_way_to_decode_has_the_same_bits(count: int, heads: int, page_size: int, dtype: torch.dtype) -> None:
    """With 700 sequences of up to four chunks, a program of the Gluon kernel takes several chunks."""
    contexts = [BORDERS[(7 * i + 8) % len(BORDERS)] for i in range(count)]
    tables = decode_tables(contexts, heads, page_size, dtype)
    want = latent_decode(*tables, split=True, gluon=False)
    ways = ((False, False), (True, True), ("chosen", True))
    found = {way: latent_decode(*tables, way[0], gluon=way[1]) for way in ways}  # type: ignore[arg-type]
    assert not fallbacks and want.isfinite().all()
    assert [how for how, out in found.items() if not torch.equal(out, want)] == []
    for b in range(0, count, 37):
        latent_BHC, rotary_BHR, latent, key, table_BP = tables[:5]
        at = torch.arange(contexts[b], device="cuda")
        page, slot = table_BP[b, at // page_size].long(), at % page_size
        value_SC = latent.pages.float()[page, slot].double()
        if latent.token_scale is not None:
            value_SC = value_SC * latent.token_scale[page, 0, slot, None].double()
        scores_HS = latent_BHC[b].double() @ value_SC.T + rotary_BHR[b].double() @ key.pages[page, slot].double().T
        expected = (SCALE * scores_HS).softmax(1) @ value_SC
        assert not contexts[b] or relative_error(want[b], expected) < 1e-2, contexts[b]


@DTYPES
def test_a_captured_decode_takes_other_lengths(dtype: torch.dtype) -> None:
    tables = decode_tables([3_001] * 140, HEADS, 128, dtype)
    latent_decode(*tables)
    graph, out = captured(lambda: latent_decode(*tables))
    tables[5].copy_(torch.tensor([BORDERS[i % len(BORDERS)] for i in range(140)], dtype=torch.int32))
    graph.replay()
    assert torch.equal(out, latent_decode(*tables, split=False, gluon=False))


@pytest.mark.parametrize("heads", [16, 20])
def test_every_way_to_compute_packed_rows_has_the_same_bits(heads: int) -> None:
    """A sequence of no token, and tokens after the last sequence, too. No sequence reads another's latents."""
    lengths = (1, 0, 2, 5, 63, 64, 65, 129, 640, 1_023, 1_025, 2_049)
    generator = torch.Generator("cuda").manual_seed(heads)
    tokens = sum(lengths) + 7
    shapes = (heads, tokens, LATENT), (tokens, heads, ROTARY), (tokens, LATENT), (tokens, ROTARY)
    q_latent, *others = (torch.randn(*shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda"), max(lengths), SCALE
    want = latent_rows(q_latent.transpose(0, 1), *others, *bounds, gluon=False)
    found = latent_rows(q_latent.transpose(0, 1), *others, *bounds)
    assert not fallbacks and torch.equal(found, want) and not found[-7:].any() and found[:-7].any(2).all()
    others[1][sum(lengths[:-1]) :] = torch.nan
    poisoned = latent_rows(q_latent.transpose(0, 1), *others, *bounds)
    assert torch.equal(poisoned[: sum(lengths[:-1])], want[: sum(lengths[:-1])])
    assert poisoned[sum(lengths[:-1]) : sum(lengths)].isnan().all()
    one = latent_rows(q_latent[:, :1].transpose(0, 1), *(x[:1] for x in others), bounds[0][:2], 1, SCALE)
    assert torch.equal(one, want[:1])


def test_rows_have_the_bits_of_the_references() -> None:
    generator = torch.Generator().manual_seed(1)
    latent_TC = torch.randn(300, LATENT + ROTARY, generator=generator).bfloat16()[:, :LATENT]
    latent_TC[3], latent_TC[5, 7] = 0.0, torch.inf
    found, expected = latent_replay(latent_TC.cuda(), "dynamic").cpu(), latent_replay_reference(latent_TC)
    assert torch.equal(found.isnan(), expected.isnan()) and expected[5].isnan().all(), "NaN, of whatever bits"
    assert torch.equal(found.nan_to_num(7.0).view(torch.int16), expected.nan_to_num(7.0).view(torch.int16))
    rotary = RotaryTable(ROTARY, 5e4, None, 300, device="cpu")(torch.arange(300))
    x_THR = torch.randn(300, 4, 96, generator=generator).bfloat16()[..., :ROTARY]
    for sign in (1, -1):
        moved = rope_triton(x_THR.cuda(), *(x.cuda() for x in rotary), sign, True)
        assert torch.equal(moved.cpu(), rope_reference(x_THR, *rotary, sign, True))


@pytest.mark.parametrize("sizes", [SIZES, HeadSizes(192, 256)], ids=str)
def test_products_with_kv_b_do_not_depend_on_the_number_of_tokens(sizes: HeadSizes) -> None:
    generator = torch.Generator("cuda").manual_seed(2)
    q_THN = torch.randn(600, HEADS, sizes.nope, generator=generator, device="cuda").bfloat16()
    kv_b = (torch.randn(HEADS * sum(sizes), LATENT, generator=generator, device="cuda") / 22).bfloat16()
    q_THC = absorb(q_THN, kv_b, sizes)
    out_TV = expand(q_THC, kv_b, sizes)
    wk = kv_b.view(HEADS, sum(sizes), -1)[:, : sizes.nope].double()
    assert relative_error(q_THC, torch.einsum("thn,hnc->thc", q_THN.double(), wk)) < 3e-3
    for tokens in (1, 2, 16, 33, 128, 129, 512):
        assert torch.equal(absorb(q_THN[:tokens], kv_b, sizes), q_THC[:tokens]), tokens
        assert torch.equal(expand(q_THC[:tokens], kv_b, sizes), out_TV[:tokens]), tokens


@pytest.mark.parametrize("tokens", [1, 5, 16, 90, 300])
def test_products_of_heads_read_views_and_have_the_bits_of_grouped_ones(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    q_THX = torch.randn(tokens, HEADS, SIZES.nope + ROTARY, generator=generator, device="cuda").bfloat16()
    o_HTC = torch.randn(HEADS, tokens, LATENT, generator=generator, device="cuda").bfloat16()
    kv_b = (torch.randn(HEADS * sum(SIZES), LATENT, generator=generator, device="cuda") / 22).bfloat16()
    first_H1 = torch.arange(0, HEADS * tokens + 1, tokens, dtype=torch.int32, device="cuda")
    keys, values, o_THC = Part(0, SIZES.nope), Part(SIZES.nope), o_HTC.transpose(0, 1)
    for x_THK, turned, part in (
        (q_THX[..., : SIZES.nope], True, keys),
        (o_THC, False, values),
        (o_THC.contiguous(), False, values),
    ):
        assert can_run(x_THK, kv_b)
        x_PK = x_THK.transpose(0, 1).reshape(HEADS * tokens, -1).contiguous()
        want_PN = grouped_bf16_gemm(x_PK, kv_b, first_H1, turned=turned, part=part)
        found_THN = head_gemm(x_THK, kv_b, turned=turned, part=part)
        assert found_THN.is_contiguous()
        assert torch.equal(found_THN.transpose(0, 1).flatten(0, 1), want_PN)
        for tile in (FEW, SOME, MANY, NARROW):
            assert torch.equal(head_gemm_triton(x_THK, kv_b, turned=turned, part=part, tile=tile), found_THN), tile


@pytest.mark.parametrize("tokens", [1, 7, 64, 130, 300, 700])
def test_codes_of_a_product_of_heads_are_those_of_its_values(tokens: int) -> None:
    generator = torch.Generator("cuda").manual_seed(tokens)
    o_HTC = torch.randn(HEADS, tokens, LATENT, generator=generator, device="cuda").bfloat16()
    o_HTC[1, 0, 5] = torch.nan
    kv_b = (torch.randn(HEADS * sum(SIZES), LATENT, generator=generator, device="cuda") / 22).bfloat16()
    for o_THC in (o_HTC.transpose(0, 1), o_HTC.transpose(0, 1).contiguous()):
        for power_of_two in (False, True):
            want = quantize_activation(expand(o_THC, kv_b, SIZES), power_of_two)
            chosen = expand_codes(o_THC, kv_b, SIZES, power_of_two)
            of_tiles = [
                head_gemm_codes_triton(o_THC, kv_b, part=Part(SIZES.nope), power_of_two=power_of_two, tile=tile)
                for tile in CODES_TILES
            ]
            for found in (chosen, *of_tiles):
                assert not differing([found.codes], [want.codes])
                assert torch.equal(found.scale.nan_to_num(-1), want.scale.nan_to_num(-1))


def test_gradients_are_near_those_of_a_cpu() -> None:
    case = latents((70, 200), 4, 128, 64, torch.bfloat16)
    generator = torch.Generator().manual_seed(3)
    q_THN, dout_TV = torch.randn(270, 4, 128, generator=generator), torch.randn(270, 4 * 128, generator=generator)
    kv_b = (torch.randn(4 * 256, 128, generator=generator) / 11).bfloat16().requires_grad_()
    arguments = dout_TV.bfloat16(), q_THN.bfloat16(), case.q_rotary_THR, case.value_TC, case.key_TR, kv_b
    context = PackedContext(case.cu_seqlens_B1, 200)
    want = attention_gradients(*arguments, SIZES, context, SCALE)
    moved = replace(context, cu_seqlens_B1=context.cu_seqlens_B1.cuda())
    found = attention_gradients(*(x.detach().cuda().requires_grad_() for x in arguments), SIZES, moved, SCALE)
    for name, one, other in zip(want._fields, found, want, strict=True):
        assert relative_error(one.cpu(), other) < 2e-2, name


@pytest.mark.parametrize("sizes", [(128, 64, 128), (64, 64, 128), (64, 32, 64)], ids=str)
def test_the_backward_repeats_its_bits_and_nothing_crosses_over(sizes: tuple[int, int, int]) -> None:
    lengths, rest, scale = (1, 63, 129, 777, 300), 40, gradients.SCALE
    used, bounds = sum(lengths), gradients.cu_seqlens(lengths).cuda()
    arguments = gradients.Arguments(*(x.cuda() for x in gradients.draw(used + rest, 5, sizes=sizes)))
    want = gradients.written_out(gradients.Arguments(*(x[:used] for x in arguments)), lengths)
    for x in arguments:
        x[used:] = float("nan")
    found = latent_backward_triton(*arguments, bounds, scale)
    assert "latent_backward_gluon" not in fallbacks
    assert max(gradients.errors(LatentGradients(*(x[:used] for x in found)), want)) < 5e-3
    assert not any(x[used:].count_nonzero() for x in found)
    for gluon in (True, False):
        again = latent_backward_triton(*arguments, bounds, scale, gluon=gluon)
        assert all(map(torch.equal, again, found)), f"gluon {gluon}"
    for x in arguments:
        x[64:193] = float("nan")
    beside = latent_backward_triton(*arguments, bounds, scale)
    for one, other in zip(beside, found, strict=True):
        assert torch.equal(one[:64], other[:64]) and torch.equal(one[193:], other[193:])


def test_the_backward_of_wider_heads_is_that_of_the_formula() -> None:
    """Ordinary attention's, on padded copies."""
    lengths = (1, 63, 129, 300)
    arguments = gradients.Arguments(*(x.cuda() for x in gradients.draw(sum(lengths), 5, sizes=(192, 64, 256))))
    found = latent_backward(*arguments, gradients.cu_seqlens(lengths).cuda(), max(lengths), gradients.SCALE)
    assert max(gradients.errors(found, gradients.written_out(arguments, lengths))) < 1e-2


def test_what_keys_and_values_have_in_common_hardly_adds_to_an_error_of_queries() -> None:
    """The rows of dS add up to zero. With a delta from outputs in BF16 they would not, if outputs are large."""
    arguments = gradients.Arguments(*(x.cuda() for x in gradients.draw(700, 4, common=2.0, sizes=(128, 64, 128))))
    want, bounds = gradients.written_out(arguments, (700,)).q_THX, gradients.cu_seqlens((700,)).cuda()
    found = latent_backward_triton(*arguments, bounds, gradients.SCALE).q_THX
    by_outputs = latent_backward_reference(*arguments, bounds, 700, gradients.SCALE).q_THX
    assert relative_error(found, want) < relative_error(by_outputs, want) / 2


@pytest.mark.parametrize(
    ("model", "precision"),
    [("direct", "bf16"), ("direct", "fp8_full"), ("low_rank", "fp8_full"), ("wide_heads", "fp8_full")],
)
def test_what_happens_in_engine_and_trainer_changes_nothing(model: str, precision: str) -> None:
    spec, draw = MODELS[model], random.Random(4)
    sides = Sides(spec, precision, "cuda", calibrate_on=[random_tokens(random.Random(0), spec, 300)])
    asked = random_requests(draw, spec, 1, prompts=(1, 10), answers=(60, 70), siblings=(8, 8), temperature=0.9)
    asked += random_requests(draw, spec, 3, prompts=(1, 250), answers=(20, 40), temperature=0.9)
    check_some_situations(sides, asked)


@pytest.mark.parametrize("model", MODELS)
def test_twenty_steps_repeat_their_bits_and_no_step_has_a_mismatch(model: str) -> None:
    config = {"activation_checkpointing": "layer", "tokens_per_micro_batch": 1024}
    runs = [short_run(MODELS[model], "fp8_full", "cuda", 20, **config) for _ in range(2)]
    assert_equal_in_every_step(runs[0])
    assert_same(*runs)
    assert runs[0].metrics[0]["entropy"] != runs[0].metrics[-1]["entropy"], "nothing was learnt"
