"""The straight BF16 GEMM against float64 (interpreted), and which weights it takes over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm import bf16_gemm as bf16_module
from octetrl.kernels.gemm.bf16_gemm import (
    bf16_gemm,
    bf16_gemm_reference,
    bf16_gemm_triton,
    fastest_config,
    plain_config,
    straight_config,
)
from octetrl.kernels.gemm.fp8_gemm import Config, gemm_table


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    return torch.randn(m, k, generator=generator).bfloat16(), torch.randn(n, k, generator=generator).bfloat16()


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (3, 64, 256, Config("straight", 16, 32, 2, tile_k=64)),
        (70, 100, 200, Config("straight", 64, 32, 2, tile_k=128)),  # ragged everywhere
        (0, 64, 64, Config("straight", 64, 32, 2, tile_k=64)),
    ],
)
def test_kernel_is_near_the_reference(m: int, n: int, k: int, config: Config) -> None:
    x_MK, w_NK = operands(m, n, k)
    y_MN = bf16_gemm_triton(x_MK, w_NK, config)
    assert y_MN.shape == (m, n)
    if m > 0:
        assert relative_error(y_MN, x_MK.double() @ w_NK.double().t()) < 5e-3  # the interpreter truncates to BF16
        assert relative_error(y_MN, bf16_gemm_reference(x_MK, w_NK)) < 5e-3


def test_a_cpu_has_the_reference() -> None:
    x_MK, w_NK = operands(5, 24, 100)
    assert torch.equal(bf16_gemm(x_MK, w_NK), bf16_gemm_reference(x_MK, w_NK))
    torch.testing.assert_close(bf16_gemm(x_MK, w_NK), F.linear(x_MK, w_NK), rtol=1e-2, atol=1e-2)


def test_takes_over_only_where_cublas_splits_k() -> None:
    n, k = 4096, 12288
    assert all(straight_config(m, n, k) is not None for m in (1, 2, 64, 65, 256, 257, 511))
    assert straight_config(512, n, k) is None and straight_config(8192, n, k) is None
    assert straight_config(64, 24576, 4096) is None, "cuBLAS does not split K there, and is faster"


@pytest.mark.parametrize(
    ("n", "k", "rows_enough"), [(3584, 18944, 1153), (896, 4864, 4737), (1152, 896, 3713), (37888, 3584, 1)]
)
def test_a_shape_that_nobody_measured_goes_straight_until_its_tiles_are_enough(
    n: int, k: int, rows_enough: int
) -> None:
    """Two tiles of 128 x 128 for each of 132 multiprocessors."""
    assert straight_config(rows_enough, n, k) is None and straight_config(16384, n, k) is None
    for m in {1, 64, 65, 512, rows_enough - 1} - {0}:
        assert m >= rows_enough or straight_config(m, n, k) == plain_config(m)
    assert straight_config(16, n, k + 4) is None, "the kernel reads whole words of eight"


def test_every_entry_serves_small_batches() -> None:
    for shape in gemm_table()["bf16"]:
        n, k = map(int, shape.split("x"))
        for m in (1, 16, 100, 300, 511):
            config = straight_config(m, n, k)
            if config is None:  # cuBLAS, where it does not split K
                assert {entry["kernel"] for entry in gemm_table()["bf16"][shape].values()} == {"few_rows"}
            else:
                assert config.kernel == "few_rows" or config.tile_k in (32, 64, 128)


def test_few_rows_alone_leave_the_others_to_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    few = Config("few_rows", 8, 32, 4, group=4, swap=True)
    straight = Config("straight", 64, 64, 4, tile_k=64)
    table = {"512x1024": {"8": few.as_json()}, "256x1024": {"8": few.as_json(), "256": straight.as_json()}}
    straight_config.cache_clear()
    monkeypatch.setattr(bf16_module, "gemm_table", lambda: {"fp8": {}, "bf16": table, "straight": {}})
    alone, beside = ([straight_config(m, n, 1024) for m in (1, 8, 9, 300, 512)] for n in (512, 256))
    straight_config.cache_clear()
    assert alone == [few, few, None, None, None]
    assert beside == [few, few, straight, plain_config(300), None]


def test_chosen_tiles_do_not_change_which_products_go_straight() -> None:
    for shape in gemm_table()["straight"]:
        n, k = map(int, shape.split("x"))
        enough = next(m for m in range(1, 40_000, 128) if -(-m // 128) * -(-n // 128) >= 264)
        assert straight_config(enough, n, k) is None
        for m in (1, 100, 256, 600, enough - 1):
            config = fastest_config(m, n, k)
            assert config.kernel == "straight"
            assert m >= enough or straight_config(m, n, k) == config
            assert m <= 256 or config == plain_config(m)
