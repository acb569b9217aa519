"""The small FP8 GEMM: its choice of kernels, its table, and plain Triton against the exact emulation (interpreted).

What a GPU's tensor core adds up, bit for bit, and the Gluon kernel, stand in tests/gpu/test_small_gemm.py.
"""

from __future__ import annotations

import ast
import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from lab.kernels.gemm import bf16_candidates, fp8_candidates, may_run, table_text
from octetrl.fp8.backends import fp8_gemm_nt
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_weight_reference
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels import gluon
from octetrl.kernels.gemm import fp8_gemm as module
from octetrl.kernels.gemm.few_rows_gluon import SHARED_LIMIT
from octetrl.kernels.gemm.fp8_gemm import SCALED_MM, Config, choose_config, fp8_gemm, fp8_gemm_triton
from octetrl.kernels.gemm.fp8_gemm_gluon import RING_LIMIT, ring_bytes
from octetrl.layers.tensor_group import ONE_WORKER
from octetrl.workers.kernel_paths import FallbackWatch, path_metrics


def operands(m: int, n: int, k: int) -> tuple[Quantized, Quantized]:
    """Random ones, whose scales differ from block to block; the activation's scale with strides (1, M)."""
    generator = torch.Generator().manual_seed(m + n + k)
    x_MK = torch.randn(m, k, generator=generator) * torch.logspace(-1, 1, k)
    w_NK = torch.randn(n, k, generator=generator) * torch.logspace(-1, 1, n)[:, None]
    x = quantize_activation_reference(x_MK.bfloat16())
    return Quantized(x.codes, x.scale.t().contiguous().t()), quantize_weight_reference(w_NK.bfloat16())


@pytest.mark.parametrize(
    ("m", "n", "k", "config"),
    [
        (5, 128, 256, Config("triton", 16, 64, 2, swap=True)),
        (33, 200, 384, Config("triton", 16, 64, 2, swap=True)),  # ragged rows, columns and blocks of columns
        (70, 256, 128, Config("triton", 64, 32, 2)),
        (150, 200, 256, Config("triton", 64, 128, 2, group=2)),
        (9, 208, 176, Config("triton", 16, 64, 2, swap=True)),  # a ragged last block of K
        (70, 80, 400, Config("triton", 64, 64, 3)),
        (0, 128, 128, Config("triton", 64, 64, 2)),
    ],
)
def test_kernel_is_near_the_emulation(m: int, n: int, k: int, config: Config) -> None:
    x, w = operands(m, n, k)
    y = fp8_gemm_triton(x, w, config)
    assert y.shape == (m, n) and y.dtype == torch.bfloat16
    if m > 0:
        exact = fp8_gemm_nt(x, w, out_dtype=torch.float32)
        assert relative_error(y, exact) < 5e-3  # the interpreter truncates to BF16
        per_row = (y.float() - exact).norm(dim=1) / exact.norm(dim=1)
        per_column = (y.float() - exact).norm(dim=0) / exact.norm(dim=0)
        assert max(per_row.max(), per_column.max()) < 8e-3


def test_a_cpu_has_the_emulation() -> None:
    x, w = operands(3, 200, 200)
    assert torch.equal(fp8_gemm(x, w), fp8_gemm_nt(x, w, "emulated"))


def test_layouts_that_cannot_be_read_are_refused() -> None:
    x, w = operands(4, 128, 256)
    config = Config("triton", 64, 64, 2)
    with pytest.raises(ValueError, match="strides"):
        fp8_gemm_triton(Quantized(x.codes, x.scale.contiguous()), w, config)
    with pytest.raises(ValueError, match="scales"):
        fp8_gemm_triton(Quantized(x.codes, x.scale[:, :1]), w, config)
    with pytest.raises(ValueError, match="contiguous"):
        fp8_gemm_triton(x, Quantized(w.codes.t().contiguous().t(), w.scale), config)
    with pytest.raises(ValueError, match="one multiple of 16"):
        fp8_gemm_triton(*operands(4, 128, 200), config)
    for bits_at_risk in (Config("triton", 16, 64, 2), Config("triton", 64, 256, 2)):
        with pytest.raises(AssertionError):
            fp8_gemm_triton(x, w, bits_at_risk)


def test_the_table_is_written_as_it_is_read() -> None:
    assert table_text(module.gemm_table()) == module.TABLE.read_text(encoding="utf-8")


def test_every_entry_can_run() -> None:
    """By the kernels' own demands: wgmma's 64 rows, one weight scale a tile, a ring that fits, two blocks a turn."""
    for shape, entries in module.gemm_table()["fp8"].items():
        n, k = map(int, shape.split("x"))
        assert n % 128 == k % 128 == 0
        for config in module.fp8_entries(n, k).values():
            if config.kernel == "triton":
                assert 128 % config.tile_n == 0 and (config.tile_n if config.swap else config.tile_m) >= 64, config
            elif config.kernel == "gluon":
                assert k % 256 == 0 and ring_bytes(config.tile_m, config.tile_n, config.stages) <= RING_LIMIT, config
            elif config.kernel == "few_rows":
                needed = module.few_rows_variant(config).shared_bytes(k, fp8=True)
                assert 128 % config.tile_n == 0 and needed <= SHARED_LIMIT, config
            else:
                assert config == SCALED_MM
        assert all(entry == Config(**entry).as_json() for entry in entries.values())


def test_choosing_again_can_choose_every_entry_for_few_rows() -> None:
    """Of this kernel: what is not a candidate, `--tune` would drop from the table."""
    for precision, candidates in (("fp8", fp8_candidates), ("bf16", bf16_candidates)):
        for shape, entries in module.gemm_table()[precision].items():
            for m, config in ((int(m), Config(**entry)) for m, entry in entries.items()):
                if config.kernel == "few_rows":
                    assert config in candidates(m) and may_run(config, int(shape.split("x")[1]), precision), (shape, m)
        assert {config.tile_m for config in candidates(33) if config.kernel == "few_rows"} == {64}
        assert not [config for config in candidates(65) if config.kernel == "few_rows"]
    largest = Config("few_rows", 64, 64, 3, group=4, swap=True)
    assert may_run(largest, 12288, "fp8") and not may_run(largest, 20480, "fp8") and may_run(largest, 20480, "bf16")
    assert not may_run(largest, 4160, "fp8") and may_run(largest, 4160, "bf16"), "a panel: 128 codes or 64 numbers"


def test_an_entry_serves_the_sizes_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = Config("triton", 64, 64, 3), Config("gluon", 128, 64, 8)
    entries = {"32": SCALED_MM.as_json(), "64": small.as_json(), "256": large.as_json()}
    table = {"fp8": {"512x1024": entries}, "bf16": {}}
    for cached in (module.gemm_table, module.fp8_entries, module.choose_config):
        cached.cache_clear()
    monkeypatch.setattr(module, "gemm_table", lambda: json.loads(json.dumps(table)))
    chosen = {m: choose_config(m, 512, 1024) for m in (1, 31, 32, 33, 64, 65, 256, 257)}
    module.fp8_entries.cache_clear(), module.choose_config.cache_clear()
    assert chosen[32] == SCALED_MM and chosen[257] == SCALED_MM
    assert chosen[33] == chosen[64] == small and chosen[65] == chosen[256] == large
    assert chosen[1].kernel == chosen[31].kernel == "triton", "cuBLAS may sum in another order below 32 rows"


def test_a_shape_out_of_the_table_goes_by_rule() -> None:
    kernels = {m: choose_config(m, 640, 384).kernel for m in (1, 16, 17, 256, 257, 100_000)}
    assert kernels == {1: "triton", 16: "triton", 17: "triton", 256: "triton", 257: "scaled_mm", 100_000: "scaled_mm"}


class _OnGpu(torch.Tensor):
    """A CPU tensor that says it lies on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def falls_with(error: Exception, monkeypatch: pytest.MonkeyPatch) -> tuple[Quantized, Quantized]:
    """Operands of a GEMM whose Gluon kernel raises `error`; plain Triton gives a zero."""
    x, w = operands(40, 128, 256)

    def broken(*_: object) -> torch.Tensor:
        raise error

    monkeypatch.setattr(module, "choose_config", lambda m, n, k: Config("gluon", 64, 64, 8))
    monkeypatch.setattr(module, "gluon_launcher", broken)
    monkeypatch.setattr(module, "fp8_gemm_triton", lambda x, w, config: torch.zeros(1))
    monkeypatch.setattr(module, "has_gluon", lambda device: True)
    monkeypatch.setattr(gluon, "fallbacks", {})
    return Quantized(x.codes.as_subclass(_OnGpu), x.scale), w


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: bad address"),
        TypeError("arguments"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_fault_of_another_kind_is_not_gluons(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = falls_with(error, monkeypatch)
    for _ in range(2):
        with pytest.raises(type(error)):
            fp8_gemm(x, w)
    assert FallbackWatch().warning({}) is None


@pytest.mark.parametrize(
    "error",
    [
        PTXASError("no such instruction"),
        OutOfResources(240_000, 232_448, "shared memory"),
        CompilationError("src", ast.Pass(), "a name has moved"),
        RuntimeError("PassManager::run failed"),
        ImportError("no gluon"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_gluon_that_does_not_compile_is_replaced_and_reported(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = falls_with(error, monkeypatch)
    watch = FallbackWatch()
    with pytest.warns(UserWarning, match=rf"so a slower kernel runs \({type(error).__name__}"):
        assert fp8_gemm(x, w).numel() == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fp8_gemm(x, w)
    assert list(gluon.fallbacks) == [Config("gluon", 64, 64, 8)]
    told = watch.warning({})
    assert told is not None and type(error).__name__ in told and "\n" not in told
    assert "1 Gluon kernel" in told and "fp8_gemm, Config" in told
    assert watch.warning({}) is None, "told once"
    head = SimpleNamespace(is_cuda=True)
    on_gpu = SimpleNamespace(lm_head_weight=head, dtype=torch.float32, group=ONE_WORKER, has_fused_forms=True)
    assert path_metrics(trained=on_gpu, generating=on_gpu) == {
        "fp8/gluon_fallbacks": 1.0,
        "train/fused": 0.0,
        "rollout/fused": 0.0,
    }
