"""The rotary table: llama3's three bands of frequencies, and positions it doesn't have."""

from __future__ import annotations

import math

import pytest
import torch

from octetrl.config.spec import RopeScaling
from octetrl.layers.rotary import RotaryTable, frequencies

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192)


def test_short_waves_are_kept_long_ones_slowed_and_the_rest_lies_between() -> None:
    plain_R, scaled_R = frequencies(128, 500_000.0, None), frequencies(128, 500_000.0, SCALING)
    wavelength_R = 2 * math.pi / plain_R
    short_R, long_R = wavelength_R < 8192 / 4, wavelength_R > 8192
    between_R = ~short_R & ~long_R
    assert short_R.any() and long_R.any() and between_R.any()
    assert torch.equal(scaled_R[short_R], plain_R[short_R])
    torch.testing.assert_close(scaled_R[long_R], plain_R[long_R] / 8)
    assert ((scaled_R < plain_R) & (scaled_R > plain_R / 8))[between_R].all()
    assert (scaled_R.diff() < 0).all()


def test_a_position_past_the_table_is_an_error() -> None:
    table = RotaryTable(32, 10_000.0, None, 16, device="cpu")
    table(torch.tensor([15]))
    with pytest.raises(IndexError):
        table(torch.tensor([16]))


def test_the_table_is_no_part_of_the_state() -> None:
    assert RotaryTable(32, 10_000.0, None, 16, device="cpu").state_dict() == {}
