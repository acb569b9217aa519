"""The fused row kernels have the bits of the chains that they replace, and a graph can hold them."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.rows.add_rms_norm import add_rms_norm, add_rms_norm_both
from octetrl.kernels.rows.rms_norm import rms_norm
from octetrl.kernels.rows.silu_mul import silu_mul
from octetrl.kernels.rows.silu_mul_quantize import silu_mul_quantize
from tests.gpu.compare import captured, differing
from tests.gpu.fused_row_cases import SHAPES, Shape, bit_cases, norm_case, normal, qkv_case, silu_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [7, 1500])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "llama-3.2-1b"])
def test_bits_are_those_of_the_chain(name: str, tokens: int) -> None:
    cases = bit_cases(SHAPES[name], tokens)
    counts = {f"{case.op} {case.precision}": differing(case.fused(), case.chain()) for case in cases}
    assert not any(counts.values()), counts


@pytest.mark.parametrize(
    "shape",
    [Shape(4096, 12288, 32, 8, 128, True), Shape(5120, 1232, 5, 3, 128, True), Shape(2576, 80, 2, 1, 256, True)],
    ids=["8b", "odd", "wide heads"],
)
def test_bits_of_other_shapes(shape: Shape) -> None:
    for case in (norm_case(shape, 33, True), silu_case(shape, 33), qkv_case(shape, 33, "fp8_calibrated")):
        assert differing(case.fused(), case.chain()) == 0, case.op


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, 64, 300])
@pytest.mark.parametrize("size", [512, 768, 1536, 2048, 2560, 7168])
def test_both_forms_of_a_norm_have_the_bytes_of_one_after_the_other(size: int, tokens: int, power_of_two: bool) -> None:
    """Rows of NaN and of infinity too. 768 and 1,536: norms of the queries' latents."""
    delta, residual, weight = normal(tokens, size), 3 * normal(tokens, size), 1 + normal(size) / 10
    if tokens > 2:
        delta[1, 5], delta[2, size - 1] = torch.nan, torch.inf
    for given in (delta, None):
        hidden, values = add_rms_norm(given, residual.clone(), weight, 1e-6, quantize=False)
        assert not differing([values], [rms_norm(hidden, weight, 1e-6)])
        both = add_rms_norm_both(given, residual.clone(), weight, 1e-6, power_of_two)
        assert not differing(both, (hidden, values, quantize_activation(values, power_of_two)))


@pytest.mark.parametrize(("tokens", "size"), [(1, 1408), (7, 768), (300, 2816), (1536, 1408), (5, 1232)])
def test_tiles_that_hold_several_tokens_have_the_chains_bytes(tokens: int, size: int) -> None:
    gate_up = 2 * normal(tokens, 2 * size)
    gate_up[0, 3], gate_up[-1, size + 7] = torch.nan, torch.inf
    assert not differing([silu_mul_quantize(gate_up)], [quantize_activation(silu_mul(gate_up))])


def test_a_graph_holds_all_three() -> None:
    shape = SHAPES["qwen3-0.6b"]
    cases = [norm_case(shape, 64, True, add=False), silu_case(shape, 64), qkv_case(shape, 64, "bf16")]
    want = [case.chain() for case in cases]
    for case in cases:
        case.fused()  # compiled before the capture
    graph, got = captured(lambda: [case.fused() for case in cases])
    graph.replay()
    assert not any(differing(ours, theirs) for ours, theirs in zip(got, want, strict=True))
