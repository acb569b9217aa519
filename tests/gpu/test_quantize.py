"""On a Hopper GPU the Triton quantisers give the reference's bytes: golden vectors, edges, and large ragged
tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from safetensors.torch import load_file

from octetrl.fp8.quantize import (
    Quantized,
    quantize_activation_reference,
    quantize_tokens_reference,
    quantize_weight_reference,
)
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.quantize.quantize_weight import check_scales, quantize_weight, quantize_weight_transposed
from octetrl.kernels.quantize.quantize_weights import QuantizedWeight, quantize_weights
from octetrl.kernels.quantize.transpose_codes import transpose_codes
from octetrl.kernels.quantize.transpose_many_codes import transpose_many_codes
from octetrl.kernels.rows.sum_words import sum_words
from octetrl.layers.linear import Float8Linear
from tests.golden.make import PATH
from tests.gpu.compare import differing, no_waits

pytestmark = pytest.mark.gpu

KERNELS: dict[str, tuple[Callable[..., Quantized], Callable[..., Quantized]]] = {
    "activation": (quantize_activation, quantize_activation_reference),
    "tokens": (quantize_tokens, quantize_tokens_reference),
    "weight": (quantize_weight, quantize_weight_reference),
}
OPTIONS = {"float32": False, "power_of_two": True}


def assert_same_bytes(got: Quantized, want: Quantized) -> None:
    assert differing([got], [want]) == 0


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KERNELS)
def test_golden_bytes(kind: str, option: str) -> None:
    golden = load_file(PATH)
    x = golden["w" if kind == "weight" else "x"].cuda()
    codes = golden[f"{kind}.{option}.codes"].view(torch.float8_e4m3fn)
    want = Quantized(codes, golden[f"{kind}.{option}.scale"])
    assert_same_bytes(KERNELS[kind][0](x, OPTIONS[option]), want)


def test_sums_of_words() -> None:
    """Rows of words, of bytes, and of words that begin between two pairs; alone and together."""
    generator = torch.Generator().manual_seed(1)
    shapes = [(1, 1), (5, 7), (1152, 640), (3, 100_003), (12_288, 512), (0, 8), (1, 4096)]
    tensors = [torch.randint(-(1 << 62), 1 << 62, shape, generator=generator) for shape in shapes]
    octets = torch.randint(0, 256, (601, 1001), dtype=torch.uint8, generator=generator)
    tensors += [octets, octets[3], tensors[2].flatten()[1 : 1 + 640 * 1150].view(1150, 640)]
    for some in (*([one] for one in tensors), tensors):
        on_gpu = [one.cuda() for one in some]
        assert torch.equal(sum_words(on_gpu).cpu(), sum_words(some)), [list(one.shape) for one in some]
    shifted = tensors[2].cuda().flatten()[1 : 1 + 640 * 1150].view(1150, 640)
    assert shifted.data_ptr() % 16 == 8 and torch.equal(sum_words([shifted]).cpu(), sum_words(tensors[-1:]))


def test_sums_of_memory_that_was_freed_and_allocated_elsewhere() -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (256, 512), generator=torch.Generator().manual_seed(1))
    held = words.cuda()
    wanted = sum_words([words])
    for _ in range(3):
        assert torch.equal(sum_words([held]).cpu(), wanted)
        storage = held.untyped_storage()
        storage.resize_(0)
        other = torch.zeros_like(words, device="cuda")  # at the address that became free
        storage.resize_(words.nbytes)
        held.copy_(words)
        assert other.data_ptr() != held.data_ptr()


WEIGHTS = [(128, 4096), (6144, 4096), (1, 16), (70, 48), (4096, 1104), (33, 129), (1152, 640), (0, 128)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_many_weights_have_the_bytes_of_each(power_of_two: bool, transposed: bool) -> None:
    """Bit patterns are drawn: every exponent occurs, and a few values are not finite. The host reads nothing."""
    weights: dict[str, QuantizedWeight] = {}
    for dtype in (torch.bfloat16, torch.float32):
        for number, shape in enumerate(WEIGHTS):
            generator = torch.Generator().manual_seed(number)
            bits = torch.randint(0, 1 << 16, shape, generator=generator, dtype=torch.int32).to(torch.int16)
            drawn = bits.view(torch.bfloat16)
            kept = drawn.isfinite() | (torch.rand(shape, generator=generator) < 1e-6)
            w = torch.where(kept, drawn, 0).to(dtype).cuda()
            weights[f"{dtype} {shape}"] = QuantizedWeight(w, room(shape), turned_room(shape) if transposed else None)
    quantize_weights(weights, power_of_two)  # compiled
    with no_waits():
        quantize_weights(weights, power_of_two)
    for name, one in weights.items():
        alone = QuantizedWeight(one.w_NK, room(one.w_NK.shape), turned_room(one.w_NK.shape) if transposed else None)
        if one.w_NK.numel():
            quantize_weight(one.w_NK, power_of_two, out=alone.out, transposed_KN=alone.transposed_KN, check=False)
            assert_same_bytes(one.out, alone.out)
        if one.transposed_KN is not None and alone.transposed_KN is not None:
            assert torch.equal(one.transposed_KN.view(torch.uint8), alone.transposed_KN.view(torch.uint8)), name


def room(shape: Sequence[int]) -> Quantized:
    blocks = [-(-size // 128) for size in shape]
    codes = torch.zeros(shape, dtype=torch.float8_e4m3fn, device="cuda")
    return Quantized(codes, torch.full(blocks, torch.nan, device="cuda"))


def turned_room(shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(*reversed(shape), dtype=torch.float8_e4m3fn, device="cuda")


def test_transposed_codes_of_many_weights() -> None:
    codes = [room(shape).codes for shape in WEIGHTS]
    for one in codes:
        one.view(torch.uint8).random_()
    pairs = [(one, turned_room(one.shape)) for one in codes]
    transpose_many_codes(pairs)
    for one, turned in pairs:
        assert torch.equal(turned.view(torch.uint8), one.view(torch.uint8).t()), one.shape


@pytest.mark.parametrize("shape", [(4, 1), (5, 7), (132, 200), (1152, 640), (4096, 1100)])
def test_transposed_codes(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).cuda()
    out = torch.zeros(shape[1], shape[0], dtype=torch.float8_e4m3fn, device="cuda")
    assert torch.equal(transpose_codes(codes.view(torch.float8_e4m3fn), out).view(torch.uint8), codes.t().contiguous())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (33, 129), (1000, 4096), (4097, 300), (128, 12288)])
@pytest.mark.parametrize("kind", KERNELS)
def test_bytes_of_random_tensors(kind: str, shape: tuple[int, int], power_of_two: bool) -> None:
    """Every BF16 exponent occurs: bit patterns are drawn, not values."""
    generator = torch.Generator().manual_seed(shape[0])
    bits = torch.randint(0, 1 << 16, shape, generator=generator, dtype=torch.int32).to(torch.int16)
    any_value = torch.where(bits.view(torch.bfloat16).isfinite(), bits.view(torch.bfloat16), 0)
    normal = torch.randn(shape, generator=generator).bfloat16()
    kernel, reference = KERNELS[kind]
    for x in (any_value, normal, normal.float()):
        assert_same_bytes(kernel(x.cuda(), power_of_two), reference(x, power_of_two))


@pytest.mark.parametrize("kind", ["activation", "tokens"])
def test_non_finite_values_poison_the_same_bytes(kind: str) -> None:
    x = torch.randn(300, 400).bfloat16()
    x[5, 7], x[200, 399], x[299, 0] = torch.nan, torch.inf, -torch.inf
    kernel, reference = KERNELS[kind]
    assert_same_bytes(kernel(x.cuda()), reference(x))


def test_a_non_finite_weight_is_named() -> None:
    w = torch.randn(300, 400).bfloat16()
    w[299, 399] = torch.nan
    with pytest.raises(ValueError, match=r"o_proj: 1 non-finite value\(s\), the first at \(299, 399\)"):
        quantize_weight(w.cuda(), name="o_proj")


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (33, 129), (128, 300), (1153, 640), (4096, 1100)])
def test_transposed_codes_are_those_of_the_weight(shape: tuple[int, int], power_of_two: bool) -> None:
    w = torch.randn(shape).bfloat16()
    transposed = torch.zeros(w.t().shape, dtype=torch.float8_e4m3fn, device="cuda")
    q = quantize_weight(w.cuda(), power_of_two, transposed_KN=transposed)
    want = quantize_weight_reference(w, power_of_two)
    assert_same_bytes(q, want)
    turned = Quantized(want.codes.t().contiguous(), want.scale.t())
    assert_same_bytes(Quantized(transposed, q.scale.t()), turned)
    assert_same_bytes(quantize_weight_transposed(w.cuda(), power_of_two), turned)


def test_many_weights_are_launched_without_a_host_read_and_the_bad_one_is_named() -> None:
    weights = {f"layers.{i}.o_proj": torch.randn(300, 400, device="cuda").bfloat16() for i in range(4)}
    weights["layers.2.o_proj"][299, 399] = torch.inf
    quantize_weight(weights["layers.0.o_proj"], check=False)  # compiled
    with no_waits():
        made = {name: (w, quantize_weight(w, check=False).scale) for name, w in weights.items()}
    with pytest.raises(ValueError, match=r"layers\.2\.o_proj: 1 non-finite value\(s\), the first at \(299, 399\)"):
        check_scales(made)
    del made["layers.2.o_proj"]
    check_scales(made)


def test_requantize_renews_the_transposed_codes_in_place() -> None:
    linear = Float8Linear(384, 256, device="cuda", backend="scaled_mm")
    linear.requantize()
    place = linear.dgrad_operand().codes.data_ptr()
    with torch.no_grad():
        linear.weight.mul_(-1.7)
    linear.requantize()
    codes_KN = linear.dgrad_operand().codes
    assert codes_KN.data_ptr() == place
    assert torch.equal(codes_KN.view(torch.uint8), linear.codes.t().contiguous().view(torch.uint8))


def test_strided_input_and_publishing_in_place() -> None:
    w = torch.randn(256, 384).bfloat16()
    out = quantize_weight(torch.zeros_like(w).cuda())
    places = [tensor.data_ptr() for tensor in out]
    quantize_weight(w.cuda(), out=out)
    assert [tensor.data_ptr() for tensor in out] == places
    assert_same_bytes(out, quantize_weight_reference(w))
    assert_same_bytes(quantize_activation(w.cuda()[:, 64:]), quantize_activation_reference(w[:, 64:]))
    assert_same_bytes(quantize_tokens(w.cuda().t()), quantize_tokens_reference(w.t().contiguous()))
