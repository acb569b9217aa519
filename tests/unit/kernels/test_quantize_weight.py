"""The Triton quantiser against the plain-torch one, interpreted on a CPU; and writing into what an engine
reads.
"""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.format import E4M3
from octetrl.fp8.quantize import Quantized, quantize_weight_reference
from octetrl.kernels.quantize.quantize_weight import (
    check_scales,
    quantize_weight,
    quantize_weight_transposed,
    quantize_weight_transposed_triton,
    quantize_weight_triton,
)
from tests.unit.kernels.quantize_cases import (
    SHAPES,
    assert_nearly_same_codes,
    assert_same_bytes,
    off_the_grid,
    on_the_grid,
)


def room_for(w: torch.Tensor) -> Quantized:
    blocks = [-(-size // 128) for size in w.shape]
    return Quantized(torch.zeros(w.shape, dtype=E4M3), torch.full(blocks, torch.nan))


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (256, 300), (1152, 129)])  # of whole blocks of rows, more than one
def test_kernel_is_the_reference(shape: tuple[int, int], power_of_two: bool) -> None:
    for w in (on_the_grid(shape), torch.zeros(shape).bfloat16(), on_the_grid(shape).t()):
        transposed = torch.zeros(w.shape[1], w.shape[0], dtype=E4M3)
        got = quantize_weight_triton(w, power_of_two, room_for(w), transposed)
        assert_same_bytes(got, quantize_weight_reference(w, power_of_two))
        assert torch.equal(transposed.view(torch.uint8), got.codes.t().contiguous().view(torch.uint8))
    w = off_the_grid(shape)
    got = quantize_weight_triton(w, power_of_two, room_for(w))
    assert_nearly_same_codes(got, quantize_weight_reference(w, power_of_two))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_transposed_codes_alone_are_those_of_the_weight(power_of_two: bool) -> None:
    for shape in ((128, 129), (256, 300), (130, 40)):
        w = on_the_grid(shape)
        want = quantize_weight_reference(w, power_of_two)
        turned = Quantized(want.codes.t().contiguous(), want.scale.t())
        assert_same_bytes(quantize_weight_transposed(w, power_of_two), turned)
        if shape[0] % 128 == 0:
            assert_same_bytes(quantize_weight_transposed_triton(w, power_of_two), turned)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_non_finite_weight_is_named(bad: float) -> None:
    w = on_the_grid((130, 200))
    w[129, 3] = bad
    good = on_the_grid((130, 200))
    made = {name: (x, quantize_weight_triton(x, False, room_for(x)).scale) for name, x in {"a": good, "b": w}.items()}
    with pytest.raises(ValueError, match=r"b: 1 non-finite value\(s\), the first at \(129, 3\)"):
        check_scales(made)
    check_scales({"a": made["a"]})
    out = room_for(w)
    with pytest.raises(ValueError, match=r"lm\.o_proj"):
        quantize_weight(w, name="lm.o_proj", out=out)
    assert out.scale.isnan().all(), "a refused weight leaves what the engine reads alone"


def test_it_writes_in_place_into_given_codes_and_scale() -> None:
    w = off_the_grid((130, 200))
    out = room_for(w)
    places = [tensor.data_ptr() for tensor in out]
    assert [tensor.data_ptr() for tensor in quantize_weight(w, out=out)] == places
    assert_same_bytes(out, quantize_weight_reference(w))
