"""Times the row kernels: the fused ones of a rollout, those of training, and what follows the last layer of a decode.

Qwen3-8B's shape; 128 and 8,192 tokens in the rollout, 16,384 in training, 16 to 256 rows of logits. Bytes are those
that a kernel must read and write (weights and angles left out). Beside each kernel is the chain of operations that it
replaces; beside sampling and log-probs, the same by torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from lab.kernels.clock import ROTATED_BYTES, Call, Row, memory_row
from octetrl.kernels.gemm.linear_logprobs import lm_head_logits, logprobs_alone, logprobs_of
from octetrl.kernels.rows.sample_tokens import sample_tokens, sample_tokens_reference
from tests.gpu import fused_row_cases as fused
from tests.gpu import training_row_cases as training

TOKENS, BATCHES = 16_384, (16, 64, 128, 256)
WEIGHT = (24_576, 4096)  # gate and up of Qwen3-8B
VOCAB, HIDDEN = 151_936, 4096


def measure(arguments: argparse.Namespace) -> list[Row]:
    return [*_rollout(), *_training(), *(row for batch in BATCHES for row in _sampling(batch))]


def _rollout() -> Iterator[Row]:
    shape = fused.SHAPES["qwen3-8b"]
    for tokens in (128, 8192):
        makers: list[Callable[[], fused.Case]] = [
            *(partial(fused.norm_case, shape, tokens, quantize) for quantize in (False, True)),
            partial(fused.silu_case, shape, tokens),
            *(partial(fused.qkv_case, shape, tokens, precision) for precision in fused.CACHES),
        ]
        for make in makers:
            first = make()
            cases = [first, *(make() for _ in range(ROTATED_BYTES // first.moved))]
            what: Row = {"op": first.op, "precision": first.precision, "workload": f"{tokens} tokens"}
            kernels, chains = [case.fused for case in cases], [case.chain for case in cases]
            yield memory_row(what, first.moved, kernels, chains, "chain_us")


def _training() -> Iterator[Row]:
    """One set of inputs is larger than L2."""
    shape = training.SHAPES["qwen3-8b"]
    cases = [training.rotate_case(shape, TOKENS, precision) for precision in training.REPLAYS]
    cases += [training.rotate_case(shape, TOKENS, "bf16", observe=False), training.rotate_back_case(shape, TOKENS)]
    cases += [training.norm_case(training.normal(TOKENS, shape.hidden), residual) for residual in (False, True)]
    named = [
        *((f"{TOKENS} tokens", case) for case in cases),
        (f"{WEIGHT[0]} x {WEIGHT[1]}", training.sum_case(*WEIGHT)),
    ]
    for workload, case in named:
        what: Row = {"op": case.op, "precision": case.precision, "workload": workload}
        yield memory_row(what, case.moved, [case.fused], [case.chain], "chain_us")


def _sampling(num_rows: int) -> Iterator[Row]:
    """Logits rotate over more than L2 holds; those of lm_head's product are written to new memory."""
    size = 4 * VOCAB * num_rows
    logits = [torch.randn(num_rows, VOCAB, device="cuda").mul_(3) for _ in range(1 + ROTATED_BYTES // size)]
    key_N = torch.randint(-(2**63), 2**63 - 1, (num_rows,), device="cuda")
    targets_N, temperature_N = torch.arange(num_rows, device="cuda"), torch.full((num_rows,), 0.8, device="cuda")
    hidden_NE = torch.randn(num_rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    weight_VE = torch.randn(VOCAB, HIDDEN, dtype=torch.bfloat16, device="cuda")
    alone = (targets_N, temperature_N)
    timed: dict[str, tuple[list[Call], list[Call]]] = {
        "sample": (
            [partial(sample_tokens, x, key_N, *alone) for x in logits],
            [partial(sample_tokens_reference, logits[0], key_N, *alone)],
        ),
        "log-probs": (
            [partial(logprobs_alone, x, *alone) for x in logits],
            [partial(_logprobs, x, *alone) for x in logits],
        ),
        "log-probs + entropy": ([partial(logprobs_of, x, *alone) for x in logits], []),
        "logits": ([partial(lm_head_logits, hidden_NE, weight_VE)], []),
    }
    for op, (kernels, by_torch) in timed.items():
        what: Row = {"op": op, "precision": "bf16", "workload": f"{num_rows}x{VOCAB}"}
        moved = size + (weight_VE.nbytes if op == "logits" else 0)
        yield memory_row(what, moved, kernels, by_torch, "torch_us")


def _logprobs(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> Tensor:
    z_NV = logits_NV / temperature_N[:, None]
    return z_NV.gather(1, targets_N[:, None])[:, 0] - z_NV.logsumexp(1)
