"""The row kernels of training on the GPU: the forward's bits are the chain's, the backward is one rounding from float64
and repeats its bits, and a graph holds them."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.attention.qkv_rotate import qkv_rotate
from octetrl.kernels.attention.records import Replay, Rotation
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.rms_norm_backward import rms_norm_backward
from octetrl.models.blocks.attention.module import observe_amax
from tests.gpu.compare import captured
from tests.gpu.training_row_cases import NEVER, SHAPES, faults, norm_case, normal, rotate_back_case, rotate_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 1500])
@pytest.mark.parametrize("name", ["qwen3-8b", "odd", "wide heads", "small heads"])
def test_bits_and_errors(name: str, tokens: int) -> None:
    assert not faults(SHAPES[name], tokens)


def test_amax_keeps_nan_and_the_larger_value() -> None:
    """Many programs race for one cell, round after round."""
    qkv = normal(5000, 2 + 2 * 4, 128)
    qkv[4321, 2 + 1, 7] = float("nan")
    qkv[17, 2 + 4 + 3, 100] = float("-inf")
    angles = torch.zeros(5000, 64, device="cuda")
    ours, theirs = (torch.full((2, 4), NEVER, device="cuda") for _ in range(2))
    ours[1, 0] = theirs[1, 0] = 1e6
    for rows in qkv.split(1250):
        cos, sin = angles[: len(rows)] + 1, angles[: len(rows)]
        qkv_rotate(rows, Rotation(None, None, 1e-6, cos, sin), 4, Replay(), ours)
        observe_amax(theirs, rows[:, 2:6], rows[:, 6:])
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert ours[0, 1].isnan() and ours[1, 0] == 1e6 and ours[1, 3].isinf()


def test_the_modules_backward_is_the_kernel() -> None:
    x, weight, dy = normal(300, 4, 64)[:, 1:].requires_grad_(), normal(64).requires_grad_(), normal(300, 3, 64)
    got = torch.autograd.grad(rms_norm(x, weight, 1e-6), (x, weight), dy)
    want = rms_norm_backward(dy, x.detach(), weight.detach(), 1e-6)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, want, strict=True))


def test_a_graph_holds_them() -> None:
    shape = SHAPES["qwen3-1.7b"]
    cases = [
        rotate_case(shape, 200, "fp8_calibrated"), rotate_back_case(shape, 200), norm_case(normal(200, 2048), True)
    ]  # fmt: skip
    want = [case.fused() for case in cases]
    graph, got = captured(lambda: [case.fused() for case in cases])
    graph.replay()
    for ours, theirs in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
