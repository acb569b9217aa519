"""On a Hopper GPU: the small GEMMs have, row for row, the bits of the large ones, whichever kernel runs them."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from octetrl.fp8.backends import fp8_gemm_nt
from octetrl.fp8.quantize import Quantized
from octetrl.kernels.gemm.bf16_gemm import LARGE, bf16_gemm, bf16_gemm_triton
from octetrl.kernels.gemm.bf16_gemm import PLAIN as PLAIN_BF16
from octetrl.kernels.gemm.fp8_gemm import (
    PLAIN,
    SCALES_OF_16_BYTES,
    Config,
    choose_config,
    fp8_entries,
    fp8_gemm,
    gemm_table,
    run_config,
)
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from tests.gpu.compare import captured

pytestmark = pytest.mark.gpu

ROWS = (1, 2, 7, 8, 16, 17, 31, 32, 33, 64, 65, 100, 128, 129, 192, 256, 257, 500, 512)
MORE_ROWS = (513, 640, 777, 1000, 1024, 1536, 2048, 2500, 4096, 4800, 8192)  # where cuBLAS alone decides
NARROW = [(896, 896), (896, 4864), (1536, 8960), (2560, 9728), (3584, 18944), (5120, 17408)]  # of untuned models
CONFIGS = [
    *PLAIN.values(),
    Config("triton", 32, 128, 3, swap=True),
    Config("triton", 64, 128, 3, group=4),
    Config("gluon", 64, 32, 12),
    Config("gluon", 64, 64, 8),
    Config("gluon", 64, 128, 4),
    Config("gluon", 128, 32, 10),
    Config("gluon", 128, 64, 6, group=2),
]


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """BF16, with blocks of very different size, so that a wrong scale or order shows."""
    generator = torch.Generator(device="cuda").manual_seed(n + k)
    x_MK = torch.randn(m, k, generator=generator, device="cuda") * torch.logspace(-2, 2, k, device="cuda")
    w_NK = torch.randn(n, k, generator=generator, device="cuda") * torch.logspace(1, -2, k, device="cuda")
    return x_MK.bfloat16(), w_NK.bfloat16()


def quantized(x_MK: torch.Tensor) -> Quantized:
    x = quantize_activation(x_MK)
    return Quantized(x.codes, x.scale.t().contiguous().t())


def shapes(kind: str) -> list[tuple[int, int]]:
    return [(int(n), int(k)) for n, k in (shape.split("x") for shape in gemm_table()[kind])]


@pytest.mark.parametrize(("n", "k"), [(384, 512), (1152, 1024), (4096, 4096), (576, 1536)])
def test_every_kernel_has_scaled_mms_bits(n: int, k: int) -> None:
    x_MK, w_NK = operands(512, n, k)
    w = quantize_weight(w_NK)
    whole = fp8_gemm_nt(quantized(x_MK), w, "scaled_mm")
    for config in CONFIGS:
        for m in (1, 33, 64, 100, 256, 300):
            if config.kernel == "gluon" and m % SCALES_OF_16_BYTES:
                with pytest.raises(ValueError, match="multiple of 4"):
                    run_config(config, quantized(x_MK[:m]), w)
                continue
            y_MN = run_config(config, quantized(x_MK[:m]), w)
            assert torch.equal(y_MN, whole[:m]), (config, m)


@pytest.mark.parametrize(
    ("n", "k"), [*shapes("fp8"), (640, 384), (200, 384), (256, 200), (576, 1536), (2880, 4000), (4000, 2880)]
)
def test_a_rows_bits_do_not_depend_on_the_batch(n: int, k: int) -> None:
    x_MK, w_NK = operands(4096, n, k)
    w = quantize_weight(w_NK)
    whole = fp8_gemm_nt(quantized(x_MK), w, "scaled_mm")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a Gluon kernel that does not compile is a fault here
        for m in ROWS:
            assert torch.equal(fp8_gemm(quantized(x_MK[:m]), w), whole[:m]), (m, choose_config(m, n, k))


def test_columns_may_be_ragged_for_the_kernels_themselves() -> None:
    x_MK, w_NK = operands(72, 200, 512)
    x, w = quantized(x_MK), quantize_weight(w_NK)
    expected = fp8_gemm_nt(x, w, "scaled_mm")
    for config in (Config("triton", 64, 64, 3), Config("triton", 16, 64, 3, swap=True), Config("gluon", 64, 64, 6)):
        assert torch.equal(run_config(config, x, w), expected), config


def test_a_poisoned_row_stays_alone() -> None:
    x_MK, w_NK = operands(64, 4096, 4096)
    w = quantize_weight(w_NK)
    clean = fp8_gemm(quantized(x_MK), w)
    x_MK[5, 700] = torch.inf
    y_MN = fp8_gemm(quantized(x_MK), w)
    assert y_MN[5].isnan().all()
    y_MN[5] = clean[5]
    assert torch.equal(y_MN, clean)


def test_runs_inside_a_captured_graph() -> None:
    n, k = 4096, 4096
    x_MK, w_NK = operands(128, n, k)
    x, w = quantized(x_MK), quantize_weight(w_NK)
    assert {config.kernel for config in fp8_entries(n, k).values()} & {"gluon", "triton"}
    fp8_gemm(x, w), bf16_gemm(x_MK, w_NK)
    graph, (y_MN, y_bf16_MN) = captured(lambda: (fp8_gemm(x, w), bf16_gemm(x_MK, w_NK)))
    x_MK.neg_()
    x.codes.view(torch.uint8).bitwise_xor_(0x80)
    graph.replay()
    assert torch.equal(y_MN, fp8_gemm_nt(x, w, "scaled_mm"))
    assert torch.equal(y_bf16_MN, bf16_gemm(x_MK, w_NK))


@pytest.mark.parametrize(("n", "k"), [*shapes("fp8"), *NARROW])
def test_bf16_rows_have_one_order_however_many_they_are(n: int, k: int) -> None:
    """The straight loop's, also where `F.linear` takes over: its tiles must be enough not to split K."""
    x_MK, w_NK = operands(MORE_ROWS[-1], n, k)
    straight = bf16_gemm_triton(x_MK, w_NK, LARGE)
    differing = [m for m in (*ROWS, *MORE_ROWS) if not torch.equal(bf16_gemm(x_MK[:m], w_NK), straight[:m])]
    assert not differing, f"{n} x {k}: {differing} rows"


@pytest.mark.parametrize(("n", "k"), shapes("bf16"))
def test_bf16_rows_have_the_bits_of_a_large_batch(n: int, k: int) -> None:
    x_MK, w_NK = operands(4096, n, k)
    whole = F.linear(x_MK, w_NK)
    for m in ROWS:
        assert torch.equal(bf16_gemm(x_MK[:m], w_NK), whole[:m]), m
    for config in (*PLAIN_BF16.values(), Config("straight", 16, 32, 4, tile_k=128)):
        assert torch.equal(bf16_gemm_triton(x_MK[:100], w_NK, config), whole[:100]), config
