"""How far quantised numbers lie from the true ones: the measures that tests, metrics and reports share.

Each takes tensors of one shape, works in float64 and returns a float (so it reads the host: not for the hot
path). E4M3 with a scale per block of 128 rounds normal values with a relative error of about 0.026 (SQNR 31
dB); a product of two such operands lies at about 0.037.
"""

from __future__ import annotations

import math

from torch import Tensor

from octetrl.fp8.format import E4M3_MAX, decode_e4m3


def relative_error(measured: Tensor, reference: Tensor) -> float:
    """||measured - reference|| / ||reference||, Frobenius; 0 when both are zero."""
    difference = float((measured.detach().double() - reference.detach().double()).norm())
    size = float(reference.detach().double().norm())
    if size == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / size


def sqnr(measured: Tensor, reference: Tensor) -> float:
    """Signal to quantisation noise in decibels, -20 log10(relative_error); infinite when they are equal."""
    error = relative_error(measured, reference)
    return math.inf if error == 0.0 else -20.0 * math.log10(error)


def saturation_share(codes: Tensor) -> float:
    """Share of E4M3 codes at ±448, the clamp's own value (a block's amax is one of them by construction)."""
    return float((decode_e4m3(codes).abs() == E4M3_MAX).double().mean()) if codes.numel() else 0.0


def underflow_share(codes: Tensor, original: Tensor) -> float:
    """Share of nonzero originals whose code is zero."""
    nonzero = original != 0
    lost = nonzero & (decode_e4m3(codes) == 0)
    return float(lost.sum()) / max(1, int(nonzero.sum()))
