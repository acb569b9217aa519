"""The fused row kernels have the bits of the chains that they replace, and a graph can hold them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels.fused_rows import SHAPES, Shape, bit_cases, differing, norm_case, qkv_case, silu_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [7, 1500])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_bits_are_those_of_the_chain(name: str, tokens: int) -> None:
    wrong = {
        f"{case.op} {case.precision}": count for case in bit_cases(SHAPES[name], tokens) if (count := differing(case))
    }
    assert not wrong


@pytest.mark.parametrize(
    "shape",
    [Shape(4096, 12288, 32, 8, 128, True), Shape(5120, 1232, 5, 3, 128, True), Shape(2576, 80, 2, 1, 256, True)],
    ids=["8b", "odd", "wide heads"],
)
def test_bits_of_other_shapes(shape: Shape) -> None:
    for case in (norm_case(shape, 33, True), silu_case(shape, 33), qkv_case(shape, 33, "fp8_calibrated")):
        assert differing(case) == 0, case.op


def test_a_graph_holds_all_three() -> None:
    shape = SHAPES["qwen3-0.6b"]
    cases = [norm_case(shape, 64, True, add=False), silu_case(shape, 64), qkv_case(shape, 64, "bf16")]
    want = [case.chain() for case in cases]
    for case in cases:
        case.fused()  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [case.fused() for case in cases]
    graph.replay()
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
