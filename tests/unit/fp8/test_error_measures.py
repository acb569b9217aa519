"""The error measures on values whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from octetrl.fp8.errors import relative_error, saturation_share, sqnr, underflow_share
from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import dequantize_activation, quantize_activation_reference


def test_relative_error_and_sqnr() -> None:
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(reference + torch.tensor([0.0, 0.5]), reference) == pytest.approx(0.1)
    assert sqnr(reference + torch.tensor([0.0, 0.5]), reference) == pytest.approx(20.0)
    assert relative_error(reference, reference) == 0.0 and sqnr(reference, reference) == math.inf
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_error(reference, torch.zeros(2)) == math.inf


def test_shares() -> None:
    codes = torch.tensor([448.0, -448.0, 1.0, 0.0]).to(E4M3)
    assert saturation_share(codes) == 0.5
    assert saturation_share(codes[:0]) == 0.0
    assert underflow_share(codes, torch.tensor([448.0, -448.0, 1.0, 1e-5])) == 0.25
    assert underflow_share(codes, torch.zeros(4)) == 0.0


def test_the_error_that_the_docstring_promises() -> None:
    x = torch.randn(256, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    back = dequantize_activation(quantize_activation_reference(x))
    assert relative_error(back, x) == pytest.approx(0.026, abs=0.001)
    assert sqnr(back, x) == pytest.approx(31.6, abs=0.4)
