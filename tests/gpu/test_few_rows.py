"""On a Hopper GPU: the kernel for few rows has the bits of fp8_gemm and bf16_gemm, at every number of rows, in a graph,
and launched programmatically behind the kernel that writes its input."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm
from octetrl.kernels.gemm.few_rows_gluon import FewRows, few_rows_bf16, few_rows_fp8
from octetrl.kernels.gemm.fp8_gemm import check_operands, fp8_gemm
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from tests.gpu.compare import captured
from tests.gpu.test_small_gemm import operands

pytestmark = pytest.mark.gpu

QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
ODD = [(576, 896), (896, 3584), (3584, 896), (200, 1152)]  # widths that no tile divides, depths with a partial stage
ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 63, 64)
CONFIGS = [
    FewRows(16, 8, 6, 4, swap=True),
    FewRows(32, 8, 4, 8, swap=True),
    FewRows(64, 8, 5, 4, swap=True),
    FewRows(32, 16, 4, 4, swap=True),
    FewRows(32, 16, 4, 4),
    FewRows(64, 32, 4, 4, swap=True),
    FewRows(32, 32, 5, 2),
    FewRows(32, 64, 4, 4),
    FewRows(64, 64, 3, 4, swap=True),
    FewRows(128, 64, 4, 2),
]


def product(x: Quantized | Tensor, w: Quantized | Tensor, config: FewRows | None) -> Tensor:
    """By the kernel that the engine runs if `config` is None."""
    if isinstance(x, Quantized) and isinstance(w, Quantized):
        return fp8_gemm(x, w) if config is None else few_rows_fp8(x, w, check_operands(x, w), config)
    assert isinstance(x, Tensor) and isinstance(w, Tensor)
    return bf16_gemm(x, w) if config is None else few_rows_bf16(x, w, config)


def same_bits(one_MN: Tensor, other_MN: Tensor) -> bool:
    """Of the words, so that 0 and -0 differ and NaN equals itself."""
    return torch.equal(one_MN.view(torch.int16), other_MN.view(torch.int16))


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize(("n", "k"), [*QWEN3_8B, *ODD])
def test_bits_are_those_of_the_engines_kernel(n: int, k: int, precision: str) -> None:
    x_MK, w_NK = operands(max(ROWS), n, k)
    w = quantize_weight(w_NK) if precision == "fp8" else w_NK
    for m in ROWS:
        x = quantize_activation(x_MK[:m]) if precision == "fp8" else x_MK[:m]
        expected_MN = product(x, w, None)
        for config in CONFIGS:
            if m <= config.tokens:
                assert same_bits(product(x, w, config), expected_MN), (config, m)


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_a_poisoned_row_stays_alone(precision: str) -> None:
    x_MK, w_NK = operands(16, 4096, 4096)
    w = quantize_weight(w_NK) if precision == "fp8" else w_NK
    poisoned_MK = x_MK.clone()
    poisoned_MK[5, 700] = torch.inf
    for config in (FewRows(64, 16, 5, 4, swap=True), FewRows(32, 16, 4, 4)):
        clean_MN, y_MN = (
            product(quantize_activation(rows_MK) if precision == "fp8" else rows_MK, w, config)
            for rows_MK in (x_MK, poisoned_MK)
        )
        assert not y_MN[5].isfinite().any()
        y_MN[5] = clean_MN[5]
        assert same_bits(y_MN, clean_MN)


@pytest.mark.parametrize("programmatic", [False, True], ids=["plain", "programmatic"])
@pytest.mark.parametrize("precision", ["fp8", "bf16"])
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_chain_in_a_captured_graph(rows: int, precision: str, programmatic: bool) -> None:
    """Each product stands behind the kernel that writes its x, then behind a product, then behind one whose y is its x.
    A program that read x too early would see the zeros before it. Only kernels stand in front, no memset."""
    n = k = 4096
    x_MK, w_NK = operands(rows, n, k)
    w = quantize_weight(w_NK) if precision == "fp8" else w_NK
    tokens = 8 if rows <= 8 else 64
    config = FewRows(64, tokens, 3, 2, swap=True, programmatic=programmatic)
    source_MK, copied_MK = x_MK.clone(), torch.zeros_like(x_MK)

    def chain(with_config: FewRows | None) -> list[Tensor]:
        outputs = []
        for _ in range(6):
            torch.mul(source_MK, 1, out=copied_MK)  # right in front in BF16; in FP8 quantize_activation is
            x = quantize_activation(copied_MK) if precision == "fp8" else copied_MK
            outputs.append(product(x, w, with_config))
            outputs.append(product(x, w, with_config))  # behind a product, whose bits it must not disturb
            torch.mul(source_MK, 0, out=copied_MK)
        return outputs

    def run_behind_each_other(first: Tensor, with_config: FewRows | None) -> Tensor:
        y_MN = first
        for _ in range(6):  # y of one product is x of the next, rescaled so that nothing overflows
            y_MN = product(quantize_activation(y_MN) if precision == "fp8" else y_MN, w, with_config)
            y_MN = y_MN / y_MN.abs().amax()
        return y_MN

    chain(config), run_behind_each_other(source_MK, config)
    graph, (outputs, last_MN) = captured(lambda: (chain(config), run_behind_each_other(source_MK, config)))
    for replay in range(20):
        source_MK.copy_(x_MK.roll(replay, dims=1))
        for y_MN in (*outputs, last_MN):
            y_MN.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for y_MN, expected_MN in zip(outputs, chain(None), strict=True):
            assert same_bits(y_MN, expected_MN), replay
        assert same_bits(last_MN, run_behind_each_other(source_MK, None)), replay
