"""lm_head and loss of training: bits of the forward, errors of the gradients, then time by part and peak memory.

    python -m lab.kernels.lm_head [--rows 14336] [--out FOLDER]

Checks: no chunk size changes a bit of log-probs and entropy, nor does leaving the division by a temperature of 1 out;
gradients are float32's to BF16's rounding; the weight's gradient is summed in place.

Times, BF16, for two vocabularies: the GEMMs and kernels of one forward and backward, each alone, times as often as it
runs (TFLOP/s beside the 700 that cuBLAS reaches in BF16, TB/s beside the 4.3 of an H200's memory), then forward and
backward whole, by rows of a chunk and by chunks that the backward gathers, with the peak of memory over what was there.
`apart` is what the sum of the weight's gradient costs as a product of its own, added afterwards. At last 32,768 rows,
whose logits alone would be 20 GB. Medians of CUDA events; every operand is far larger than L2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from lab.kernels.clock import median_us_with_launches
from lab.record import RESULTS, need_hopper, write_result
from octetrl.bench.hardware import MEMORY_BYTES_PER_SECOND
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm import linear_logprobs_backward as module
from octetrl.kernels.gemm.linear_logprobs import linear_logprobs, lm_head_logits, logprobs_of, statistics_triton
from octetrl.kernels.gemm.linear_logprobs_backward import add_product, logits_gradient

HIDDEN = 4096
VOCABULARIES = (151_936, 128_256)
CHUNK = 1024
SWEEP = ((1024, 1), (1024, 2), (1024, 4), (2048, 1), (2048, 2), (4096, 1))  # rows of a chunk, chunks gathered
LONG = 32_768
TFLOP_PER_S = 700.0
COLUMNS = ("workload", "part", "us", "tflop_per_s", "gemm_share", "tb_per_s", "memory_share", "peak_gb")
Row = dict[str, object]


def inputs(num_rows: int, vocab_size: int, hidden_size: int = HIDDEN) -> tuple[Tensor, Tensor, Tensor]:
    hidden_NE = torch.randn(num_rows, hidden_size, dtype=torch.bfloat16, device="cuda")
    weight_VE = torch.randn(vocab_size, hidden_size, dtype=torch.bfloat16, device="cuda").mul_(hidden_size**-0.5)
    return hidden_NE.requires_grad_(), weight_VE.requires_grad_(), torch.randint(vocab_size, (num_rows,), device="cuda")


# ---------------------------------------------------------------- bits and errors


@torch.no_grad()
def check_forward(vocab_size: int) -> bool:
    hidden_NE, weight_VE, targets_N = inputs(5000, vocab_size, 1024)
    logits_NV = lm_head_logits(hidden_NE, weight_VE)
    good = True
    for temperature in (1.0, 0.7):
        whole = logprobs_of(logits_NV, targets_N, temperature)
        for chunk in (1024, 2048, 4096):
            ours = linear_logprobs(hidden_NE, weight_VE, targets_N, temperature, chunk)
            wrong = sum(int((mine != theirs).sum()) for mine, theirs in zip(ours, whole, strict=True))
            good &= wrong == 0
            print(
                f"{'OK' if wrong == 0 else 'FAIL'} forward V={vocab_size} T={temperature} chunk {chunk}: {wrong} differ"
            )
    ones_N = torch.ones_like(whole[0])
    plain = statistics_triton(logits_NV, targets_N, ones_N)
    divided = statistics_triton(2 * logits_NV, targets_N, 2 * ones_N)
    wrong = sum(int((mine != theirs).sum()) for mine, theirs in zip(plain, divided, strict=True))
    print(
        f"{'OK' if wrong == 0 else 'FAIL'} temperature 1 V={vocab_size}: {wrong} of {3 * 5000} differ from a division"
    )
    return good and wrong == 0


def check_gradients(entropy: float) -> bool:
    hidden_NE, weight_VE, targets_N = inputs(5000, 80_000, 1024)
    logprobs_N, entropy_N = linear_logprobs(hidden_NE, weight_VE, targets_N, 0.9)
    (logprobs_N.mean() + (entropy * entropy_N.mean() if entropy else 0.0)).backward()
    exact = [tensor.detach().float().requires_grad_() for tensor in (hidden_NE, weight_VE)]
    log_p_NV = torch.log_softmax(exact[0] @ exact[1].t() / 0.9, dim=-1)
    loss = log_p_NV.gather(1, targets_N[:, None]).mean() - entropy * (log_p_NV.exp() * log_p_NV).sum(-1).mean()
    loss.backward()
    good = True
    for name, ours, expected in zip(("hidden", "weight"), (hidden_NE, weight_VE), exact, strict=True):
        assert ours.grad is not None and expected.grad is not None
        error = relative_error(ours.grad, expected.grad)
        good &= error < 5e-3
        print(f"{'OK' if error < 5e-3 else 'FAIL'} gradient of {name}, entropy x {entropy}: relative error {error:.2e}")
    return good


def check_sum_in_place() -> bool:
    dlogits_NV = torch.randn(1024, 100_000, dtype=torch.bfloat16, device="cuda")
    hidden_NE = torch.randn(1024, 1024, dtype=torch.bfloat16, device="cuda")
    sum_VE = torch.empty(100_000, 1024, device="cuda")
    add_product(sum_VE, dlogits_NV, hidden_NE, first=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    add_product(sum_VE, dlogits_NV, hidden_NE, first=False)
    more = torch.cuda.max_memory_allocated() - before
    error = relative_error(sum_VE, 2 * dlogits_NV.float().t() @ hidden_NE.float())
    good = more < sum_VE.nbytes // 2 and error < 1e-5
    print(f"{'OK' if good else 'FAIL'} sum in the GEMM: {more >> 20} MiB more, relative error {error:.1e}")
    return good


# ---------------------------------------------------------------- times


def row_of(workload: str, part: str, us: float, tflop: float = 0.0, moved: float = 0.0, **more: object) -> Row:
    row: Row = {"precision": "bf16", "workload": workload, "part": part, "us": us}
    if tflop:
        rate = tflop / us * 1e6
        row |= {"tflop_per_s": rate, "gemm_share": rate / TFLOP_PER_S}
    if moved:
        rate = moved / us / 1e6
        row |= {"tb_per_s": rate, "memory_share": rate * 1e12 / MEMORY_BYTES_PER_SECOND}
    return row | more


@torch.no_grad()
def parts(num_rows: int, vocab_size: int) -> Iterator[Row]:
    """Each GEMM and kernel alone, times as often as it runs over all rows."""
    hidden_NE, weight_VE, targets_N = inputs(num_rows, vocab_size)
    name = f"{num_rows}x{HIDDEN}x{vocab_size}"
    gathered = module.GATHERED * CHUNK
    logits_CV = lm_head_logits(hidden_NE[:CHUNK], weight_VE)
    targets_C, ones_C = targets_N[:CHUNK], torch.ones(CHUNK, device="cuda")
    made = statistics_triton(logits_CV, targets_C, ones_C)
    dlogits_GV = torch.empty(gathered, vocab_size, dtype=torch.bfloat16, device="cuda")
    hidden_GE, dhidden_GE = hidden_NE[:gathered], torch.empty_like(hidden_NE[:gathered])
    dweight_VE = torch.zeros(vocab_size, HIDDEN, device="cuda")
    size, chunks, groups = num_rows * vocab_size, num_rows / CHUNK, num_rows / gathered
    tflop = 2 * size * HIDDEN / 1e12

    def gradient(dentropy_C: Tensor | None) -> None:
        logits_gradient(
            logits_CV, targets_C, ones_C, made.lse_N, made.entropy_N, made.lse_N, dentropy_C, dlogits_GV[:CHUNK]
        )

    def apart() -> None:
        dweight_VE.add_(torch.mm(dlogits_GV[:CHUNK].t(), hidden_GE[:CHUNK], out_dtype=torch.float32))

    for start in range(0, gathered, CHUNK):
        dlogits_GV[start : start + CHUNK].copy_(logits_CV)
    warm_C = 0.7 * ones_C
    timed: list[tuple[str, Callable[[], object], float, float, float]] = [
        ("logits (both passes)", lambda: lm_head_logits(hidden_NE[:CHUNK], weight_VE), chunks, tflop, 0.0),
        ("statistics", partial(statistics_triton, logits_CV, targets_C, ones_C), chunks, 0.0, 4 * size),
        ("statistics, T 0.7", partial(statistics_triton, logits_CV, targets_C, warm_C), chunks, 0.0, 4 * size),
        ("dlogits", partial(gradient, None), chunks, 0.0, 6 * size),
        ("dlogits with entropy", partial(gradient, made.lse_N), chunks, 0.0, 6 * size),
        ("dhidden", lambda: torch.mm(dlogits_GV, weight_VE, out=dhidden_GE), groups, tflop, 0.0),
        ("dweight", lambda: add_product(dweight_VE, dlogits_GV, hidden_GE, first=False), groups, tflop, 0.0),
        ("dweight, 1024 rows", lambda: add_product(dweight_VE, dlogits_GV[:CHUNK], hidden_GE[:CHUNK], first=False), chunks, tflop, 0.0),  # noqa: E501
        ("dweight, 1024 rows, apart", apart, chunks, tflop, 0.0),
        ("dweight to BF16", lambda: dweight_VE.to(torch.bfloat16), 1, 0.0, 6 * vocab_size * HIDDEN),
    ]  # fmt: skip
    for part, call, times, work, moved in timed:
        yield row_of(name, part, times * median_us_with_launches(call), work, moved)


def whole(num_rows: int, vocab_size: int, chunk: int, gathered: int, repeats: int = 5) -> Iterator[Row]:
    """Forward and backward, with the peak of both together."""
    hidden_NE, weight_VE, targets_N = inputs(num_rows, vocab_size)
    name, tflop = f"{num_rows}x{HIDDEN}x{vocab_size}", 2 * num_rows * vocab_size * HIDDEN / 1e12
    usual, module.GATHERED = module.GATHERED, gathered
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs_N, _ = linear_logprobs(hidden_NE, weight_VE, targets_N, 1.0, chunk)
    up_N = torch.ones_like(logprobs_N)

    def backward() -> None:
        torch.autograd.grad(logprobs_N, (hidden_NE, weight_VE), up_N, retain_graph=True)

    try:
        back = median_us_with_launches(backward, repeats)
        peak = {"peak_gb": (torch.cuda.max_memory_allocated() - before) / 1e9}
        ahead = median_us_with_launches(lambda: linear_logprobs(hidden_NE, weight_VE, targets_N, 1.0, chunk), repeats)
    finally:
        module.GATHERED = usual
    part = f"chunk {chunk} x {gathered}"
    yield row_of(name, f"forward, {part}", ahead, tflop)
    yield row_of(name, f"backward, {part}", back, 3 * tflop, 0.0, **peak)


def show(rows: list[Row]) -> None:
    table = Table(*COLUMNS, title="lm_head and loss of training, BF16")
    for row in rows:
        cells = [row.get(name, "") for name in COLUMNS]
        table.add_row(*(f"{cell:,.3g}" if isinstance(cell, float) and cell < 1e3 else f"{cell:,.0f}"
                        if isinstance(cell, float) else str(cell) for cell in cells))  # fmt: skip
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=14_336)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    need_hopper("kernels.lm_head")
    torch.manual_seed(0)
    good = all([check_forward(151_936), check_forward(32_001), *map(check_gradients, (0.0, 0.1)), check_sum_in_place()])
    rows: list[Row] = []
    for vocab_size in VOCABULARIES:
        rows += parts(arguments.rows, vocab_size)
        for chunk, gathered in SWEEP if vocab_size == VOCABULARIES[0] else ((CHUNK, module.GATHERED),):
            rows += whole(arguments.rows, vocab_size, chunk, gathered)
    rows += whole(LONG, VOCABULARIES[0], CHUNK, module.GATHERED, repeats=2)
    show(rows)
    full, peak = 4 * LONG * VOCABULARIES[0] / 1e9, float(str(rows[-1]["peak_gb"]))
    print(
        f"{'OK' if peak < full else 'FAIL'} {LONG} rows: peak {peak:.2f} GB; their logits alone would be {full:.1f} GB"
    )
    print(f"wrote {write_result('kernels', 'lm_head', rows, arguments.out)}")
    raise SystemExit(0 if good and peak < full else 1)


if __name__ == "__main__":
    main()
