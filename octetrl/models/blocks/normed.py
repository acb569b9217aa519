"""The norm in front of a block in the rollout's forward, in the forms that the block's ops read.

    reader          one linear reads the norm: its operand
    codes_reader    FP8 linears and other ops read it: codes and the model's dtype, from one kernel
    neither         the model's dtype

T tokens, E hidden size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.rows.add_rms_norm import Addend, add_rms_norm, add_rms_norm_both
from octetrl.layers.linear import Projection
from octetrl.layers.norm import RMSNorm
from octetrl.models.blocks.products import Operand, wants_codes

if TYPE_CHECKING:
    from octetrl.models.blocks.block import Block


class BothForms(NamedTuple):
    """A norm's result, and its codes for the linears that read codes."""

    values_TE: Tensor
    codes: Quantized


Normed = Operand | BothForms


def add_norm(delta: Addend, hidden_TE: Tensor, norm: RMSNorm, block: Block | None) -> tuple[Tensor, Normed]:
    """The residual stream with `delta` added, and its norm as `block` reads it. None: in the model's dtype."""
    reader, codes_reader = (None, None) if block is None else (block.reader, block.codes_reader)
    quantize, power_of_two = wants_codes(reader if codes_reader is None else codes_reader)
    if quantize and codes_reader is not None:
        hidden_TE, values_TE, codes = add_rms_norm_both(delta, hidden_TE, norm.multiplier, norm.eps, power_of_two)
        return hidden_TE, BothForms(values_TE, codes)
    return add_rms_norm(delta, hidden_TE, norm.multiplier, norm.eps, quantize=quantize, power_of_two=power_of_two)


def norm_for(norm: RMSNorm, x_TE: Tensor, reader: Projection) -> Operand:
    """The norm of x, which nothing is added to, as `reader`'s operand."""
    quantize, power_of_two = wants_codes(reader)
    return add_rms_norm(None, x_TE, norm.multiplier, norm.eps, quantize=quantize, power_of_two=power_of_two)[1]


def operand_of(linear: Projection, x: Normed) -> Operand:
    """The form that `linear` reads."""
    if isinstance(x, BothForms):
        return x.codes if wants_codes(linear)[0] else x.values_TE
    return x


def stored_form(x: Normed) -> Operand:
    """The form that the doctor compares: the values, if there are any."""
    return x.values_TE if isinstance(x, BothForms) else x


def values_of(x: Normed) -> Tensor:
    """The result in the model's dtype."""
    values = stored_form(x)
    assert isinstance(values, Tensor), "several ops read the norm's result, so it is not only codes"
    return values
