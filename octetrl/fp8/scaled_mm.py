"""The "scaled_mm" backend: block-scaled FP8 GEMMs by cuBLASLt on a Hopper GPU, through `torch.nn.functional.scaled_mm`.

Its demands on the operands follow. This file pads the shapes that do not meet them. A usual model's shapes all do,
except small batches.

- The scale of the 1x128 operand is [M, K/128] with strides (1, M). The scale of the 128x128 operand is
  [roundup(K/128, 4), N/128] with strides (1, roundup(K/128, 4)). Early versions of torch gave wrong numbers without an
  error if this padding was missing (pytorch #166752).
- The second operand is column-major. K and N are multiples of 128. M is a multiple of 4; the quantisers leave room for
  the added rows.
- M is at least 32. Below it cuBLAS may pick a kernel that adds in another order, and a row's bits would change with the
  batch.

A Hopper GPU keeps fewer than 24 bits inside the sum over 128 elements. This is a property of the hardware and is the
same for rollout and training.

M rows, N columns, K depth of the GEMM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.format import BLOCK
from octetrl.fp8.quantize import Quantized, is_square

_SMALLEST_SAFE_M = 32


def scaled_mm_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    recipe = F.ScalingType
    rows, columns = x.codes.shape[0], w.codes.shape[0]
    padded_rows = max(_SMALLEST_SAFE_M, _round_up(rows, 4))
    y_MN = F.scaled_mm(
        _padded_codes(x.codes, padded_rows, _round_up(x.codes.shape[1], BLOCK)),
        _padded_codes(w.codes, _round_up(columns, BLOCK), _round_up(w.codes.shape[1], BLOCK)).t(),
        _first_index_contiguous(x.scale, padded_rows),
        recipe.BlockWise1x128,
        _padded_weight_scale(w.scale),
        recipe.BlockWise128x128,
        output_dtype=torch.bfloat16,
    )
    return _without_padding(y_MN, rows, columns, out_dtype)


def scaled_mm_wgrad(dy_tokens: Quantized, x_tokens: Quantized, out_dtype: torch.dtype) -> Tensor:
    if is_square(x_tokens):
        return scaled_mm_nt(dy_tokens, x_tokens, out_dtype)  # x's tokens have the place of a weight's K
    recipe = F.ScalingType
    rows, columns, tokens = dy_tokens.codes.shape[0], x_tokens.codes.shape[0], x_tokens.codes.shape[1]
    padded_rows, padded_columns = max(_SMALLEST_SAFE_M, _round_up(rows, 16)), _round_up(columns, 16)
    dw_NK = F.scaled_mm(
        _padded_codes(dy_tokens.codes, padded_rows, tokens),
        _padded_codes(x_tokens.codes, padded_columns, tokens).t(),
        _first_index_contiguous(dy_tokens.scale, padded_rows),
        recipe.BlockWise1x128,
        _first_index_contiguous(x_tokens.scale, padded_columns),
        recipe.BlockWise1x128,
        output_dtype=torch.bfloat16,
    )
    return _without_padding(dw_NK, rows, columns, out_dtype)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _without_padding(y_MN: Tensor, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """The first rows and columns, contiguous as every backend's result is. Copied only if columns were padded."""
    return y_MN[:rows, :columns].to(dtype).contiguous()


def _padded_codes(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Contiguous codes of this shape, with zeros (byte 0) in added columns. Added rows may hold anything, even the
    memory behind the codes, because they only affect rows of the product that are dropped."""
    assert codes.is_contiguous(), "scaled_mm: codes must be contiguous"
    if codes.shape == (rows, columns):
        return codes
    if codes.shape[1] == columns and _has_room(codes, rows * columns):
        return codes.as_strided((rows, columns), (columns, 1))
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=codes.device)
    padded[: codes.shape[0], : codes.shape[1]] = codes.view(torch.uint8)
    return padded.view(codes.dtype)


def _first_index_contiguous(scale: Tensor, rows: int) -> Tensor:
    """`scale` as [rows, blocks] with strides (1, rows). Added rows hold ones, or whatever the memory holds."""
    if scale.shape[0] == rows:
        return scale.t().contiguous().t()
    if scale.stride() == (1, rows) and _has_room(scale, rows * scale.shape[1]):
        return scale.as_strided((rows, scale.shape[1]), (1, rows))
    padded = torch.ones(scale.shape[1], rows, device=scale.device)
    padded[:, : scale.shape[0]] = scale.t()
    return padded.t()


def _has_room(tensor: Tensor, elements: int) -> bool:
    """Whether the tensor's memory has `elements` from its first one on. The quantisers add some (`empty_rows`)."""
    behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return behind >= elements * tensor.element_size()


def _padded_weight_scale(scale: Tensor) -> Tensor:
    """[N/128, K/128] -> [roundup(K/128, 4), N/128] with strides (1, roundup(K/128, 4))."""
    columns = _round_up(scale.shape[1], 4)
    if scale.shape[1] == columns:
        return scale.contiguous().t()
    return F.pad(scale, (0, columns - scale.shape[1]), value=1.0).t()
