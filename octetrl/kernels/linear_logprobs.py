"""Log-probs and entropy of tokens from hidden states and lm_head: one routine for engine and trainer.

    logits    = hidden @ weight^T                         BF16 operands, float32 sums and result
    z         = logits / temperature                      float32
    lse       = m + log(sum exp(z - m)),  m = max z       float32
    logprob   = z[target] - lse,   entropy = lse - sum softmax(z) * z

The engine samples from `lm_head_logits` and records `logprobs_of`; the trainer calls `linear_logprobs`,
which is those two in chunks of rows, so no more than [chunk, V] float32 exists at a time, in either pass:
the backward makes the logits again. With upstream gradients a and b of log-prob and entropy the gradient to
the logits is

    (a * (onehot(target) - p) - b * p * (z - lse + entropy)) / temperature,   p = exp(z - lse)

Order: on a GPU the product always has `LOGIT_ROWS` rows (a short chunk is padded), so cuBLAS sees one shape
and a row has one order of sums whoever shares its batch; the log-sum-exp of a row is one program that walks
the vocabulary in blocks of `VOCAB_BLOCK`. The price is a padded product for small batches, bound by reading
the weight anyway. On a CPU products and sums are float64, rounded to float32.

Gradients: the weight's is summed in float32 over the chunks and rounded once; on a GPU the logits' gradient
is rounded to the weight's dtype, because it is the operand of two GEMMs.

N rows (trained tokens), V vocabulary, E hidden size, C rows of one chunk.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOGIT_ROWS = 256
VOCAB_BLOCK = 4096
VOCAB_PIECE = 4096  # vocabulary rows that the CPU form widens to float64 at a time


class TokenStatistics(NamedTuple):
    logprobs_N: Tensor  # float32
    entropy_N: Tensor  # float32
    lse_N: Tensor  # float32: what the backward needs


def lm_head_logits(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    """float32 logits [N, V]. hidden and weight of one dtype. A row's bits do not depend on the other rows."""
    assert hidden_NE.dtype == weight_VE.dtype, f"lm_head: hidden {hidden_NE.dtype}, weight {weight_VE.dtype}"
    num_rows, vocab_size = hidden_NE.shape[0], weight_VE.shape[0]
    logits_NV = torch.empty(num_rows, vocab_size, dtype=torch.float32, device=hidden_NE.device)
    if not hidden_NE.is_cuda:
        hidden_NE = hidden_NE.double()
        pieces = zip(weight_VE.split(VOCAB_PIECE), logits_NV.split(VOCAB_PIECE, dim=1), strict=True)
        for weight_PE, logits_NP in pieces:
            logits_NP.copy_(hidden_NE @ weight_PE.double().t())
        return logits_NV
    for hidden_CE, logits_CV in zip(hidden_NE.split(LOGIT_ROWS), logits_NV.split(LOGIT_ROWS), strict=True):
        rows = hidden_CE.shape[0]
        padded_CE = torch.nn.functional.pad(hidden_CE, (0, 0, 0, LOGIT_ROWS - rows))
        logits_CV.copy_(torch.mm(padded_CE, weight_VE.t(), out_dtype=torch.float32)[:rows])
    return logits_NV


@triton.jit
def _logprobs_kernel(
    logits_ptr,
    targets_ptr,
    temperature_ptr,
    logprobs_ptr,
    entropy_ptr,
    lse_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    logits_ptr += row * VOCAB
    column = tl.arange(0, BLOCK)
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, VOCAB, BLOCK):
        inside = start + column < VOCAB
        logit = tl.load(logits_ptr + start + column, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, tl.div_rn(logit, temperature))
    m = tl.max(highest, axis=0)
    total = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        inside = start + column < VOCAB
        logit = tl.load(logits_ptr + start + column, mask=inside, other=float("-inf"))
        z = tl.div_rn(logit, temperature) - m
        p = tl.exp(z)
        total += p
        weighted += tl.where(p > 0.0, p * z, 0.0)
    sum_total = tl.sum(total, axis=0)
    log_total = tl.log(sum_total)
    target_logit = tl.load(logits_ptr + tl.load(targets_ptr + row))
    tl.store(logprobs_ptr + row, (tl.div_rn(target_logit, temperature) - m) - log_total)
    tl.store(entropy_ptr + row, log_total - tl.div_rn(tl.sum(weighted, axis=0), sum_total))
    tl.store(lse_ptr + row, m + log_total)


@triton.jit
def _logits_gradient_kernel(
    logits_ptr,
    targets_ptr,
    temperature_ptr,
    entropy_ptr,
    lse_ptr,
    dlogprobs_ptr,
    dentropy_ptr,
    dlogits_ptr,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    temperature = tl.load(temperature_ptr + row)
    logit = tl.load(logits_ptr + row * VOCAB + column, mask=inside, other=float("-inf"))
    log_p = logit / temperature - tl.load(lse_ptr + row)
    p = tl.exp(log_p)
    hit = (column == tl.load(targets_ptr + row)).to(tl.float32)
    surprise = tl.where(p > 0.0, p * (log_p + tl.load(entropy_ptr + row)), 0.0)
    dz = tl.load(dlogprobs_ptr + row) * (hit - p) - tl.load(dentropy_ptr + row) * surprise
    dlogits = (dz / temperature).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + row * VOCAB + column, dlogits, mask=inside)


def statistics_triton(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> TokenStatistics:
    """The forward kernel's launcher. logits contiguous."""
    assert logits_NV.is_contiguous(), "logprobs: logits must be contiguous"
    num_rows, vocab_size = logits_NV.shape
    out = TokenStatistics(*torch.empty(3, num_rows, dtype=torch.float32, device=logits_NV.device).unbind())
    options = {"enable_fp_fusion": False} if logits_NV.is_cuda else {}
    if num_rows:
        _logprobs_kernel[(num_rows,)](
            logits_NV,
            targets_N,
            temperature_N,
            *out,
            VOCAB=vocab_size,
            BLOCK=VOCAB_BLOCK,
            num_warps=8,
            **options,
        )
    return out


def statistics_reference(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> TokenStatistics:
    """The same in plain torch: sums in float64, rounded once."""
    z_NV = (logits_NV / temperature_N[:, None]).double()
    lse_N = torch.logsumexp(z_NV, dim=-1)
    p_NV = torch.softmax(z_NV, dim=-1)
    logprobs_N = z_NV.gather(1, targets_N[:, None]).squeeze(1) - lse_N
    entropy_N = lse_N - torch.where(p_NV > 0, p_NV * z_NV, 0.0).sum(-1)
    return TokenStatistics(logprobs_N.float(), entropy_N.float(), lse_N.float())


def logits_gradient_triton(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    forward: TokenStatistics,
    dlogprobs_N: Tensor,
    dentropy_N: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The backward kernel's launcher: the gradient to the logits, rounded to `dtype`."""
    num_rows, vocab_size = logits_NV.shape
    dlogits_NV = torch.empty(num_rows, vocab_size, dtype=dtype, device=logits_NV.device)
    if num_rows:
        _logits_gradient_kernel[(num_rows, triton.cdiv(vocab_size, VOCAB_BLOCK))](
            logits_NV,
            targets_N,
            temperature_N,
            forward.entropy_N,
            forward.lse_N,
            dlogprobs_N,
            dentropy_N,
            dlogits_NV,
            VOCAB=vocab_size,
            BLOCK=VOCAB_BLOCK,
            num_warps=8,
        )
    return dlogits_NV


def logits_gradient_reference(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    forward: TokenStatistics,
    dlogprobs_N: Tensor,
    dentropy_N: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The same in plain torch: float32, rounded to `dtype`."""
    log_p_NV = logits_NV / temperature_N[:, None] - forward.lse_N[:, None]
    p_NV = log_p_NV.exp()
    surprise_NV = torch.where(p_NV > 0, p_NV * (log_p_NV + forward.entropy_N[:, None]), 0.0)
    dz_NV = surprise_NV.mul_(-dentropy_N[:, None]).sub_(p_NV.mul_(dlogprobs_N[:, None]))
    dz_NV.scatter_add_(1, targets_N[:, None], dlogprobs_N[:, None])
    return dz_NV.div_(temperature_N[:, None]).to(dtype)


def _statistics(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> TokenStatistics:
    if logits_NV.is_cuda:
        return statistics_triton(logits_NV, targets_N, temperature_N)
    return statistics_reference(logits_NV, targets_N, temperature_N)


def _logits_gradient(logits_NV: Tensor, *given: Any) -> Tensor:
    return (logits_gradient_triton if logits_NV.is_cuda else logits_gradient_reference)(logits_NV, *given)


def _temperatures(temperature: float | Tensor, num_rows: int, device: torch.device) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(torch.float32).expand(num_rows).contiguous()
    assert temperature > 0, f"log-probs need a temperature above 0, got {temperature} (greedy: use 1)"
    return torch.full((num_rows,), temperature, dtype=torch.float32, device=device)


def logprobs_of(logits_NV: Tensor, targets_N: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each row's target and entropy of its distribution, both float32 [N]; not differentiable.

    logits_NV: float32, contiguous. targets_N: int64. temperature: above 0, one number or one a row (greedy
    rows: 1).
    """
    temperature_N = _temperatures(temperature, logits_NV.shape[0], logits_NV.device)
    return _statistics(logits_NV, targets_N, temperature_N)[:2]


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NE: Tensor, weight_VE: Tensor, targets_N: Tensor, temperature_N: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        statistics_3N = hidden_NE.new_empty(3, hidden_NE.shape[0], dtype=torch.float32)
        for start in range(0, hidden_NE.shape[0], chunk):
            rows = slice(start, start + chunk)
            logits_CV = lm_head_logits(hidden_NE[rows], weight_VE)
            statistics_3N[:, rows] = torch.stack(_statistics(logits_CV, targets_N[rows], temperature_N[rows]))
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, temperature_N, statistics_3N)
        ctx.chunk = chunk
        logprobs_N, entropy_N, _ = statistics_3N.clone().unbind()
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_NE, weight_VE, targets_N, temperature_N, statistics_3N = ctx.saved_tensors
        upstream = [grad_N.contiguous() for grad_N in grads]
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        dhidden_NE = torch.empty_like(hidden_NE) if needs_hidden else None
        dweight_VE = torch.zeros_like(weight_VE, dtype=torch.float32) if needs_weight else None
        operand = weight_VE.dtype if weight_VE.is_cuda else torch.float32
        weight_operand_VE = weight_VE.to(operand)
        for start in range(0, hidden_NE.shape[0], ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            statistics = TokenStatistics(*(row[rows] for row in statistics_3N))
            logits_CV = lm_head_logits(hidden_NE[rows], weight_VE)
            dlogprobs_C, dentropy_C = (grad_N[rows] for grad_N in upstream)
            dlogits_CV = _logits_gradient(
                logits_CV, targets_N[rows], temperature_N[rows], statistics, dlogprobs_C, dentropy_C, operand
            )
            del logits_CV
            if dhidden_NE is not None:
                dhidden_NE[rows] = dlogits_CV @ weight_operand_VE
            if dweight_VE is not None:
                dweight_VE += _float32_product(dlogits_CV.t(), hidden_NE[rows].to(operand))
        dweight = None if dweight_VE is None else dweight_VE.to(weight_VE.dtype)
        return dhidden_NE, dweight, None, None, None


def _float32_product(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a @ b


def linear_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    chunk: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, float32 [N]; differentiable in both inputs.

    hidden_NE, weight_VE: one dtype. targets_N: int64. temperature: above 0, one number or one a row.
    `chunk`: rows whose logits exist at one time; it changes memory and speed, not the result.
    """
    assert hidden_NE.shape[0] == targets_N.shape[0], f"{hidden_NE.shape[0]} rows, {targets_N.shape[0]} targets"
    temperature_N = _temperatures(temperature, hidden_NE.shape[0], hidden_NE.device)
    return _LinearLogprobs.apply(hidden_NE, weight_VE, targets_N, temperature_N, chunk)
