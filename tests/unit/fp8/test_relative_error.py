"""The relative error on values whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from octetrl.fp8.quantize import dequantize_activation, quantize_activation_reference
from octetrl.fp8.relative_error import relative_error


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
