"""Which kernels let the next one start early, and which products do: those of the rollout's forward only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from octetrl.kernels import programmatic_launch
from octetrl.layers.linear import Float8Linear
from octetrl.layers.unquantized_linear import Linear
from octetrl.models.blocks import products


@pytest.mark.parametrize(
    ("rows", "on_gpu", "capability", "hint"),
    [(1, True, 9, True), (64, True, 9, True), (65, True, 9, False), (64, True, 10, False), (64, False, 9, False)],
)
def test_the_hint_is_given_over_few_rows_on_hopper(
    rows: int, on_gpu: bool, capability: int, hint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programmatic_launch, "has_gluon", lambda device: capability == 9)
    x: Any = SimpleNamespace(is_cuda=on_gpu, shape=(rows, 128), device=torch.device("cuda"))
    assert programmatic_launch.lets_next_start(x) is hint


@pytest.mark.parametrize("kind", [Linear, Float8Linear])
def test_only_products_of_the_rollout_start_early(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer writes weights and their codes right in front of a product."""
    asked: list[bool] = []

    def gemm(x: object, w: object, *, early: bool = False, is_part: bool = False) -> torch.Tensor:
        asked.append(early)
        return torch.zeros(4, 128)

    monkeypatch.setattr(products, "bf16_gemm", gemm)
    monkeypatch.setattr(products, "fp8_gemm", gemm)
    linear = kind(128, 128, dtype=torch.bfloat16)
    torch.nn.init.ones_(linear.weight)
    x_TC = torch.zeros(4, 128, dtype=torch.bfloat16)
    if kind is Float8Linear:
        linear.requantize()
    products.project(linear, x_TC)
    products.product(linear, products.Input(x_TC, x_TC))
    assert asked == [True, False]
    if kind is Float8Linear:
        linear.release_codes()
        products.project(linear, x_TC)
        assert asked[2:] == [False], "the product's codes are made right in front of it"
