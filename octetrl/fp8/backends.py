"""The three block-scaled GEMMs of an FP8 linear, and the choice of their backend (docs/fp8.md §2, §9, §10).

    nt      y[M, N] = x[M, K]  w[N, K]^T      1x128 by 128x128    forward
    dgrad   dx[M, K] = dy[M, N] w[N, K]       1x128 by 128x128    the forward's product with w's codes transposed
    wgrad   dw[N, K] = dy[T, N]^T x[T, K]     1x128 by 1x128      both operands have blocks of 128 tokens
                                              1x128 by 128x128    x in square blocks: the faster pair

A backend computes the product of the codes over 128 elements of K, then `acc = fma(product, scale_x * scale_w, acc)` in
float32. K is ascending, there is one accumulator, and K is not split. A row of y therefore does not depend on the other
rows of the batch.

MXFP8 has blocks of 1x32 along the sum in both operands of all three, so dgrad needs codes of its own.

"scaled_mm" (`scaled_mm.py`) runs cuBLASLt on a Hopper GPU, "triton" (`kernels/gemm/fp8_gemm.py`, which adds it here)
runs on one of Blackwell, and so does "dot_scaled" (`kernels/gemm/mxfp8_gemm.py`) for MXFP8. "emulated"
(`emulated_gemm.py`) and "mxfp8" (`mxfp8.py`) run on any device and are meant for a CPU. For the forward on a GPU,
`kernels/gemm/fp8_gemm.py` has faster kernels with the bits of "scaled_mm".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from octetrl.fp8.emulated_gemm import emulated_dgrad, emulated_nt, emulated_wgrad
from octetrl.fp8.format import BLOCK, MX_BLOCK
from octetrl.fp8.mxfp8 import mx_backward_nt, mx_nt
from octetrl.fp8.quantize import Quantized, is_square
from octetrl.fp8.scaled_mm import scaled_mm_nt, scaled_mm_wgrad

BackendName = Literal["scaled_mm", "triton", "dot_scaled", "emulated", "mxfp8"]
FUSED: tuple[BackendName, ...] = ("scaled_mm", "triton")  # a GPU's fused forwards have their codes
ON_GPU: tuple[BackendName, ...] = (*FUSED, "dot_scaled")  # the others are emulated


class Backend(NamedTuple):
    """One way to run the three GEMMs. Each function takes two `Quantized` operands and an output dtype, and returns a
    contiguous tensor. `block`: rows and columns of a weight that share a scale."""

    nt: Callable[[Quantized, Quantized, torch.dtype], Tensor]
    dgrad: Callable[[Quantized, Quantized, torch.dtype], Tensor]
    wgrad: Callable[[Quantized, Quantized, torch.dtype], Tensor]
    block: tuple[int, int] = (BLOCK, BLOCK)


def fp8_gemm_nt(
    x: Quantized, w: Quantized, backend: BackendName = "emulated", out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """y[M, N] = x[M, K] w[N, K]^T. x: scale [M, ceil(K/128)]; w: scale [ceil(N/128), ceil(K/128)].

    Codes are E4M3 bytes. "emulated" also takes their float values (`decode_e4m3`), which saves decoding them.
    """
    _check_nt(x, w, backend)
    return BACKENDS[backend].nt(x, w, out_dtype)


def fp8_gemm_dgrad(
    dy: Quantized, w_transposed: Quantized, backend: BackendName = "emulated", out_dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """dx[M, K] = dy[M, N] w[N, K]. `w_transposed` is `transposed(w)`: codes [K, N], scale [ceil(K/128),
    ceil(N/128)].

    "scaled_mm" needs contiguous transposed codes; "emulated" also takes a view.
    """
    _check_nt(dy, w_transposed, backend)
    return BACKENDS[backend].dgrad(dy, w_transposed, out_dtype)


def fp8_gemm_wgrad(
    dy_tokens: Quantized, x_tokens: Quantized, backend: BackendName = "emulated", out_dtype: torch.dtype = torch.float32
) -> Tensor:
    """dw[N, K] from codes dy [N, T] and x [K, T] (`quantize_tokens`), T a multiple of 128, scales [., T/128].

    dy has one scale for each row. x has one for each row or, if quantised with `square`, one for 128 rows. The shape of
    x's scale decides which GEMM runs. MXFP8: both from `quantize_mx` of the transposed tensors, any T.
    """
    if BACKENDS[backend].block[0] == 1:
        _check_nt(dy_tokens, x_tokens, backend)
        return BACKENDS[backend].wgrad(dy_tokens, x_tokens, out_dtype)
    assert dy_tokens.codes.shape[1] == x_tokens.codes.shape[1], "wgrad: the operands have different numbers of tokens"
    assert dy_tokens.codes.shape[1] % BLOCK == 0, "wgrad: pad the tokens to a multiple of 128 with quantize_tokens"
    assert not is_square(dy_tokens), "wgrad: only the second operand, x, may have square blocks"
    return BACKENDS[backend].wgrad(dy_tokens, x_tokens, out_dtype)


def transposed(w: Quantized) -> Quantized:
    """A weight's codes and scales transposed, as views. This is exact because the blocks are square."""
    return Quantized(w.codes.t(), w.scale.t())


def _check_nt(x: Quantized, w: Quantized, backend: BackendName) -> None:
    rows, depth = x.codes.shape
    columns = w.codes.shape[0]
    assert w.codes.shape[1] == depth, f"K differs: x {tuple(x.codes.shape)}, w {tuple(w.codes.shape)}"
    blocks = -(-depth // BACKENDS[backend].block[1])
    assert x.scale.shape == (rows, blocks), f"activation scale {tuple(x.scale.shape)}, expected {(rows, blocks)}"
    want = (-(-columns // BACKENDS[backend].block[0]), blocks)
    assert w.scale.shape == want, f"weight scale {tuple(w.scale.shape)}, expected {want}"


BACKENDS: dict[BackendName, Backend] = {
    "scaled_mm": Backend(nt=scaled_mm_nt, dgrad=scaled_mm_nt, wgrad=scaled_mm_wgrad),
    "emulated": Backend(nt=emulated_nt, dgrad=emulated_dgrad, wgrad=emulated_wgrad),
    "mxfp8": Backend(nt=mx_nt, dgrad=mx_backward_nt, wgrad=mx_backward_nt, block=(1, MX_BLOCK)),
}
