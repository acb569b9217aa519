"""The gradient of log-prob and entropy to the logits, and the float32 sum of the weight's gradient.

With upstream gradients a and b of log-prob and entropy, z = logits / temperature, p = exp(z - lse):

    dlogits = (a * (onehot(target) - p) - b * p * (z - lse + entropy)) / temperature

One read of the float32 logits and one write of the result, which is rounded because it is the operand of two GEMMs:
(4 + 2) N V bytes with BF16. Where nothing upstream looks at the entropy, b is None and its half is not computed.

`add_product` adds a GEMM to a float32 sum in the GEMM itself: a product of its own, added afterwards, would be 12 V E
bytes more to move (7.5 GB at V = 151,936 and E = 4096), which takes as long as the product of 4096 rows.

Nothing here is on the path of a log-prob, so no order of sums is promised.

N rows, V vocabulary, E hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

VOCAB_BLOCK = 4096  # columns of one program


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
    """Writes dlogits into `out_NV`, rounded to its dtype. logits float32; both contiguous. lse and entropy are the
    forward's."""
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
    """sum = dlogits^T @ hidden where `first` (what `sum` held is not read), else sum += it. `sum_VE` is float32, the
    operands are of one dtype."""
    if not sum_VE.is_cuda:
        sum_VE.addmm_(dlogits_NV.t(), hidden_NE, beta=0 if first else 1)
    elif first:
        torch.mm(dlogits_NV.t(), hidden_NE, out_dtype=torch.float32, out=sum_VE)
    else:
        torch.addmm(sum_VE, dlogits_NV.t(), hidden_NE, out_dtype=torch.float32, out=sum_VE)
