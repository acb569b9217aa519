"""Residual, norm and codes in one kernel, against the three references one after the other."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.rows.add_rms_norm import (
    add_rms_norm,
    add_rms_norm_both,
    add_rms_norm_both_triton,
    add_rms_norm_triton,
)
from octetrl.kernels.rows.combine_experts import ExpertSum, combine_experts, combine_experts_triton
from octetrl.kernels.rows.rms_norm import rms_norm_reference
from tests.unit.kernels.fused_row_cases import assert_near, bytes_of, normal

EPS = 1e-6
SHAPES = [(3, 1024), (5, 96), (2, 1136), (0, 256)]


def _inputs(
    shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    delta, residual = normal(*shape, dtype=dtype), normal(*shape, seed=1, dtype=dtype) * 3
    return delta, residual, 1 + 0.1 * normal(shape[1], seed=2, dtype=dtype)


@pytest.mark.parametrize("quantize", [False, True])
def test_is_the_sum_then_the_norm_then_the_codes(quantize: bool) -> None:
    delta, residual, weight = _inputs((7, 160))
    want_residual = residual + delta
    want = rms_norm_reference(want_residual, weight, EPS)
    for given in (delta, None):  # the second time the residual is already summed
        got_residual, got = add_rms_norm(given, residual, weight, EPS, quantize=quantize)
        assert got_residual is residual and torch.equal(residual, want_residual)
        if isinstance(got, Quantized):
            codes, scale = quantize_activation_reference(want)
            assert torch.equal(got.codes.float(), codes.float()) and torch.equal(got.scale, scale)
        else:
            assert torch.equal(got, want)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_is_near_the_reference(shape: tuple[int, int], power_of_two: bool) -> None:
    delta, residual, weight = _inputs(shape, torch.float32)
    view = torch.cat((delta, residual), dim=1)[:, : shape[1]]  # rows further apart than they are long
    for given in (view, None):
        want_residual, want = add_rms_norm(given, residual.clone(), weight, EPS, quantize=False)
        got_residual, got = add_rms_norm_triton(given, residual.clone(), weight, EPS, quantize=False)
        assert torch.equal(got_residual, want_residual)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        _, codes = add_rms_norm_triton(given, residual.clone(), weight, EPS, quantize=True, power_of_two=power_of_two)
        assert isinstance(codes, Quantized) and codes.scale.stride() == (1, max(1, -(-shape[0] // 4) * 4))
        assert_near(codes, quantize_activation_reference(got, power_of_two))


def test_a_non_finite_value_poisons_its_row_alone() -> None:
    delta, residual, weight = _inputs((3, 1024))
    delta[1, 700] = torch.nan
    _, (codes, scale) = add_rms_norm_triton(delta, residual, weight, EPS, quantize=True)
    assert codes[1].float().isnan().all() and scale[1].isnan().all()
    assert codes[[0, 2]].float().isfinite().all() and scale[[0, 2]].isfinite().all()


@pytest.mark.parametrize("given", [True, False])
def test_both_forms_are_those_of_one_at_a_time(given: bool) -> None:
    delta, residual, weight = _inputs((7, 160))
    other = residual.clone()
    want_residual, want = add_rms_norm(delta if given else None, residual, weight, EPS, quantize=False)
    got_residual, values, codes = add_rms_norm_both(delta if given else None, other, weight, EPS)
    assert torch.equal(got_residual, want_residual) and torch.equal(values, want)
    assert bytes_of(codes) == bytes_of(quantize_activation_reference(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (1, 2048), (7, 2048), (20, 512)])
def test_the_kernel_stores_both_forms_with_the_bytes_of_each(
    shape: tuple[int, int], power_of_two: bool, dtype: torch.dtype
) -> None:
    """Rows of NaN and of infinity too."""
    delta, residual, weight = _inputs(shape, dtype)
    if shape[0] > 4:
        delta[1, 3], delta[4, 90] = torch.nan, torch.inf
    alone = [
        add_rms_norm_triton(delta, residual.clone(), weight, EPS, quantize=quantize, power_of_two=power_of_two)
        for quantize in (False, True)
    ]
    found_residual, values, codes = add_rms_norm_both_triton(delta, residual, weight, EPS, power_of_two)
    assert bytes_of(found_residual) == bytes_of(alone[0][0])
    assert bytes_of(values) == bytes_of(alone[0][1]) and bytes_of(codes) == bytes_of(alone[1][1])


def _expert_sum(shape: tuple[int, int], slots: int, dtype: torch.dtype, has_shared: bool) -> ExpertSum:
    tokens, size = shape
    chance = torch.Generator().manual_seed(3)
    row_TS = torch.randperm(tokens * slots, generator=chance).view(tokens, slots)
    shared_TE = normal(*shape, seed=4, dtype=dtype) if has_shared else None
    weight_TS = torch.rand(tokens, slots, generator=chance)
    return ExpertSum(normal(tokens * slots, size, seed=5, dtype=dtype), weight_TS, row_TS, shared_TE)


@pytest.mark.parametrize("has_shared", [False, True])
def test_the_sum_of_experts_is_an_addend(has_shared: bool) -> None:
    _, residual, weight = _inputs((7, 160))
    experts, before = _expert_sum((7, 160), 3, torch.bfloat16, has_shared), residual.clone()
    want_residual, want = add_rms_norm(combine_experts(*experts), residual, weight, EPS, quantize=False)
    for power_of_two in (False, True):
        got_residual, values, codes = add_rms_norm_both(experts, before.clone(), weight, EPS, power_of_two)
        assert torch.equal(got_residual, want_residual) and torch.equal(values, want)
        assert bytes_of(codes) == bytes_of(quantize_activation_reference(want, power_of_two))


def test_what_the_kernel_would_misread_is_an_error() -> None:
    """Shapes, dtypes and strides are named, and no values."""
    _, residual, weight = _inputs((4, 256))
    good = _expert_sum((4, 256), 3, torch.bfloat16, has_shared=True)
    assert good.shared_TE is not None
    wrong = {
        "11 rows of 4 x 3 experts": good._replace(y_PE=good.y_PE[:11]),
        "strides of the experts' rows": good._replace(row_TS=good.row_TS.t().contiguous().t()),
        r"\(4, 2\) torch.float32, must be \(4, 3\) torch.float32": good._replace(weight_TS=good.weight_TS[:, :2]),
        r"\(4, 3\) torch.bfloat16, must be": good._replace(weight_TS=good.weight_TS.bfloat16()),
        r"\(4, 3\) torch.int32, must be \(4, 3\) torch.int64": good._replace(row_TS=good.row_TS.int()),
        r"\(3, 256\) torch.bfloat16, must be \(4, 256\)": good._replace(shared_TE=good.shared_TE[:3]),
        r"\(4, 256\) torch.float32, must be \(4, 256\) torch.bfloat16": good._replace(shared_TE=good.shared_TE.float()),
        r"\(4, 255\) torch.bfloat16, must be": good.shared_TE[:, 1:],
        "last axis has stride 4": good.shared_TE.t().contiguous().t(),
    }
    for message, delta in wrong.items():
        for add in (partial(add_rms_norm, quantize=True), add_rms_norm_both):
            with pytest.raises(AssertionError, match=f"^add_rms_norm: {message}[^\n]*$"):
                add(delta, residual, weight, EPS)


@pytest.mark.parametrize("has_shared", [False, True])
@pytest.mark.parametrize(
    ("shape", "slots", "dtype"),
    [
        *((shape, 3, torch.float32) for shape in SHAPES),
        ((7, 2048), 8, torch.float32),
        ((7, 2048), 8, torch.bfloat16),
        ((20, 512), 1, torch.float32),
    ],
)
def test_the_kernel_adds_the_experts_to_the_bit(
    shape: tuple[int, int], slots: int, dtype: torch.dtype, has_shared: bool
) -> None:
    """As `combine_experts` and then the norm. An expert's NaN poisons the token that reads it."""
    _, residual, weight = _inputs(shape, dtype)
    experts = _expert_sum(shape, slots, dtype, has_shared)
    if shape[0]:
        experts.y_PE[1, 5] = torch.nan
    before, delta = residual.clone(), combine_experts_triton(*experts)
    want_residual, want, want_codes = add_rms_norm_both_triton(delta, residual.clone(), weight, EPS)
    got_residual, got, codes = add_rms_norm_both_triton(experts, residual, weight, EPS)
    assert bytes_of(got_residual) == bytes_of(want_residual) and bytes_of(got) == bytes_of(want)
    assert bytes_of(codes) == bytes_of(want_codes)
    _, alone = add_rms_norm_triton(experts, before, weight, EPS, quantize=True)
    assert bytes_of(alone) == bytes_of(codes)
    assert got.isnan().any(1).nonzero().flatten().tolist() == [t for t, r in enumerate(experts.row_TS) if 1 in r]
