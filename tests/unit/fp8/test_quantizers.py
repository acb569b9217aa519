"""The quantisers against docs/fp8.md §1, computed here block by block with numpy, and their edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octetrl.fp8.format import BLOCK, E4M3, E4M3_MAX, NAN_CODE, decode_e4m3, encode_e4m3, round_to_e4m3
from octetrl.fp8.quantize import (
    Quantized,
    dequantize_activation,
    dequantize_tokens,
    dequantize_weight,
    is_square,
    non_finite_count,
    quantize_activation_reference,
    quantize_activation_values,
    quantize_kv_int8,
    quantize_kv_per_head,
    quantize_kv_per_token,
    quantize_tokens_reference,
    quantize_tokens_values,
    quantize_weight_reference,
    scale_and_inverse,
)
from octetrl.fp8.relative_error import relative_error

KINDS = ("normal", "huge", "tiny", "subnormal", "zeros", "border", "mixed")


def awkward(shape: tuple[int, ...], kind: str, seed: int) -> torch.Tensor:
    """BF16 test matter of one kind."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "mixed":
        x = x * torch.logspace(-30, 30, shape[0])[:, None]
    if kind == "border":
        x = x.sign() * E4M3_MAX
    factor = {"huge": 1e37, "tiny": 1e-33, "subnormal": 1e-39, "zeros": 0.0}.get(kind, 1.0)
    return (x * factor).to(torch.bfloat16)


def block_by_the_contract(block: torch.Tensor, power_of_two: bool) -> tuple[torch.Tensor, np.float32]:
    """Bytes and scale of one block, as docs/fp8.md §1 words them, in numpy's IEEE float32."""
    amax = np.float32(block.float().abs().max().item())
    if amax == 0:
        return torch.where(block.signbit(), 0x80, 0).to(torch.uint8), np.float32(1.0)  # -0.0 keeps its sign
    scale = amax / np.float32(448)
    with np.errstate(over="ignore"):
        inverse = np.minimum(np.float32(448) / amax, np.finfo(np.float32).max)
    if power_of_two:
        exponent = min(math.ceil(math.log2(max(float(scale), 2.0**-126))), 119)
        scale, inverse = np.float32(2.0**exponent), np.float32(2.0**-exponent)
    scaled = torch.from_numpy(block.float().numpy() * inverse).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.to(E4M3).view(torch.uint8), scale


def assert_blocks(x: torch.Tensor, q: Quantized, block: tuple[int, int], power_of_two: bool) -> None:
    codes = q.codes.view(torch.uint8)
    for i in range(q.scale.shape[0]):
        for j in range(q.scale.shape[1]):
            place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
            want_codes, want_scale = block_by_the_contract(x[place], power_of_two)
            assert q.scale[i, j].item() == float(want_scale)
            assert torch.equal(codes[place], want_codes)


def test_codes_of_the_largest_values_are_finite_with_a_power_of_two_scale() -> None:
    largest = E4M3_MAX * 2.0**119
    for value in (2.97e38, 3.0e38, -3.3e38, torch.finfo(torch.bfloat16).max):
        x = torch.full((2, BLOCK), value).bfloat16()
        q = quantize_activation_reference(x, True)
        assert q.scale.tolist() == [[2.0**119]] * 2
        assert (dequantize_activation(q).abs() == largest).all()
        assert_blocks(x, q, (1, BLOCK), power_of_two=True)


sizes = st.sampled_from([1, 2, 7, 127, 128, 129, 200])
cases = given(
    rows=sizes, columns=sizes, kind=st.sampled_from(KINDS), seed=st.integers(0, 99), power_of_two=st.booleans()
)


def padded_columns(x: torch.Tensor, depth: int) -> torch.Tensor:
    """x transposed, its rows padded with zeros to `depth`."""
    padded = torch.zeros(depth, x.shape[1], dtype=x.dtype)
    padded[: len(x)] = x
    return padded.t().contiguous()


@cases
@settings(max_examples=25, deadline=None)
def test_quantisers_follow_the_contract(rows: int, columns: int, kind: str, seed: int, power_of_two: bool) -> None:
    """Activations by row, weights by square, tokens as the transposed tensor, by row or by square; and the forms that
    keep values have the codes' values."""
    x = awkward((rows, columns), kind, seed)
    few_rows, few_columns = x[:7], x[:, :7].contiguous()
    q = quantize_activation_reference(few_rows, power_of_two)
    assert q.scale.shape == (len(few_rows), -(-columns // BLOCK))
    assert_blocks(few_rows, q, (1, BLOCK), power_of_two)
    assert_blocks(x, quantize_weight_reference(x, power_of_two), (BLOCK, BLOCK), power_of_two)
    q = quantize_tokens_reference(few_columns, power_of_two)
    assert q.codes.shape == (few_columns.shape[1], -(-rows // BLOCK) * BLOCK)
    assert_blocks(padded_columns(few_columns, q.codes.shape[1]), q, (1, BLOCK), power_of_two)
    q = quantize_tokens_reference(x, power_of_two, square=True)
    assert q.scale.shape == (-(-columns // BLOCK), -(-rows // BLOCK)) and q.scale.is_contiguous()
    assert is_square(q) or columns == 1
    assert_blocks(padded_columns(x, q.codes.shape[1]), q, (BLOCK, BLOCK), power_of_two)
    assert torch.equal(dequantize_tokens(q), dequantize_weight(q).t())
    for codes, held in (
        (quantize_activation_reference(x, power_of_two), quantize_activation_values(x, power_of_two)),
        (quantize_tokens_reference(x, power_of_two), quantize_tokens_values(x, power_of_two)),
        (q, quantize_tokens_values(x, power_of_two, square=True)),
    ):
        assert torch.equal(decode_e4m3(codes.codes), held.codes) and torch.equal(codes.scale, held.scale)


def test_both_divisions_are_ieee_divisions() -> None:
    """Codes alone hide a division that is off by a bit: this looks at the quotients themselves."""
    amax = torch.rand(20_000, generator=torch.Generator().manual_seed(8)) * 10
    scale, inverse = scale_and_inverse(amax)
    assert torch.equal(scale, torch.from_numpy(amax.numpy() / np.float32(448)))
    assert torch.equal(inverse, torch.from_numpy(np.float32(448) / amax.numpy()))


@given(kind=st.sampled_from([kind for kind in KINDS if kind != "subnormal"]), seed=st.integers(0, 99))
@settings(max_examples=15, deadline=None)
def test_dequantized_values_lie_within_half_a_step(kind: str, seed: int) -> None:
    """At most 1/16 of a value, or half of the smallest step of its block: amax / 448 * 2^-9 / 2."""
    x = awkward((130, 140), kind, seed)
    for back in (
        dequantize_activation(quantize_activation_reference(x)),
        dequantize_weight(quantize_weight_reference(x)),
        dequantize_tokens(quantize_tokens_reference(x))[:130],
    ):
        bound = x.float().abs() / 16 + x.float().abs().max() / E4M3_MAX * 2.0**-10
        assert (back.double() - x.double()).abs().le(bound.double() * 1.001).all()


def test_blocks_too_small_for_an_inverse_shrink_and_stay_finite() -> None:
    x = awkward((9, 140), "subnormal", 0)
    x[:, 3] = 0
    for q in (quantize_activation_reference(x), quantize_activation_values(x)):
        back = dequantize_activation(q)
        assert back.isfinite().all() and (back.abs() <= 1.1 * x.float().abs()).all()
        assert (back[:, 3] == 0).all()


def test_chunking_changes_nothing() -> None:
    x = awkward((2000, 200), "mixed", 1)
    whole = quantize_activation_values(x)
    parts = [quantize_activation_values(part) for part in x.split(700)]
    assert torch.equal(whole.codes, torch.cat([part.codes for part in parts]))
    tokens = quantize_tokens_values(x)
    first = quantize_tokens_values(x[:1280])
    assert torch.equal(tokens.codes[:, :1280], first.codes)
    assert torch.equal(tokens.scale[:, :10], first.scale)
    square, first = (quantize_tokens_values(part, square=True) for part in (x, x[:1280]))
    assert torch.equal(square.codes[:, :1280], first.codes)
    assert torch.equal(square.scale[:, :10], first.scale)


def test_float32_input_is_rounded_to_bf16_first() -> None:
    x = torch.randn(9, 200, generator=torch.Generator().manual_seed(3))
    for quantize in (quantize_activation_reference, quantize_weight_reference, quantize_tokens_reference):
        of_float32, of_bf16 = quantize(x), quantize(x.bfloat16())
        assert torch.equal(of_float32.codes.view(torch.uint8), of_bf16.codes.view(torch.uint8))
        assert torch.equal(of_float32.scale, of_bf16.scale)


def test_input_is_left_alone_and_may_be_strided() -> None:
    x = awkward((200, 130), "normal", 5)
    before = x.clone()
    of_view = quantize_activation_reference(x.t())
    of_copy = quantize_activation_reference(x.t().contiguous())
    assert torch.equal(of_view.codes.view(torch.uint8), of_copy.codes.view(torch.uint8))
    quantize_tokens_values(x), quantize_activation_values(x.float())
    assert torch.equal(x, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_activation_poisons_its_block_and_no_other(bad: float) -> None:
    x = awkward((4, 300), "normal", 0)
    x[2, 130] = bad
    assert int(non_finite_count(x)) == 1
    q = quantize_activation_reference(x)
    assert q.scale.isnan().nonzero().tolist() == [[2, 1]]
    poisoned = (q.codes.view(torch.uint8) & 0x7F) == NAN_CODE
    assert poisoned.nonzero().tolist() == [[2, j] for j in range(128, 256)]
    assert (q.codes.view(torch.uint8)[2, 128:256] == NAN_CODE).all()
    tokens = quantize_tokens_reference(x)
    assert tokens.scale.isnan().nonzero().tolist() == [[130, 0]]
    assert (tokens.codes.view(torch.uint8)[130] == NAN_CODE).all()
    square = quantize_tokens_reference(x, square=True)
    assert square.scale.isnan().nonzero().tolist() == [[1, 0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_weight_is_an_error_that_names_it(bad: float) -> None:
    w = awkward((3, 5), "normal", 0)
    w[1, 4] = bad
    with pytest.raises(ValueError, match=r"layers\.3\.mlp\.down_proj: 1 non-finite.*\(1, 4\)"):
        quantize_weight_reference(w, name="layers.3.mlp.down_proj")


def test_a_float32_weight_that_bf16_cannot_hold_is_named() -> None:
    w = torch.ones(3, 5)
    quantize_weight_reference(w.fill_(torch.finfo(torch.bfloat16).max))
    w[2, 1] = torch.finfo(torch.float32).max
    with pytest.raises(ValueError, match=r"o_proj: 1 non-finite.*\(2, 1\).*in BF16"):
        quantize_weight_reference(w, name="o_proj")


def test_kv_per_head_uses_the_given_scale_and_saturates() -> None:
    x = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = torch.tensor([0.01, 1e-5])
    q = quantize_kv_per_head(x, scale)
    inverse = 1.0 / scale.numpy()
    want = torch.from_numpy(x.float().numpy() * inverse[None, :, None]).clamp(-448, 448).to(E4M3)
    assert torch.equal(q.codes.view(torch.uint8), want.view(torch.uint8))
    assert decode_e4m3(q.codes)[:, 1].abs().max() == E4M3_MAX
    assert torch.equal(q.scale, scale)


def test_kv_per_token_is_the_block_rule_over_the_head() -> None:
    x = torch.randn(5, 2, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
    x[3, 1] = 0
    codes, scale = quantize_kv_per_token(x)
    for token in range(5):
        for head in range(2):
            want_codes, want_scale = block_by_the_contract(x[token, head], False)
            assert torch.equal(codes[token, head].view(torch.uint8), want_codes)
            assert scale[token, head].item() == float(want_scale)


def test_int8_codes_are_the_nearest_integers_of_float64() -> None:
    x = 3 * torch.randn(40, 2, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    x[3, 1], x[4, 0] = 0, torch.tensor([127.0, 0.5, 1.5, -2.5] * 4)  # halves go to the even neighbour
    codes, scale = quantize_kv_int8(x)
    assert codes.dtype == torch.int8 and codes[4, 0, :4].tolist() == [127, 0, 2, -2]
    assert not codes[3, 1].any() and scale[3, 1] == 1.0
    exact = x.double() * 127 / x.double().abs().amax(2, keepdim=True).clamp_min(1e-9)
    assert ((codes.double() - exact).abs() <= 0.5 + 1e-4).all()
    back = codes.float() * scale[..., None]
    assert ((back - x.float()).abs() <= 0.501 * scale[..., None]).all()
    assert (codes.abs().amax(2)[scale != 1.0] == 127).all(), "the largest of a head becomes the largest code"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_makes_its_head_nan_in_int8(bad: float) -> None:
    x = torch.ones(2, 2, 8).bfloat16()
    x[1, 0, 5] = bad
    codes, scale = quantize_kv_int8(x)
    assert scale.isnan().tolist() == [[False, False], [True, False]]
    assert not codes[1, 0].any() and (codes[1, 1] == 127).all()


def test_power_of_two_scale_is_the_next_power_and_costs_range_not_correctness() -> None:
    x = awkward((64, 256), "normal", 7)
    q = quantize_activation_reference(x, power_of_two=True)
    plain = quantize_activation_reference(x)
    mantissa, _ = torch.frexp(q.scale)
    assert (mantissa == 0.5).all()
    assert (q.scale >= plain.scale).all() and (q.scale < 2 * plain.scale).all()
    assert relative_error(dequantize_activation(q), x) < 0.04


# ---------------------------------------------------------------- relative error


def test_known_values() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference + torch.tensor([0.0, 0.5]), reference) == pytest.approx(0.1)
    assert relative_error(reference, reference) == 0.0
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(reference, torch.zeros(2)) == math.inf


def test_the_error_that_the_docstring_promises() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    back = dequantize_activation(quantize_activation_reference(x))
    assert relative_error(back, x) == pytest.approx(0.026, abs=0.001)


# ---------------------------------------------------------------- the format


GRID = torch.arange(0, 0x7F, dtype=torch.uint8).view(E4M3).to(torch.float64)  # 0 ... 448, ascending


def nearest_on_the_grid(x: torch.Tensor) -> torch.Tensor:
    """By search in float64: the nearer neighbour, of two equally near ones that with the even code."""
    magnitude = x.double().abs()
    upper = torch.searchsorted(GRID, magnitude).clamp(1, len(GRID) - 1)
    below, above = magnitude - GRID[upper - 1], GRID[upper] - magnitude
    take_upper = (above < below) | ((above == below) & (upper % 2 == 0))
    code = torch.where(take_upper, upper, upper - 1)
    return torch.where(x < 0, -GRID[code], GRID[code]).float()


def awkward_values() -> torch.Tensor:
    """Every grid value, every midpoint between two, and the floats next to both; and a sweep of magnitudes."""
    middles = (GRID[1:] + GRID[:-1]) / 2
    points = torch.cat([GRID, middles]).float()
    towards = torch.cat([torch.nextafter(points, torch.tensor(side)) for side in (-1e9, 1e9)])
    sweep = torch.logspace(-40, 2.65, 20_000)
    positive = torch.cat([points, towards, sweep]).clamp(max=448.0)
    return torch.cat([positive, -positive])


def test_arithmetic_rounding_is_the_nearest_value_with_ties_to_even() -> None:
    x = awkward_values()
    assert torch.equal(round_to_e4m3(x), nearest_on_the_grid(x))


def test_encoding_agrees_with_arithmetic_rounding() -> None:
    x = awkward_values()
    assert torch.equal(decode_e4m3(encode_e4m3(x)), round_to_e4m3(x))


def test_nan_has_one_code_and_stays_nan() -> None:
    x = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, 0xFFF], dtype=torch.int32).view(torch.float32)
    assert x[:3].isnan().all()
    assert encode_e4m3(x).view(torch.uint8).tolist() == [NAN_CODE, NAN_CODE, NAN_CODE, 0]
    assert round_to_e4m3(x)[:3].isnan().all()
    assert decode_e4m3(encode_e4m3(x))[:3].isnan().all()


def test_decoding_gives_every_byte_its_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(decode_e4m3(codes, dtype).nan_to_num(-1.0), codes.to(dtype).nan_to_num(-1.0))
    strided = codes.view(16, 16).t()
    assert torch.equal(decode_e4m3(strided).nan_to_num(-1.0), strided.float().nan_to_num(-1.0))
