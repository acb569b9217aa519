"""Sample a token from each row of logits by an exponential race whose random numbers are hashes.

Token i of a sequence with key k uses this uniform number for vocabulary entry v:

    u = (top 52 bits of mix(mix(k + i * GOLDEN) xor mix((v + 1) * GOLDEN)) + 1/2) / 2^52        in (0, 1)

`mix` is the finaliser of splitmix64. The token is

    argmax over v of  p_v / -log(u_v),   p = softmax(logits / temperature)      which is v with probability p_v

Temperature 0 is the argmax of the logits. Ties go to the smaller id. A row that is not finite throughout gives -1. A
row depends only on itself. The reference computes in float64, in slices of `SLICE_ELEMENTS` that keep its memory small;
its optional `keep` says which entries may be sampled.

The kernel compares log2(p_v) - log2(-log2(u_v)) in float32 and drops terms that a row has in common. It needs neither
the maximum nor the sum of the softmax, so one pass over the logits suffices. With w = 1 - u, whose 52 bits are the
complement of the hash's,

    -log2(u) = w (1 + w/2 + w^2/3 + w^3/4) / ln 2   for w < 1/32, else -log2(1 - w)

has an error of 5e-6 near u = 1, where entries win. u below 2^-26 counts as 2^-26. A token differs from the reference's
only if the race was closer than float32 resolves: about 1e-5 of the rows at |logits / temperature| < 100. No log-prob
depends on this, so CPU and GPU need not sample the same token.

A program takes `CHUNK` entries of `ROWS` rows, so the entries' hash is computed once for all of them. A second kernel
picks each row's winner among its chunks. Integers are unsigned: products wrap and shifts are logical.

N rows, n rows of one slice, V vocabulary, C chunks, R rows of a program, B entries at a time.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15
SLICE_ELEMENTS = 1 << 23
CHUNK = 2048
ROWS = 4
BLOCK = 256
WARPS = 2


@triton.jit
def _mix_device(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _log2_device(x, ON_GPU: tl.constexpr):
    """log2(x) in one instruction. The error is 2^-22: absolute within (1/2, 2), relative elsewhere."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.log2(x)


@triton.jit
def _log2_of_time(bits, ON_GPU: tl.constexpr):
    """log2(-log2(u)) for the u of these 64 bits."""
    bits = bits ^ 0xFFFFFFFFFFFFFFFF
    low = (bits.to(tl.uint32) & 0xFFFFF000) | 0x800
    w = tl.fma(low.to(tl.float32), 2.0**-64, (bits >> 32).to(tl.uint32).to(tl.float32) * 2.0**-32)
    series = tl.fma(tl.fma(tl.fma(w, 0.36067376, 0.48089835), w, 0.72134752), w, 1.44269504) * w
    time = tl.where(w < 0.03125, series, -_log2_device(tl.maximum(1.0 - w, 2.0**-26), ON_GPU))
    return _log2_device(time, ON_GPU)


@triton.jit(do_not_specialize=["num_rows"])
def _sample_chunks_kernel(
    logits_ptr, key_ptr, counter_ptr, temperature_ptr, best_ptr, token_ptr, num_rows,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    ON_GPU: tl.constexpr,
):  # fmt: skip
    row_R = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row_R = row_R < num_rows
    key_R = tl.load(key_ptr + row_R, mask=is_row_R, other=0).to(tl.uint64, bitcast=True)
    counter_R = tl.load(counter_ptr + row_R, mask=is_row_R, other=0).to(tl.uint64, bitcast=True)
    hash_R = _mix_device(key_R + counter_R * 0x9E3779B97F4A7C15)
    temperature_R = tl.load(temperature_ptr + row_R, mask=is_row_R, other=1.0)
    drawn_R = temperature_R != 0.0
    slope_R = tl.where(drawn_R, 1.4426950408889634 / tl.where(drawn_R, temperature_R, 1.0), 1.0)
    gain_R = tl.where(drawn_R, -1.0, 0.0)
    first = tl.program_id(0) * CHUNK
    best_RB = tl.full([ROWS, BLOCK], float("-inf"), tl.float32)
    step_RB = tl.zeros([ROWS, BLOCK], tl.int32)
    poison_RB = tl.zeros([ROWS, BLOCK], tl.float32)
    for step in range(CHUNK // BLOCK):
        v_B = first + step * BLOCK + tl.arange(0, BLOCK)
        inside_B = v_B < VOCAB
        pointer_RB = logits_ptr + row_R[:, None] * VOCAB + v_B[None, :]
        logit_RB = tl.load(pointer_RB, mask=is_row_R[:, None] & inside_B[None, :], other=0.0)
        hash_B = _mix_device((v_B + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
        log_time_RB = _log2_of_time(_mix_device(hash_R[:, None] ^ hash_B[None, :]), ON_GPU)
        outside_B = tl.where(inside_B, 0.0, float("-inf"))
        handicap_RB = tl.fma(log_time_RB, gain_R[:, None] + tl.zeros_like(log_time_RB), outside_B[None, :])
        score_RB = tl.fma(logit_RB, slope_R[:, None] + tl.zeros_like(logit_RB), handicap_RB)
        better_RB = score_RB > best_RB
        best_RB = tl.where(better_RB, score_RB, best_RB)
        step_RB = tl.where(better_RB, step, step_RB)
        poison_RB = tl.fma(logit_RB, 0.0, poison_RB)
    best_R = tl.max(best_RB, axis=1)
    v_RB = first + step_RB * BLOCK + tl.arange(0, BLOCK)[None, :]
    token_R = tl.min(tl.where(best_RB == best_R[:, None], v_RB, 0x7FFFFFFF), axis=1)
    finite_R = tl.sum(poison_RB, axis=1) == 0.0
    at_R = row_R * CHUNKS + tl.program_id(0)
    tl.store(best_ptr + at_R, best_R, mask=is_row_R)
    tl.store(token_ptr + at_R, tl.where(finite_R, token_R, -1), mask=is_row_R)


@triton.jit
def _sample_winner_kernel(best_ptr, token_ptr, out_ptr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk_C = tl.arange(0, BLOCK)
    inside_C = chunk_C < CHUNKS
    best_C = tl.load(best_ptr + row * CHUNKS + chunk_C, mask=inside_C, other=float("-inf"))
    token_C = tl.load(token_ptr + row * CHUNKS + chunk_C, mask=inside_C, other=0x7FFFFFFF)
    token = tl.min(tl.where(best_C == tl.max(best_C, axis=0), token_C, 0x7FFFFFFF), axis=0)
    tl.store(out_ptr + row, tl.where(tl.min(token_C, axis=0) < 0, -1, token).to(tl.int64))


def sample_tokens(logits_NV: Tensor, key_N: Tensor, counter_N: Tensor, temperature_N: Tensor) -> Tensor:
    """int64 [N]: a sampled token of each row, or -1 if the row's logits are not all finite.

    logits_NV: float32, contiguous on a GPU. key_N, counter_N: int64. temperature_N: float32; 0 is greedy.
    """
    draw = sample_tokens_triton if logits_NV.is_cuda else sample_tokens_reference
    return draw(logits_NV, key_N, counter_N, temperature_N)


def sample_tokens_triton(logits_NV: Tensor, key_N: Tensor, counter_N: Tensor, temperature_N: Tensor) -> Tensor:
    """`sample_tokens` as two kernels."""
    assert logits_NV.dtype == torch.float32 and logits_NV.is_contiguous(), "sample_tokens: contiguous float32 logits"
    assert key_N.dtype == counter_N.dtype == torch.int64, "sample_tokens: key and counter are int64"
    for row_N in (key_N, counter_N, temperature_N):
        assert row_N.is_contiguous() and len(row_N) == len(logits_NV), "sample_tokens: one contiguous value per row"
    num_rows, vocab_size = logits_NV.shape
    token_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    if num_rows == 0:
        return token_N
    chunks = triton.cdiv(vocab_size, CHUNK)
    best_NC = torch.empty(num_rows, chunks, dtype=torch.float32, device=logits_NV.device)
    token_NC = torch.empty(num_rows, chunks, dtype=torch.int32, device=logits_NV.device)
    options = {"enable_fp_fusion": False} if logits_NV.is_cuda else {}
    _sample_chunks_kernel[(chunks, triton.cdiv(num_rows, ROWS))](
        logits_NV, key_N, counter_N, temperature_N, best_NC, token_NC, num_rows,
        VOCAB=vocab_size, CHUNKS=chunks, CHUNK=CHUNK, ROWS=ROWS, BLOCK=BLOCK, ON_GPU=logits_NV.is_cuda,
        num_warps=WARPS, **options,
    )  # fmt: skip
    _sample_winner_kernel[(num_rows,)](
        best_NC, token_NC, token_N, CHUNKS=chunks, BLOCK=triton.next_power_of_2(chunks), num_warps=1, **options
    )
    return token_N


def sample_tokens_reference(
    logits_NV: Tensor,
    key_N: Tensor,
    counter_N: Tensor,
    temperature_N: Tensor,
    keep: Callable[[Tensor, slice], Tensor] | None = None,
) -> Tensor:
    """The same in float64 torch. `keep` gets the weights (row maximum 1) of a slice and says what may be sampled."""
    token_N = greedy_tokens(logits_NV)
    height = max(1, SLICE_ELEMENTS // logits_NV.shape[1])
    for start in range(0, logits_NV.shape[0], height):
        part = slice(start, start + height)
        temperature_n = temperature_N[part]
        is_greedy_n = temperature_n == 0
        scaled_nV = logits_NV[part] / torch.where(is_greedy_n, 1.0, temperature_n)[:, None]
        weight_nV = scaled_nV.double().sub_(scaled_nV.amax(dim=1, keepdim=True)).exp_()
        if keep is not None:
            weight_nV.mul_(keep(weight_nV, part))
        time_nV = uniform(key_N[part], counter_N[part], logits_NV.shape[1]).log_().neg_()
        drawn_n = weight_nV.div_(time_nV).argmax(dim=1)
        token_N[part] = torch.where(is_greedy_n | (token_N[part] < 0), token_N[part], drawn_n)
    return token_N


def greedy_tokens(logits_NV: Tensor) -> Tensor:
    """int64 [N]: the most likely token of each row, or -1 if the row's logits are not all finite."""
    finite_N = torch.linalg.vector_norm(logits_NV, ord=float("inf"), dim=1).isfinite()
    return logits_NV.argmax(dim=1).masked_fill_(~finite_N, -1)


def uniform(key_N: Tensor, counter_N: Tensor, vocab_size: int) -> Tensor:
    """float64 [N, V] in (0, 1), never 0 or 1."""
    row_N = _mix(key_N + counter_N * _signed(GOLDEN))
    entry_V = _mix(torch.arange(1, vocab_size + 1, device=key_N.device) * _signed(GOLDEN))
    mantissa_NV = _mix(row_N[:, None] ^ entry_V).bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return mantissa_NV.double().add_(0.5).mul_(2.0**-52)


def _mix(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64, which wraps around like uint64. Masks make the shifts logical."""
    x = (x ^ _shifted(x, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    x.bitwise_xor_(_shifted(x, 27)).mul_(_signed(0x94D049BB133111EB))
    return x.bitwise_xor_(_shifted(x, 31))


def _shifted(x: Tensor, bits: int) -> Tensor:
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    return x - (1 << 64) if x >> 63 else x
