"""The branch added in place: against float64, its roundings, ragged shapes, columns of wider tensors (interpreted)."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.gemm.bf16_gemm import bf16_gemm_reference, bf16_gemm_straight
from octetrl.kernels.gemm.lora_up import lora_up, lora_up_reference, lora_up_triton


def operands(m: int, n: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y in the middle of a wider product, t in the middle of a wider t."""
    generator = torch.Generator().manual_seed(m + n + rank)
    y_MN = torch.randn(m, n + 10, generator=generator).bfloat16()[:, 3 : 3 + n]
    t_MR = torch.randn(m, 3 * rank, generator=generator).bfloat16()[:, rank : 2 * rank]
    return y_MN, t_MR, torch.randn(n, rank, generator=generator).bfloat16()


@pytest.mark.parametrize(
    ("m", "n", "rank"), [(3, 64, 16), (70, 100, 8), (65, 40, 1), (1, 17, 12), (20, 130, 100), (0, 8, 8)]
)
def test_kernel_is_near_the_reference_and_leaves_its_neighbours(m: int, n: int, rank: int) -> None:
    y_MN, t_MR, b_NR = operands(m, n, rank)
    whole = y_MN._base
    assert whole is not None
    before, expected = whole.clone(), y_MN.clone()
    lora_up_reference(expected, t_MR, b_NR, 1.5)
    exact = before[:, 3 : 3 + n].double() + 1.5 * t_MR.double() @ b_NR.double().t()
    lora_up_triton(y_MN, t_MR, b_NR, 1.5)
    assert torch.equal(whole[:, :3], before[:, :3]) and torch.equal(whole[:, 3 + n :], before[:, 3 + n :])
    if m:
        assert relative_error(y_MN, expected) < 1.2e-2  # the interpreter truncates to BF16, three times here
        assert relative_error(y_MN, exact) < 1.2e-2
        assert relative_error(expected, exact) < 5e-3


def test_roundings_are_those_of_three_ops() -> None:
    y_MN, t_MR, b_NR = operands(33, 50, 8)
    u_MN = bf16_gemm_reference(t_MR, b_NR)
    expected = y_MN + u_MN * 0.3
    lora_up(y_MN, t_MR, b_NR, 0.3)
    assert torch.equal(y_MN, expected)


def test_a_b_of_zero_changes_nothing() -> None:
    y_MN, t_MR, b_NR = operands(9, 20, 4)
    before = y_MN.clone()
    lora_up(y_MN, t_MR, torch.zeros_like(b_NR), 2.0)
    assert torch.equal(y_MN, before)


def test_rows_do_not_depend_on_their_company() -> None:
    y_MN, t_MR, b_NR = operands(40, 30, 8)
    alone = y_MN[7:9].clone()
    lora_up(alone, t_MR[7:9], b_NR, 0.7)
    lora_up(y_MN, t_MR, b_NR, 0.7)
    assert torch.equal(y_MN[7:9], alone)


def test_the_first_product_is_the_reference_on_a_cpu() -> None:
    _, t_MR, b_NR = operands(9, 20, 4)
    assert torch.equal(bf16_gemm_straight(t_MR, b_NR), bf16_gemm_reference(t_MR, b_NR))


def test_what_does_not_fit_is_refused() -> None:
    y_MN, t_MR, b_NR = operands(4, 8, 2)
    with pytest.raises(AssertionError, match="lora_up: y"):
        lora_up(y_MN, t_MR, b_NR[:-1], 1.0)
    with pytest.raises(AssertionError, match="float32"):
        lora_up(y_MN, t_MR, b_NR.float(), 1.0)
