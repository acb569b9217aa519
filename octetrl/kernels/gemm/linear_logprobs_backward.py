"""The backward of log-prob and entropy from hidden states and lm_head (linear_logprobs.py has the forward).

With upstream gradients a and b of log-prob and entropy, z = logits / temperature, p = exp(z - lse):

    dlogits = (a * (onehot(target) - p) - b * p * (z - lse + entropy)) / temperature
    dhidden = dlogits @ weight,   dweight = dlogits^T @ hidden

The forward's own function recomputes the logits, `chunk` rows at a time. On a GPU their gradients are rounded to the
weight's dtype, because they are the operand of two GEMMs. The gradients of `GATHERED` chunks are collected before they
are multiplied. The weight's gradient is summed in float32 inside its GEMM (`add_product`). It is rounded once at the
end, because autograd requires a gradient in the parameter's dtype. If no loss uses the entropy, its half of the formula
is not computed.

Cost with BF16. FLOPs: 6 N V E, a third of it for the logits. Bytes besides the GEMMs' operands: 8 N V of logits,
written and read; 2 N V written and 4 N V read of their gradient; 8 V E of the weight's gradient for each group of
chunks, and 6 V E to round it. With groups of one chunk of 1024 rows, those 8 V E would take two thirds of their GEMM's
time. A separate product, added afterwards, would make them 20 V E. Memory: 4 chunk V + 2 GATHERED chunk V + 4 V E for
any N.

No log-prob depends on these sums, so their order is not fixed.

N rows (trained tokens), V vocabulary, E hidden size, C rows of one chunk, G rows of a group of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

GATHERED = 4  # chunks whose logit gradients are multiplied together
VOCAB_BLOCK = 4096  # columns of one program


class HeadCut(Protocol):
    """Which rows of lm_head a weight has, of several workers that share it."""

    @property
    def vocab_size(self) -> int:
        """V, of all workers."""

    def whole(self, logits_NW: Tensor, /) -> Tensor:
        """The logits [N, V] of all workers."""

    def of(self, dlogits_NV: Tensor, /) -> Tensor:
        """The columns of this weight's rows, as a view."""

    def sum(self, dhidden_NE: Tensor, /) -> Tensor:
        """The sum over the workers, float32."""


@triton.jit
def _logits_gradient_kernel(
    logits_ptr,
    targets_ptr,
    temperature_ptr,
    lse_ptr,
    entropy_ptr,
    dlogprobs_ptr,
    dentropy_ptr,
    dlogits_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    inverse = tl.div_rn(1.0, tl.load(temperature_ptr + row))
    logit = tl.load(logits_ptr + row * VOCAB + column, mask=inside, other=float("-inf"))
    log_p = logit * inverse - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    dlogprob = tl.load(dlogprobs_ptr + row)
    dz = tl.where(column == tl.load(targets_ptr + row), dlogprob, 0.0) - dlogprob * p
    if ENTROPY:
        surprise = tl.where(p > 0.0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)
        dz -= tl.load(dentropy_ptr + row) * surprise
    tl.store(dlogits_ptr + row * VOCAB + column, (dz * inverse).to(dlogits_ptr.dtype.element_ty), mask=inside)


def logits_gradient(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    lse_N: Tensor,
    entropy_N: Tensor,
    dlogprobs_N: Tensor,
    dentropy_N: Tensor | None,
    out_NV: Tensor,
) -> None:
    """Write dlogits into `out_NV`, rounded to its dtype. logits are float32; both are contiguous. lse and entropy come
    from the forward."""
    launch = logits_gradient_triton if logits_NV.is_cuda else logits_gradient_reference
    launch(logits_NV, targets_N, temperature_N, lse_N, entropy_N, dlogprobs_N, dentropy_N, out_NV)


def logits_gradient_triton(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    lse_N: Tensor,
    entropy_N: Tensor,
    dlogprobs_N: Tensor,
    dentropy_N: Tensor | None,
    out_NV: Tensor,
) -> None:
    """The kernel's launcher."""
    assert logits_NV.is_contiguous() and out_NV.is_contiguous(), "logits and their gradient must be contiguous"
    num_rows, vocab_size = logits_NV.shape
    if num_rows:
        _logits_gradient_kernel[(num_rows, triton.cdiv(vocab_size, VOCAB_BLOCK))](
            logits_NV,
            targets_N,
            temperature_N,
            lse_N,
            entropy_N,
            dlogprobs_N,
            dentropy_N,
            out_NV,
            VOCAB=vocab_size,
            BLOCK=VOCAB_BLOCK,
            ENTROPY=dentropy_N is not None,
            num_warps=8,
        )


def logits_gradient_reference(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    lse_N: Tensor,
    entropy_N: Tensor,
    dlogprobs_N: Tensor,
    dentropy_N: Tensor | None,
    out_NV: Tensor,
) -> None:
    """The same in plain torch: float32, rounded once."""
    log_p_NV = logits_NV / temperature_N[:, None] - lse_N[:, None]
    p_NV = log_p_NV.exp()
    dz_NV = p_NV * -dlogprobs_N[:, None]
    if dentropy_N is not None:
        surprise_NV = torch.where(p_NV > 0, p_NV * (log_p_NV + entropy_N[:, None]), 0.0)
        dz_NV -= dentropy_N[:, None] * surprise_NV
    dz_NV.scatter_add_(1, targets_N[:, None], dlogprobs_N[:, None])
    out_NV.copy_(dz_NV.div_(temperature_N[:, None]))


def add_product(sum_VE: Tensor, dlogits_NV: Tensor, hidden_NE: Tensor, *, first: bool) -> None:
    """sum = dlogits^T @ hidden if `first` (the old content of `sum` is not read), else sum += the product. `sum_VE` is
    float32; the operands have one dtype."""
    if not sum_VE.is_cuda:
        sum_VE.addmm_(dlogits_NV.t(), hidden_NE, beta=0 if first else 1)
    elif first:
        torch.mm(dlogits_NV.t(), hidden_NE, out_dtype=torch.float32, out=sum_VE)
    else:
        torch.addmm(sum_VE, dlogits_NV.t(), hidden_NE, out_dtype=torch.float32, out=sum_VE)


def linear_logprobs_backward(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    gradient_into: Callable[[slice, Tensor], None],
    chunk: int,
    needs: tuple[bool, bool] = (True, True),
    cut: HeadCut | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden and weight, in their dtypes; None for one that `needs` does not ask for.

    gradient_into(rows, dlogits_CV) writes the gradient to the logits of these rows, at most `chunk` of them. `cut`: the
    weight has some of the V rows.
    """
    if cut is not None:
        gradient_into = _of_own_rows(gradient_into, cut)
    num_rows = hidden_NE.shape[0]
    operand = weight_VE.dtype if weight_VE.is_cuda else torch.float32
    weight_operand_VE = weight_VE.to(operand)
    dhidden_NE = torch.empty_like(hidden_NE, dtype=operand) if needs[0] else None
    dweight_VE = torch.empty_like(weight_VE, dtype=torch.float32) if needs[1] else None
    gathered = min(num_rows, GATHERED * chunk)
    dlogits_GV = torch.empty(gathered, weight_VE.shape[0], dtype=operand, device=hidden_NE.device)
    for group in pieces(0, num_rows, gathered):
        dlogits_CV = dlogits_GV[: group.stop - group.start]
        for rows in pieces(group.start, group.stop, chunk):
            gradient_into(rows, dlogits_CV[rows.start - group.start : rows.stop - group.start])
        if dhidden_NE is not None:
            torch.mm(dlogits_CV, weight_operand_VE, out=dhidden_NE[group])
        if dweight_VE is not None:
            add_product(dweight_VE, dlogits_CV, hidden_NE[group].to(operand), first=group.start == 0)
    if cut is not None and dhidden_NE is not None:
        dhidden_NE = cut.sum(dhidden_NE)
    del dlogits_CV, dlogits_GV  # free them before the weight's gradient exists twice
    return (
        None if dhidden_NE is None else dhidden_NE.to(hidden_NE.dtype),
        None if dweight_VE is None else dweight_VE.to(weight_VE.dtype),
    )


def _of_own_rows(gradient_into: Callable[[slice, Tensor], None], cut: HeadCut) -> Callable[[slice, Tensor], None]:
    def own_into(rows: slice, dlogits_CW: Tensor) -> None:
        dlogits_CV = dlogits_CW.new_empty(dlogits_CW.shape[0], cut.vocab_size)
        gradient_into(rows, dlogits_CV)
        dlogits_CW.copy_(cut.of(dlogits_CV))

    return own_into


def pieces(start: int, stop: int, size: int) -> Iterator[slice]:
    """Consecutive slices of `size` rows; the last one may be shorter."""
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))
