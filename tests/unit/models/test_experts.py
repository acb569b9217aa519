"""The experts as one node: the bits of the separate ops, values and gradients, and less that the backward needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.layers.stacked import Float8StackedLinear, StackedLinear, group_rows
from octetrl.models.blocks.moe.experts import run_experts
from octetrl.models.blocks.moe.module import gather

EXPERTS, CHOSEN, HIDDEN, INNER = 6, 2, 256, 128
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bf16": (StackedLinear, {}),
    "emulated": (Float8StackedLinear, {"backend": "emulated"}),
    "codes": (Float8StackedLinear, {"backend": "scaled_mm"}),  # on a CPU the references read the codes of a GPU
    "powers": (Float8StackedLinear, {"backend": "scaled_mm", "power_of_two": True}),
}


def saved_elements(forward: Any) -> tuple[Tensor, int]:
    """The result, and how many activations the graph keeps."""
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point():
            sizes[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out: Tensor = forward()
    return out, sum(sizes.values())


@pytest.mark.parametrize("name", KINDS)
def test_the_bits_are_those_of_the_separate_ops(name: str) -> None:
    kind, options = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    gate_up, down = kind(HIDDEN, 2 * INNER, EXPERTS, **options), kind(INNER, HIDDEN, EXPERTS, **options)
    for linear in (gate_up, down):
        torch.nn.init.normal_(linear.weight, std=0.1, generator=generator)
        if isinstance(linear, Float8StackedLinear):
            linear.requantize()
    expert_TS = torch.rand(37, EXPERTS - 1, generator=generator).topk(CHOSEN).indices.sort(1).values
    groups = group_rows(expert_TS, EXPERTS)  # the last expert has no row
    x_TE = torch.randn(37, HIDDEN, generator=generator).bfloat16().requires_grad_()
    upstream_PE = torch.randn(37 * CHOSEN, HIDDEN, generator=generator).bfloat16()
    ways = (
        lambda: run_experts(x_TE, groups, gate_up, down).down_PE,
        lambda: down(silu_mul(gate_up(gather(x_TE, groups), groups)), groups),
    )
    found, kept = [], []
    for way in ways:
        out_PE, elements = saved_elements(way)
        kept.append(elements)
        found.append([out_PE, *torch.autograd.grad(out_PE, [x_TE, gate_up.weight, down.weight], upstream_PE)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert all(bool(one.any()) for one in found[0])
    rows = 37 * CHOSEN
    assert kept == [37 * HIDDEN + rows * 2 * INNER, rows * (HIDDEN + 3 * INNER)]


def test_stale_codes_are_refused() -> None:
    gate_up, down = (Float8StackedLinear(HIDDEN, HIDDEN, EXPERTS) for _ in range(2))
    groups = group_rows(torch.tensor([[0, 1]]), EXPERTS)
    with pytest.raises(RuntimeError, match="never quantised"):
        run_experts(torch.zeros(1, HIDDEN).bfloat16(), groups, gate_up, down)
