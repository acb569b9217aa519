"""Rounding to E4M3 by arithmetic, by torch's cast and by looking through all 256 values must agree."""

from __future__ import annotations

import torch

from octetrl.fp8.format import E4M3, NAN_CODE, decode_e4m3, encode_e4m3, round_to_e4m3

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
