"""Many weights quantised in one launch have the bytes of `quantize_weight`, whatever their shapes."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.quantize import Quantized, quantize_weight_reference
from octetrl.kernels.quantize.quantize_weight import check_scales
from octetrl.kernels.quantize.quantize_weights import (
    QuantizedWeight,
    quantize_weights_reference,
    quantize_weights_triton,
)
from octetrl.kernels.quantize.quantize_weights import quantize_weights as run
from tests.unit.kernels.quantize_cases import (
    assert_nearly_same_codes,
    assert_same_bytes,
    off_the_grid,
    on_the_grid,
)

SHAPES = [(128, 128), (256, 304), (70, 48), (3, 16), (384, 128)]
ODD = [(128, 130), (5, 7)]


def job(w: torch.Tensor, transposed: bool = False) -> QuantizedWeight:
    blocks = [-(-size // 128) for size in w.shape]
    out = Quantized(torch.zeros(w.shape, dtype=E4M3), torch.full(blocks, torch.nan))
    return QuantizedWeight(w, out, torch.zeros(w.shape[::-1], dtype=E4M3) if transposed else None)


def assert_right(jobs: dict[str, QuantizedWeight], power_of_two: bool) -> None:
    for one in jobs.values():
        want = quantize_weight_reference(one.w_NK, power_of_two)
        assert_same_bytes(one.out, want)
        if one.transposed_KN is not None:
            assert torch.equal(one.transposed_KN.view(torch.uint8), want.codes.t().view(torch.uint8))


@pytest.mark.parametrize("quantize", [quantize_weights_triton, quantize_weights_reference])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_each_weight_has_the_bytes_of_the_reference(power_of_two: bool, quantize: object) -> None:
    """BF16 and float32, with transposed codes and without, in the table and beside it."""
    jobs = {f"rows {shape}": job(on_the_grid(shape)) for shape in [*SHAPES, *ODD]}
    jobs |= {f"both {shape}": job(on_the_grid(shape), True) for shape in [*SHAPES, *ODD]}
    jobs |= {"float32": job(on_the_grid((256, 128)).float()), "strided": job(on_the_grid((128, 256))[:, 128:])}
    jobs["turned"] = job(on_the_grid((128, 256)).t())
    assert callable(quantize)
    quantize(jobs, power_of_two)
    assert_right(jobs, power_of_two)


@pytest.mark.parametrize("quantize", [quantize_weights_triton, quantize_weights_reference, run])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_are_powers_of_two_only_where_they_are_asked_for(power_of_two: bool, quantize: object) -> None:
    """In the table and beside it. On the grid every scale is a power of two."""
    jobs = {
        f"{shape} {turned}": job(off_the_grid(shape), turned) for shape in [*SHAPES, *ODD] for turned in (False, True)
    }
    assert callable(quantize)
    quantize(jobs, power_of_two)
    for one in jobs.values():
        assert_nearly_same_codes(one.out, quantize_weight_reference(one.w_NK, power_of_two))
    scales = torch.cat([one.out.scale.flatten() for one in jobs.values()])
    assert (torch.frexp(scales).mantissa == 0.5).all() == power_of_two


@pytest.mark.parametrize("which", ["codes", "transposed codes", "scales"])
def test_places_that_are_not_contiguous_are_refused(which: str) -> None:
    """The kernel would write beside them."""
    w, transposed = on_the_grid((128, 256)), torch.zeros(256, 128, dtype=E4M3)
    out = Quantized(torch.zeros(128, 256, dtype=E4M3), torch.zeros(1, 2))
    if which == "codes":
        out = Quantized(torch.zeros(256, 128, dtype=E4M3).t(), out.scale)
    elif which == "scales":
        out = Quantized(out.codes, torch.zeros(1, 4)[:, ::2])
    else:
        transposed = torch.zeros(128, 256, dtype=E4M3).t()
    with pytest.raises(AssertionError, match="must be contiguous"):
        quantize_weights_triton({"w": QuantizedWeight(w, out, transposed)})


def test_rows_of_a_weight_are_written_into_their_place() -> None:
    w = on_the_grid((384, 256))
    whole = job(w)
    for first, stop in ((0, 128), (128, 384)):
        rows = slice(first // 128, stop // 128)
        place = Quantized(whole.out.codes[first:stop], whole.out.scale[rows])
        quantize_weights_triton({"w": QuantizedWeight(w[first:stop].clone(), place)})
    assert_right({"w": whole}, False)


def test_what_the_table_takes() -> None:
    assert all(job(on_the_grid(shape)).fits_table for shape in SHAPES)
    assert not any(job(on_the_grid(shape)).fits_table for shape in ODD)
    assert job(on_the_grid((128, 48)), True).fits_table and not job(on_the_grid((70, 48)), True).fits_table
    assert not job(on_the_grid((128, 256)).t()).fits_table and not job(on_the_grid((128, 256))[:, 4:132]).fits_table


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_weight_is_named(bad: float) -> None:
    jobs = {name: job(on_the_grid((128, 128))) for name in "abc"}
    jobs["b"].w_NK[127, 3] = bad
    quantize_weights_triton(jobs)
    with pytest.raises(NonFiniteError, match=r"b: 1 non-finite value\(s\), the first at \(127, 3\)"):
        check_scales({name: (one.w_NK, one.out.scale) for name, one in jobs.items()})
    with pytest.raises(NonFiniteError, match="b: 1 non-finite"):
        run(jobs)


def test_nothing_is_quantised() -> None:
    run({})
    quantize_weights_triton({})
    quantize_weights_triton({"no rows": job(torch.zeros(0, 128).bfloat16())})
