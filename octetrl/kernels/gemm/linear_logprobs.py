"""Log-probs and entropy of tokens from hidden states and lm_head: one routine for engine and trainer.

    logits    = hidden @ weight^T                         BF16 operands, float32 sums and result
    z         = logits / temperature                      float32
    lse       = m + log(sum exp(z - m)),  m = max z       float32
    logprob   = z[target] - lse,   entropy = lse - sum softmax(z) * z

The engine samples from `lm_head_logits` and records `logprobs_of`. The trainer calls `linear_logprobs`, which runs both
in chunks of rows. At most [chunk, V] float32 logits exist at a time, in forward and backward. The backward recomputes
the logits and turns them into their gradient (linear_logprobs_backward.py).

What a row's bits depend on. On a GPU the rows of a product are padded to one of `LOGIT_ROWS`. For each of these numbers
cuBLAS adds along K in one order (tests/gpu/test_sampling.py), so a row has the same bits in every batch. This was
checked for large vocabularies, whose tiles fill the GPU without splitting K. A vocabulary below `LARGE_VOCAB` always
uses `SMALL_VOCAB_ROWS` rows, which costs little. The caller's rows are the first of the padded ones, so no copy is
made.

The log-sum-exp processes the vocabulary in chunks of `VOCAB_CHUNK`, one program for each chunk of each row. A chunk has
m_c = max z, s_c = sum exp(z - m_c) and w_c = sum exp(z - m_c) (z - m_c). A second kernel joins the chunks in ascending
order, in one fixed tree:

    m = max m_c,   s = sum s_c exp(m_c - m),   entropy = log s - sum exp(m_c - m) (w_c + s_c (m_c - m)) / s

The engine does not need the entropy. Log-probs have the same bits with and without it. On a CPU, products and sums are
float64, rounded to float32.

Cost of the forward with BF16: 2 N V E FLOPs. Bytes besides the GEMM's operands: 8 N V, logits written and read once.

N rows (trained tokens), V vocabulary, E hidden size, C rows of one chunk, P vocabulary chunks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_straight
from octetrl.kernels.gemm.linear_logprobs_backward import (
    HeadCut,
    linear_logprobs_backward,
    logits_gradient,
    pieces,
)
from octetrl.kernels.profiler_parts import part
from octetrl.shapes.tensor_cut import VOCAB_CHUNK

LOGIT_ROWS: tuple[int, ...] = (16, 32, 64, 128, 256, 512, 1024)  # ascending; (256,) means one shape for all
LARGE_VOCAB = 65_536
SMALL_VOCAB_ROWS: tuple[int, ...] = (256,)
VOCAB_PIECE = 4096  # vocabulary rows that the CPU form converts to float64 at a time


class TokenStatistics(NamedTuple):
    logprobs_N: Tensor  # float32
    entropy_N: Tensor  # float32
    lse_N: Tensor  # float32; the backward needs it


def lm_head_logits(hidden_NE: Tensor, weight_VE: Tensor, cut: HeadCut | None = None) -> Tensor:
    """float32 logits [N, V]. hidden and weight have one dtype. A row's bits depend on no other row. `cut`: the weight
    has only some rows of lm_head, and the others' logits are gathered."""
    if cut is not None:
        return cut.whole(_logits_of_rows(hidden_NE, weight_VE))
    assert hidden_NE.dtype == weight_VE.dtype, f"lm_head: hidden {hidden_NE.dtype}, weight {weight_VE.dtype}"
    if hidden_NE.is_cuda:
        return _padded_logits(hidden_NE, weight_VE)
    logits_NV = torch.empty(hidden_NE.shape[0], weight_VE.shape[0], dtype=torch.float32)
    hidden_NE = hidden_NE.double()
    pieces = zip(weight_VE.split(VOCAB_PIECE), logits_NV.split(VOCAB_PIECE, dim=1), strict=True)
    for weight_PE, logits_NP in pieces:
        logits_NP.copy_(hidden_NE @ weight_PE.double().t())
    return logits_NV


def _logits_of_rows(hidden_NE: Tensor, weight_WE: Tensor) -> Tensor:
    """float32 logits [N, W] of some rows of lm_head. On a GPU not by cuBLAS: its choice depends on their number."""
    if hidden_NE.is_cuda:
        return bf16_gemm_straight(hidden_NE.contiguous(), weight_WE, torch.float32)
    return lm_head_logits(hidden_NE, weight_WE)


def padded_rows(num_rows: int, vocab_size: int) -> list[int]:
    """The rows of each product that together hold `num_rows`: largest shapes first, then the smallest that fits."""
    allowed = LOGIT_ROWS if vocab_size >= LARGE_VOCAB else SMALL_VOCAB_ROWS
    full, rest = divmod(num_rows, allowed[-1])
    return [allowed[-1]] * full + ([min(rows for rows in allowed if rows >= rest)] if rest else [])


def _padded_logits(hidden_NE: Tensor, weight_VE: Tensor) -> Tensor:
    num_rows, vocab_size = hidden_NE.shape[0], weight_VE.shape[0]
    heights = padded_rows(num_rows, vocab_size)
    if sum(heights) > num_rows:
        hidden_NE = torch.nn.functional.pad(hidden_NE, (0, 0, 0, sum(heights) - num_rows))
    logits_NV = torch.empty(sum(heights), vocab_size, dtype=torch.float32, device=hidden_NE.device)
    for hidden_CE, logits_CV in zip(hidden_NE.split(heights), logits_NV.split(heights), strict=True):
        torch.mm(hidden_CE, weight_VE.t(), out_dtype=torch.float32, out=logits_CV)
    return logits_NV[:num_rows]


@triton.jit
def _chunk_statistics_kernel(
    logits_ptr,
    temperature_ptr,
    partial_ptr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + row * VOCAB + column, mask=column < VOCAB, other=float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    z = logit
    if temperature != 1.0:  # the bits are the same, and an IEEE division costs more than everything else
        z = tl.div_rn(logit, temperature)
    m = tl.max(z, axis=0)
    z -= tl.where(m == float("-inf"), 0.0, m)
    p = tl.exp(z)
    partial_ptr += row * (3 * CHUNKS) + chunk
    tl.store(partial_ptr, m)
    tl.store(partial_ptr + CHUNKS, tl.sum(p, axis=0))
    if ENTROPY:
        tl.store(partial_ptr + 2 * CHUNKS, tl.sum(tl.where(p > 0.0, p * z, 0.0), axis=0))


@triton.jit
def _row_statistics_kernel(
    logits_ptr,
    targets_ptr,
    temperature_ptr,
    partial_ptr,
    logprobs_ptr,
    entropy_ptr,
    lse_ptr,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk_P = tl.arange(0, BLOCK)
    inside_P = chunk_P < CHUNKS
    partial_ptr += row * (3 * CHUNKS) + chunk_P
    m_P = tl.load(partial_ptr, mask=inside_P, other=float("-inf"))
    sum_P = tl.load(partial_ptr + CHUNKS, mask=inside_P, other=0.0)
    m = tl.max(m_P, axis=0)
    factor_P = tl.exp(m_P - m)
    total = tl.sum(sum_P * factor_P, axis=0)
    log_total = tl.log(total)
    target_logit = tl.load(logits_ptr + row * VOCAB + tl.load(targets_ptr + row))
    tl.store(logprobs_ptr + row, (tl.div_rn(target_logit, tl.load(temperature_ptr + row)) - m) - log_total)
    tl.store(lse_ptr + row, m + log_total)
    if ENTROPY:
        weighted_P = tl.load(partial_ptr + 2 * CHUNKS, mask=inside_P, other=0.0)
        shifted_P = weighted_P + sum_P * tl.where(sum_P == 0.0, 0.0, m_P - m)
        weighted = tl.sum(factor_P * shifted_P, axis=0)
        tl.store(entropy_ptr + row, log_total - tl.div_rn(weighted, total))


def statistics_triton(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    entropy: bool = True,
    out: TokenStatistics | None = None,
) -> TokenStatistics:
    """The forward kernels' launcher. logits are contiguous. Without `entropy`, that field is not written."""
    assert logits_NV.is_contiguous(), "logprobs: logits must be contiguous"
    if logits_NV.data_ptr() % 16:
        logits_NV = logits_NV.clone()  # unaligned loads are narrower, and a row would be summed in another order
    num_rows, vocab_size = logits_NV.shape
    chunks = triton.cdiv(vocab_size, VOCAB_CHUNK)
    if out is None:
        out = TokenStatistics(*torch.empty(3, num_rows, dtype=torch.float32, device=logits_NV.device).unbind())
    partial_N3P = torch.empty(num_rows, 3, chunks, dtype=torch.float32, device=logits_NV.device)
    options = {"enable_fp_fusion": False} if logits_NV.is_cuda else {}
    sizes = {"VOCAB": vocab_size, "CHUNKS": chunks, "ENTROPY": entropy, **options}
    if num_rows:
        _chunk_statistics_kernel[(num_rows, chunks)](
            logits_NV, temperature_N, partial_N3P, BLOCK=VOCAB_CHUNK, num_warps=4, **sizes
        )
        _row_statistics_kernel[(num_rows,)](
            logits_NV, targets_N, temperature_N, partial_N3P, *out,
            BLOCK=triton.next_power_of_2(chunks), num_warps=1, **sizes,
        )  # fmt: skip
    return out


def statistics_reference(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> TokenStatistics:
    """The same in plain torch: sums in float64, rounded once."""
    z_NV = (logits_NV / temperature_N[:, None]).double()
    lse_N = torch.logsumexp(z_NV, dim=-1)
    p_NV = torch.softmax(z_NV, dim=-1)
    logprobs_N = z_NV.gather(1, targets_N[:, None]).squeeze(1) - lse_N
    entropy_N = lse_N - torch.where(p_NV > 0, p_NV * z_NV, 0.0).sum(-1)
    return TokenStatistics(logprobs_N.float(), entropy_N.float(), lse_N.float())


def _statistics(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> TokenStatistics:
    if logits_NV.is_cuda:
        return statistics_triton(logits_NV, targets_N, temperature_N)
    return statistics_reference(logits_NV, targets_N, temperature_N)


def _temperatures(temperature: float | Tensor, num_rows: int, device: torch.device) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(torch.float32).expand(num_rows).contiguous()
    assert temperature > 0, f"log-probs need a temperature above 0, got {temperature} (greedy: use 1)"
    return torch.full((num_rows,), temperature, dtype=torch.float32, device=device)


def logprobs_of(logits_NV: Tensor, targets_N: Tensor, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of each row's target and entropy of its distribution, both float32 [N]; not differentiable.

    logits_NV: float32, contiguous. targets_N: int64. temperature: above 0, one number or one for each row (greedy rows:
    1).
    """
    temperature_N = _temperatures(temperature, logits_NV.shape[0], logits_NV.device)
    return _statistics(logits_NV, targets_N, temperature_N)[:2]


def logprobs_alone(logits_NV: Tensor, targets_N: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
    """The log-probs of `logprobs_of`, bit for bit, without the entropy. The engine records these."""
    temperature_N = _temperatures(temperature, logits_NV.shape[0], logits_NV.device)
    if logits_NV.is_cuda:
        return statistics_triton(logits_NV, targets_N, temperature_N, entropy=False).logprobs_N
    return statistics_reference(logits_NV, targets_N, temperature_N).logprobs_N


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NE: Tensor,
        weight_VE: Tensor,
        targets_N: Tensor,
        temperature_N: Tensor,
        chunk: int,
        cut: HeadCut | None,
    ) -> tuple[Tensor, Tensor]:
        statistics_3N = hidden_NE.new_empty(3, hidden_NE.shape[0], dtype=torch.float32)
        for rows in pieces(0, hidden_NE.shape[0], chunk):
            logits_CV = lm_head_logits(hidden_NE[rows], weight_VE, cut)
            if logits_CV.is_cuda:
                out = TokenStatistics(*statistics_3N[:, rows].unbind())
                statistics_triton(logits_CV, targets_N[rows], temperature_N[rows], out=out)
            else:
                made = statistics_reference(logits_CV, targets_N[rows], temperature_N[rows])
                statistics_3N[:, rows] = torch.stack(made)
            del logits_CV  # before the next chunk's
        ctx.save_for_backward(hidden_NE, weight_VE, targets_N, temperature_N, statistics_3N)
        ctx.chunk, ctx.cut = chunk, cut
        ctx.set_materialize_grads(False)  # the entropy costs nothing if no loss uses it
        logprobs_N, entropy_N, _ = statistics_3N.clone().unbind()
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, *tuple[None, ...]]:
        hidden_NE, weight_VE, targets_N, temperature_N, statistics_3N = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        if hidden_NE.shape[0] == 0 or (grads[0] is None and grads[1] is None):
            return (
                torch.zeros_like(hidden_NE) if needs_hidden else None,
                torch.zeros_like(weight_VE) if needs_weight else None,
                *(None, None, None, None),
            )
        dlogprobs_N = torch.zeros_like(temperature_N) if grads[0] is None else grads[0].contiguous()
        dentropy_N = None if grads[1] is None else grads[1].contiguous()

        def gradient_into(rows: slice, dlogits_CV: Tensor) -> None:
            logits_gradient(
                lm_head_logits(hidden_NE[rows], weight_VE, ctx.cut),
                targets_N[rows],
                temperature_N[rows],
                statistics_3N[2, rows],
                statistics_3N[1, rows],
                dlogprobs_N[rows],
                None if dentropy_N is None else dentropy_N[rows],
                dlogits_CV,
            )

        needs = (needs_hidden, needs_weight)
        with part("lm_head"):
            gradients = linear_logprobs_backward(hidden_NE, weight_VE, gradient_into, ctx.chunk, needs, ctx.cut)
        return *gradients, None, None, None, None


def linear_logprobs(
    hidden_NE: Tensor,
    weight_VE: Tensor,
    targets_N: Tensor,
    temperature: float | Tensor = 1.0,
    chunk: int = 1024,
    cut: HeadCut | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, float32 [N]; differentiable in both inputs.

    hidden_NE, weight_VE: one dtype. targets_N: int64. temperature: above 0, one number or one for each row. `chunk`:
    rows whose logits exist at one time; it changes memory and speed, not the result. `cut`: as in `lm_head_logits`.
    """
    assert hidden_NE.shape[0] == targets_N.shape[0], f"{hidden_NE.shape[0]} rows, {targets_N.shape[0]} targets"
    temperature_N = _temperatures(temperature, hidden_NE.shape[0], hidden_NE.device)
    with part("lm_head"):
        logprobs_N, entropy_N = _LinearLogprobs.apply(hidden_NE, weight_VE, targets_N, temperature_N, chunk, cut)
    return logprobs_N, entropy_N
