"""On a Hopper GPU: the fused quantisers give the bytes of the separate ones and of plain torch, a graph can hold them,
and wgrad takes x in square blocks.
"""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.backends import fp8_gemm_wgrad
from octetrl.fp8.quantize import Quantized, quantize_activation_reference, quantize_tokens_reference
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.quantize.quantize_both import quantize_both
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.rows import silu_mul_backward_quantize as silu_module
from tests.gpu.compare import captured, differing
from tests.gpu.quantize_cases import any_value, both_case, differing_of, silu_case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (33, 129), (1153, 640), (4097, 300)])
def test_bytes_of_ragged_tensors(shape: tuple[int, int], power_of_two: bool, square: bool) -> None:
    """Every BF16 exponent occurs, and a few values are not finite: the hardware's own clamp and NaN are the rule's."""
    for x in (any_value(*shape), torch.randn(shape).bfloat16(), torch.randn(shape)):
        tokens = quantize_tokens_reference(x, power_of_two, square)
        want = [quantize_activation_reference(x, power_of_two), tokens]
        assert differing([*quantize_both(x.cuda(), power_of_two, square=square)], want) == 0
        assert differing([quantize_tokens(x.cuda(), power_of_two, square)], want[1:]) == 0


def test_bytes_of_strided_rows() -> None:
    x = torch.randn(300, 700).bfloat16()
    for view in (x[:, 100:657], x[::2, :640], x.t()):
        want = [quantize_activation_reference(view), quantize_tokens_reference(view)]
        strided = x.cuda().as_strided(view.shape, view.stride(), view.storage_offset())
        assert differing(quantize_both(strided), want) == 0


@pytest.mark.parametrize("square", [False, True])
def test_bytes_of_large_tensors_and_of_the_silu_chain(square: bool) -> None:
    assert differing_of(both_case(8192, 6144, square)) == 0
    for tokens, size in ((2000, 12288), (129, 6144), (1, 128), (300, 200)):
        assert differing_of(silu_case(tokens, size, square)) == 0, (tokens, size)


def test_the_order_of_the_programs_changes_no_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(silu_module, "PARTS_ADJACENT", False)
    assert differing_of(silu_case(2000, 6144, True)) == 0


def test_a_graph_holds_them() -> None:
    cases = [both_case(512, 1024, True), silu_case(512, 1024, True)]
    for case in cases:
        case.fused()  # compiled before the capture
    graph, got = captured(lambda: [case.fused() for case in cases])
    graph.replay()
    for case, ours in zip(cases, got, strict=True):
        assert case.separate is not None and differing(ours, case.separate()) == 0


@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 128, 128), (130, 20, 300), (384, 640, 1), (1000, 1024, 640)])
def test_square_wgrad_is_near_the_emulation(tokens: int, n: int, k: int) -> None:
    dy, x = torch.randn(tokens, n, device="cuda").bfloat16(), torch.randn(tokens, k, device="cuda").bfloat16()
    dy_tokens, x_tokens = quantize_tokens(dy), quantize_tokens(x, square=True)
    dw = fp8_gemm_wgrad(dy_tokens, x_tokens, "scaled_mm")
    on_cpu = [Quantized(q.codes.cpu(), q.scale.cpu()) for q in (dy_tokens, x_tokens)]
    assert dw.shape == (n, k) and relative_error(dw.cpu(), fp8_gemm_wgrad(*on_cpu)) < 6e-3
