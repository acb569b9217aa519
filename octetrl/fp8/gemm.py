"""The three block-scaled GEMMs and their back-ends (docs/fp8.md §2, §9, §10).

    nt      y[M, N]  = x[M, K]  w[N, K]^T      1x128 by 128x128    forward
    dgrad   dx[M, K] = dy[M, N] w[N, K]        1x128 by 128x128    forward's product with w's codes transposed
    wgrad   dw[N, K] = dy[T, N]^T x[T, K]      1x128 by 1x128      both operands blocked along tokens
                                               1x128 by 128x128    x in square blocks: the faster pair

Every back-end forms the 128-wide partial product of codes, then `acc = fma(partial, scale_x * scale_w, acc)`
in float32 with K ascending, one accumulator, no split. A row of y therefore does not depend on who else is in
the batch.

"scaled_mm" (Hopper): cuBLASLt through `torch.nn.functional.scaled_mm`. Its demands, met here by padding where
a shape does not meet them (an ordinary model's shapes all do, except small batches):
- scale of the 1x128 operand [M, K/128] with strides (1, M); of the 128x128 one [roundup(K/128, 4), N/128]
  with strides (1, roundup(K/128, 4)); early versions gave wrong numbers in silence when that padding was
  missing (pytorch #166752);
- the second operand column-major; K and N multiples of 128; M a multiple of 4, for which the quantisers leave room;
- M >= 32: below it cuBLAS may pick a kernel that sums in another order, so rows would change bits with the
  batch. Hopper keeps fewer than 24 bits inside a 128-wide partial; that is the hardware's, the same for
  rollout and training.

"emulated" (any device, meant for a CPU): products of E4M3 values are multiples of 2^-18 below 2^18, so the
sum of 128 of them fits float64's 53 bits *exactly*, in whatever order BLAS takes them. Rounding that sum to
float32 and doing the fma through float64 gives bits that depend on nothing but the row itself. Price: float64
runs at half float32's rate. Backward needs no such promise and runs in float32 on dequantised values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.config.errors import UserError
from octetrl.fp8.format import BLOCK, decode_e4m3
from octetrl.fp8.quantize import (
    Quantized,
    dequantize_activation,
    dequantize_tokens,
    dequantize_weight,
    is_square,
    row_chunks,
)

BackendName = Literal["scaled_mm", "emulated"]
_SMALLEST_SAFE_M = 32


class Backend(NamedTuple):
    """One way to run the three GEMMs; each takes Quantized operands and an output dtype, and returns a contiguous
    tensor."""

    nt: Callable[[Quantized, Quantized, torch.dtype], Tensor]
    dgrad: Callable[[Quantized, Quantized, torch.dtype], Tensor]
    wgrad: Callable[[Quantized, Quantized, torch.dtype], Tensor]


def choose_backend(device: torch.device | str, emulate: bool | None = None) -> BackendName:
    """The back-end for `device`; `emulate` True or False insists, None takes what the device can do.

    Raises UserError for a GPU that is not Hopper, and for a CPU told not to emulate.
    """
    device = torch.device(device)
    if emulate:
        return "emulated"
    if device.type == "cpu":
        if emulate is None:
            return "emulated"
        raise UserError("fp8.emulate=false on a CPU: a CPU has no FP8 GEMM; set fp8.emulate=true or use a Hopper GPU")
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability == (9, 0):
            return "scaled_mm"
        given = f"{torch.cuda.get_device_name(device)} (SM{capability[0]}{capability[1]})"
    else:
        given = f"device '{device}'"
    raise UserError(
        f"{given} has no block-scaled FP8 GEMM, which needs a Hopper GPU (SM90);"
        f" set fp8.emulate=true to run FP8's numbers without its speed, or precision: bf16"
    )


def fp8_gemm_nt(
    x: Quantized, w: Quantized, backend: BackendName = "emulated", out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """y[M, N] = x[M, K] w[N, K]^T. x: scale [M, ceil(K/128)]; w: scale [ceil(N/128), ceil(K/128)].

    Codes may be E4M3 bytes or, emulated only, their values (`decode_e4m3`), which saves decoding.
    """
    _check_nt(x, w)
    return BACKENDS[backend].nt(x, w, out_dtype)


def fp8_gemm_dgrad(
    dy: Quantized, w_transposed: Quantized, backend: BackendName = "emulated", out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """dx[M, K] = dy[M, N] w[N, K]. `w_transposed` is `transposed(w)`: codes [K, N], scale [ceil(K/128),
    ceil(N/128)].

    On scaled_mm the transposed codes must be contiguous; emulated, a view does.
    """
    _check_nt(dy, w_transposed)
    return BACKENDS[backend].dgrad(dy, w_transposed, out_dtype)


def fp8_gemm_wgrad(
    dy_tokens: Quantized, x_tokens: Quantized, backend: BackendName = "emulated", out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """dw[N, K] from codes dy [N, T] and x [K, T] (`quantize_tokens`), T a multiple of 128, scales [., T/128].

    dy has a scale a row; x too, or one for 128 rows (`square`): its scale's shape tells which, and the GEMM to run.
    """
    assert dy_tokens.codes.shape[1] == x_tokens.codes.shape[1], "wgrad operands differ in tokens"
    assert dy_tokens.codes.shape[1] % BLOCK == 0, "wgrad operands must be padded to 128 tokens: quantize_tokens does"
    assert not is_square(dy_tokens), "only wgrad's second operand, x, may have square blocks"
    return BACKENDS[backend].wgrad(dy_tokens, x_tokens, out_dtype)


def transposed(w: Quantized) -> Quantized:
    """A weight's codes and scales transposed, as views: exact, because its blocks are square."""
    return Quantized(w.codes.t(), w.scale.t())


def _check_nt(x: Quantized, w: Quantized) -> None:
    rows, depth = x.codes.shape
    columns = w.codes.shape[0]
    assert w.codes.shape[1] == depth, f"contraction differs: {tuple(x.codes.shape)} by {tuple(w.codes.shape)}"
    blocks = -(-depth // BLOCK)
    assert x.scale.shape == (rows, blocks), f"activation scale {tuple(x.scale.shape)}, want {(rows, blocks)}"
    want = (-(-columns // BLOCK), blocks)
    assert w.scale.shape == want, f"weight scale {tuple(w.scale.shape)}, want {want}"


# ---------------------------------------------------------------- emulated


def _emulated_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
    values_NK = decode_e4m3(w.codes, torch.float64)
    scale_NB = w.scale.repeat_interleave(BLOCK, 0)[: values_NK.shape[0]]
    values_MK = decode_e4m3(x.codes)
    out_MN = torch.empty(values_MK.shape[0], values_NK.shape[0], dtype=out_dtype, device=values_MK.device)
    for rows in row_chunks(out_MN.shape[0], out_MN.shape[1], 1):
        out_MN[rows] = _emulated_rows(values_MK[rows], x.scale[rows], values_NK, scale_NB)
    return out_MN


def _emulated_rows(values_MK: Tensor, scale_MB: Tensor, values_NK: Tensor, scale_NB: Tensor) -> Tensor:
    """acc[M, N] in float32: exact 128-wide partials, then one fma a block, K ascending."""
    acc_MN = torch.empty(0)
    for block in range(scale_NB.shape[1]):
        depth = slice(block * BLOCK, (block + 1) * BLOCK)
        partial_MN = (values_MK[:, depth].double() @ values_NK[:, depth].t()).float()
        scale_MN = scale_MB[:, block, None] * scale_NB[:, block]
        if block == 0:
            acc_MN = partial_MN.mul_(scale_MN)  # fma with an accumulator of zero is a rounded product
        else:
            acc_MN = torch.addcmul(acc_MN.double(), partial_MN.double(), scale_MN.double()).float()
    return acc_MN


def _emulated_dgrad(dy: Quantized, w_transposed: Quantized, out_dtype: torch.dtype) -> Tensor:
    return (dequantize_activation(dy) @ dequantize_weight(w_transposed).t()).to(out_dtype)


def _emulated_wgrad(dy_tokens: Quantized, x_tokens: Quantized, out_dtype: torch.dtype) -> Tensor:
    return (dequantize_tokens(dy_tokens).t() @ dequantize_tokens(x_tokens)).to(out_dtype)


# ---------------------------------------------------------------- scaled_mm


def _scaled_mm_nt(x: Quantized, w: Quantized, out_dtype: torch.dtype) -> Tensor:
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


def _scaled_mm_wgrad(dy_tokens: Quantized, x_tokens: Quantized, out_dtype: torch.dtype) -> Tensor:
    if is_square(x_tokens):
        return _scaled_mm_nt(dy_tokens, x_tokens, out_dtype)  # x's tokens stand where a weight's K does
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
    """The first rows and columns, contiguous as every back-end's result is: copied only if columns were padded."""
    return y_MN[:rows, :columns].to(dtype).contiguous()


def _padded_codes(codes: Tensor, rows: int, columns: int) -> Tensor:
    """Contiguous codes of this shape, with zeros (byte 0) in the columns beyond the given ones. Rows beyond them may
    hold anything, what lies behind the codes included: they are other rows of the product."""
    assert codes.is_contiguous(), "scaled_mm wants contiguous codes"
    if codes.shape == (rows, columns):
        return codes
    if codes.shape[1] == columns and _has_room(codes, rows * columns):
        return codes.as_strided((rows, columns), (columns, 1))
    padded = torch.zeros(rows, columns, dtype=torch.uint8, device=codes.device)
    padded[: codes.shape[0], : codes.shape[1]] = codes.view(torch.uint8)
    return padded.view(codes.dtype)


def _first_index_contiguous(scale: Tensor, rows: int) -> Tensor:
    """[rows, blocks] with strides (1, rows); beyond the given rows ones, or what lies there."""
    if scale.shape[0] == rows:
        return scale.t().contiguous().t()
    if scale.stride() == (1, rows) and _has_room(scale, rows * scale.shape[1]):
        return scale.as_strided((rows, scale.shape[1]), (1, rows))
    padded = torch.ones(scale.shape[1], rows, device=scale.device)
    padded[:, : scale.shape[0]] = scale.t()
    return padded.t()


def _has_room(tensor: Tensor, elements: int) -> bool:
    """Whether so many lie in the tensor's memory from its first on: the quantisers leave some (`empty_rows`)."""
    behind = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    return behind >= elements * tensor.element_size()


def _padded_weight_scale(scale: Tensor) -> Tensor:
    """[N/128, K/128] -> [roundup(K/128, 4), N/128] with strides (1, roundup(K/128, 4))."""
    columns = _round_up(scale.shape[1], 4)
    if scale.shape[1] == columns:
        return scale.contiguous().t()
    return F.pad(scale, (0, columns - scale.shape[1]), value=1.0).t()


BACKENDS: dict[BackendName, Backend] = {
    "scaled_mm": Backend(nt=_scaled_mm_nt, dgrad=_scaled_mm_nt, wgrad=_scaled_mm_wgrad),
    "emulated": Backend(nt=_emulated_nt, dgrad=_emulated_dgrad, wgrad=_emulated_wgrad),
}
