"""Quantise many weights in one launch, as `quantize_weight` does one after another.

After an optimizer step a model has hundreds of weights to quantise. On small ones, or on the rows of one of several
workers, the launches take longer than the kernels. Here a program reads its weight from a table (kernels/table.py), and
then does what a program of quantize_weight.py does, so the bytes are the same.

Weights whose sizes are no multiples of 16 have a launch of their own. Weights may be BF16 or float32, with transposed
codes or without: each kind that occurs is one launch.

Layout: as in quantize_weight.py. Transposed codes only of a weight whose rows are a multiple of 128.

N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.fp8.format import BLOCK
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.quantize.quantize_tokens import TOKEN_BLOCKS
from octetrl.kernels.quantize.quantize_weight import (
    REGISTERS,
    WARPS,
    quantize_block,
    quantize_weight,
    quantize_weight_triton,
)
from octetrl.kernels.table import ALIGNED, Entry, all_aligned, parts_of, table_of

# A BF16 weight without transposed codes: five programs run on a multiprocessor, as of quantize_weight's kernel. Left to
# the compiler, registers are enough for four.
ROWS_REGISTERS = 96
TRITON_TYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class QuantizedWeight(NamedTuple):
    """A weight [N, K], and where its codes go: all rows of one, or whole blocks of rows."""

    w_NK: Tensor
    out: Quantized
    transposed_KN: Tensor | None = None

    @property
    def fits_table(self) -> bool:
        """Whether the table's kernel can take it: every row, and every transposed row, begins at 16 bytes. With
        transposed codes the rows are whole blocks, because an incomplete one would write past them."""
        rows, columns = self.w_NK.shape
        whole = self.transposed_KN is None or rows % BLOCK == 0
        sizes_fit = not (columns | self.w_NK.stride(0)) % ALIGNED and self.w_NK.stride(1) == 1
        return whole and sizes_fit and self.w_NK.numel() > 0 and all_aligned(self.w_NK, *self.codes)

    @property
    def codes(self) -> tuple[Tensor, ...]:
        """In both orientations, if there are two."""
        return (self.out.codes,) if self.transposed_KN is None else (self.out.codes, self.transposed_KN)


@triton.jit
def _quantize_weights_kernel(
    entry_ptr, table_ptr, COLUMNS: tl.constexpr, DTYPE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    TRANSPOSED: tl.constexpr, ON_GPU: tl.constexpr, TOKEN_BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    ALIGNED: tl.constexpr,
):  # fmt: skip
    table_ptr += tl.load(entry_ptr + tl.program_id(0)) * COLUMNS
    w_ptr = tl.multiple_of(tl.load(table_ptr).to(tl.pointer_type(DTYPE)), ALIGNED)
    code_ptr = tl.multiple_of(tl.load(table_ptr + 1).to(tl.pointer_type(tl.uint8)), ALIGNED)
    transposed_ptr = tl.multiple_of(tl.load(table_ptr + 2).to(tl.pointer_type(tl.uint8)), ALIGNED)
    scale_ptr = tl.load(table_ptr + 3).to(tl.pointer_type(tl.float32))
    N = tl.load(table_ptr + 4).to(tl.int32)
    if TRANSPOSED:
        N = N // BLOCK * BLOCK
    K = tl.load(table_ptr + 5).to(tl.int32) * ALIGNED
    row_stride = tl.load(table_ptr + 6).to(tl.int32) * ALIGNED
    tile = tl.program_id(0) - tl.load(table_ptr + 7).to(tl.int32)
    quantize_block(
        tile, w_ptr, code_ptr, transposed_ptr, scale_ptr, N, K, row_stride,
        POWER_OF_TWO, True, TRANSPOSED, ON_GPU, TOKEN_BLOCKS, BLOCK,
    )  # fmt: skip


def quantize_weights_triton(weights: Mapping[str, QuantizedWeight], power_of_two: bool = False) -> None:
    """The Triton launcher."""
    kinds: dict[tuple[torch.dtype, bool], list[QuantizedWeight]] = {}
    for one in weights.values():
        if one.fits_table:
            kinds.setdefault((one.w_NK.dtype, one.transposed_KN is not None), []).append(one)
        elif one.w_NK.numel() > 0:
            quantize_weight_triton(one.w_NK, power_of_two, one.out, one.transposed_KN)
    for (dtype, transposed), alike in kinds.items():
        device = alike[0].w_NK.device
        blocks = [parts_of(one.w_NK.shape[0], BLOCK) * parts_of(one.w_NK.shape[1], BLOCK) for one in alike]
        table = table_of([_entry(one) for one in alike], blocks, device)
        registers = ROWS_REGISTERS if dtype == torch.bfloat16 and not transposed else REGISTERS
        _quantize_weights_kernel[(table.programs,)](
            *table, COLUMNS=table.columns, DTYPE=TRITON_TYPES[dtype], POWER_OF_TWO=power_of_two,
            TRANSPOSED=transposed, ON_GPU=device.type == "cuda", TOKEN_BLOCKS=TOKEN_BLOCKS, BLOCK=BLOCK,
            ALIGNED=ALIGNED, num_warps=WARPS, maxnreg=registers, enable_fp_fusion=False,
        )  # fmt: skip


def _entry(one: QuantizedWeight) -> Entry:
    assert one.out.scale.is_contiguous() and all(codes.is_contiguous() for codes in one.codes), "must be contiguous"
    rows, columns = one.w_NK.shape
    transposed = 0 if one.transposed_KN is None else one.transposed_KN.data_ptr()
    places = (one.w_NK.data_ptr(), one.out.codes.data_ptr(), transposed, one.out.scale.data_ptr())
    return (*places, rows, columns // ALIGNED, one.w_NK.stride(0) // ALIGNED)


def quantize_weights_reference(weights: Mapping[str, QuantizedWeight], power_of_two: bool = False) -> None:
    """The same by one `quantize_weight` each."""
    for name, one in weights.items():
        quantize_weight(one.w_NK, power_of_two, name=name, out=one.out, transposed_KN=one.transposed_KN, check=False)


@torch.no_grad()
def quantize_weights(weights: Mapping[str, QuantizedWeight], power_of_two: bool = False) -> None:
    """Writes the codes and scales of all weights, which are on one device. The host waits for nothing.

    A CPU raises NonFiniteError, which names the first weight that is not finite. On a GPU a scale of such a weight is
    NaN: call `check_scales`.
    """
    on_gpu = any(one.w_NK.is_cuda for one in weights.values())
    (quantize_weights_triton if on_gpu else quantize_weights_reference)(weights, power_of_two)
