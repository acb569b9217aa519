"""What all FP8 linears of a model do after an optimizer step, in few launches.

    requantize       the weights' codes, in place                               one worker
    quantize_rows    codes of the rows that this worker owns                    several workers, before they exchange
    adopt_codes      transposed codes of what others wrote                      behind the exchange

Each has the bytes of the linears' own methods, called one after another. The host's work for a launch takes longer than
the kernel on the rows of most weights, so the kernels take a table of weights (kernels/table.py).

R rows, K in_features.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.format import BLOCK
from octetrl.kernels.quantize.quantize_weight import check_scales
from octetrl.kernels.quantize.quantize_weights import QuantizedWeight, quantize_weights
from octetrl.kernels.quantize.transpose_many_codes import transpose_many_codes
from octetrl.layers.linear import Float8Linear
from octetrl.layers.weight_memory import place_of_rows, rows_per_unit


class LinearRows(NamedTuple):
    """New rows of a linear's weight, from row `first` on, which begins a block."""

    linear: Float8Linear
    first: int
    rows_RK: Tensor


@torch.no_grad()
def requantize(linears: Mapping[str, Float8Linear]) -> None:
    """`requantize` of each linear. `linears`: by the names for errors. One host synchronisation.

    Raises NonFiniteError naming a weight that is not finite. The codes of all must not be used then.
    """
    weights = {name: linear.weight_to_quantize() for name, linear in linears.items()}
    _quantize({name: (linear, weights[name]) for name, linear in linears.items()})
    for linear in linears.values():
        linear.mark_codes_current()
    check_scales({name: (one.w_NK, one.out.scale) for name, one in weights.items()})


@torch.no_grad()
def quantize_rows(parts: Mapping[str, LinearRows]) -> None:
    """Quantises rows into their places in the linears' codes and scales. `parts`: by the names for errors.

    Raises NonFiniteError naming the weight if it is not finite on a CPU. On a GPU its scales are then NaN.
    """
    places = {name: QuantizedWeight(one.rows_RK, place_of_rows(*one)) for name, one in parts.items()}
    _quantize({name: (one.linear, places[name]) for name, one in parts.items()})


def adopt_codes(linears: Collection[Float8Linear]) -> None:
    """`adopt_codes` of each linear."""
    pairs = [(one.codes, one.codes_transposed) for one in linears]
    transpose_many_codes([(codes, transposed) for codes, transposed in pairs if transposed is not None])
    for linear in linears:
        linear.mark_codes_current()


def _quantize(weights: Mapping[str, tuple[Float8Linear, QuantizedWeight]]) -> None:
    """Weights with blocks of 128 rows together. Others by themselves: experts whose rows are no whole blocks."""
    together: dict[bool, dict[str, QuantizedWeight]] = {}
    for name, (linear, one) in weights.items():
        if rows_per_unit(linear) == BLOCK:
            together.setdefault(linear.power_of_two, {})[name] = one
        else:
            linear.quantize(one.w_NK, name=name, out=one.out, transposed_KN=one.transposed_KN)
    for power_of_two, alike in together.items():
        quantize_weights(alike, power_of_two)
