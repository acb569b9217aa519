"""FP8 linears that workers share, against one worker's: the formats of their operands reach every product."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octetrl.layers.cut_linear import CutFloat8Linear
from octetrl.layers.linear import Float8Linear
from octetrl.layers.tensor_group import TensorGroup, own_columns
from tests.grid import run_grid

SIZE = 2
IN, OUT, TOKENS = 256, 256, 130


class Products(NamedTuple):
    y: Tensor
    dx: Tensor
    dweight: Tensor


def drawn(rows: int, columns: int, seed: int) -> Tensor:
    """Rows and columns of different magnitudes, so that scales are no powers of two."""
    generator = torch.Generator().manual_seed(seed)
    size_R1, size_C = 0.1 + torch.rand(rows, 1, generator=generator), 0.1 + torch.rand(columns, generator=generator)
    return (torch.randn(rows, columns, generator=generator) * size_R1 * size_C).bfloat16()


def products(linear: Float8Linear, weight_NK: Tensor, x_MK: Tensor, dy_MN: Tensor) -> Products:
    with torch.no_grad():
        linear.weight.copy_(weight_NK)
    linear.requantize()
    x_MK = x_MK.clone().requires_grad_()
    y_MN = linear(x_MK)
    y_MN.backward(dy_MN)
    assert x_MK.grad is not None and linear.weight is not None and linear.weight.grad is not None
    return Products(y_MN.detach(), x_MK.grad, linear.weight.grad)


@pytest.mark.parametrize("joins", [False, True], ids=["cut", "joins"])
@pytest.mark.parametrize("power_of_two", [False, True], ids=["", "power of two"])
@pytest.mark.parametrize("square_wgrad", [False, True], ids=["", "square"])
def test_a_part_has_the_products_of_the_whole(joins: bool, power_of_two: bool, square_wgrad: bool) -> None:
    """y and dW to the bit. dx adds the workers' products in another order, so it is nearly equal."""
    formats = {"power_of_two": power_of_two, "square_wgrad": square_wgrad}
    weight_NK, x_MK, dy_MN = drawn(OUT, IN, 0), drawn(TOKENS, IN, 1), drawn(TOKENS, OUT, 2)
    whole = products(Float8Linear(IN, OUT, **formats), weight_NK, x_MK, dy_MN)

    def of_part(group: TensorGroup) -> Products:
        part = CutFloat8Linear(IN, OUT // SIZE, group=group, joins=joins, **formats)
        own_LK = own_columns(group, weight_NK.t()).t()
        if joins:
            return products(part, own_LK, own_columns(group, x_MK), dy_MN)
        return products(part, own_LK, x_MK, own_columns(group, dy_MN))

    for rank, one in enumerate(run_grid(1, SIZE, lambda peers: of_part(peers.group))):
        rows, inputs = (
            slice(rank * OUT // SIZE, (rank + 1) * OUT // SIZE),
            slice(rank * IN // SIZE, (rank + 1) * IN // SIZE),
        )
        assert torch.equal(one.y, whole.y if joins else whole.y[:, rows])
        assert torch.equal(one.dweight, whole.dweight[rows])
        dx_MK = whole.dx[:, inputs] if joins else whole.dx
        assert torch.allclose(one.dx.float(), dx_MK.float(), rtol=0.008, atol=1e-4)
        assert (one.dx == dx_MK).float().mean() > 0.98


def test_each_format_has_other_products() -> None:
    """Otherwise the tests above could not tell them apart."""
    weight_NK, x_MK, dy_MN = drawn(OUT, IN, 0), drawn(TOKENS, IN, 1), drawn(TOKENS, OUT, 2)
    plain = products(Float8Linear(IN, OUT), weight_NK, x_MK, dy_MN)
    rounded = products(Float8Linear(IN, OUT, power_of_two=True), weight_NK, x_MK, dy_MN)
    square = products(Float8Linear(IN, OUT, square_wgrad=True), weight_NK, x_MK, dy_MN)
    assert not any(torch.equal(*pair) for pair in zip(plain, rounded, strict=True))
    assert (rounded.dx == plain.dx).float().mean() < 0.5
    assert torch.equal(square.dx, plain.dx) and not torch.equal(square.dweight, plain.dweight)
