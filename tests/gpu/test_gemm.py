"""On a Hopper GPU: scaled_mm against the exact emulation, its rows' bits, its padding, and `Float8Linear` on
top of it.

Hopper's FP8 tensor cores keep fewer bits inside a 128-wide partial than the emulation does: forward outputs
agree to a relative error of about 0.002 (BF16 rounding of the output is most of it), not to the bit.
"""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad, transposed
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.quantize import Quantized
from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.quantize.quantize_activation import quantize_activation
from octetrl.kernels.quantize.quantize_tokens import quantize_tokens
from octetrl.kernels.quantize.quantize_weight import quantize_weight
from octetrl.layers.linear import Float8Linear
from octetrl.layers.unquantized_linear import Linear

pytestmark = pytest.mark.gpu

# K/128 = 1, 2, 3, 5 pads the weight scale, a ragged N or K the codes, M below 32 or no multiple of 4 the rows.
SHAPES = [
    (1, 128, 128),
    (31, 256, 384),
    (33, 384, 256),
    (127, 640, 512),
    (64, 512, 100),
    (256, 300, 384),
    (512, 4096, 1024),
]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def on_cpu(q: Quantized) -> Quantized:
    return Quantized(q.codes.cpu(), q.scale.cpu())


def test_the_machine_is_taken_for_what_it_is() -> None:
    assert choose_backend("cuda") == "scaled_mm" and choose_backend("cuda", True) == "emulated"


@pytest.mark.parametrize("rows", [33, 34, 254, 4095])
def test_what_lies_behind_the_rows_reaches_none_of_them(rows: int) -> None:
    x, w = randn(4096, 1024), quantize_weight(randn(768, 1024, seed=1))
    whole, part = quantize_activation(x), quantize_activation(x[:rows])
    assert part.scale.stride() == (1, -(-rows // 4) * 4)
    want = fp8_gemm_nt(whole, w, "scaled_mm")[:rows]
    for garbage in (0x00, 0x7E, 0x7F):  # 0, 448, NaN
        behind = part.codes.as_strided((-(-rows // 4) * 4, 1024), (1024, 1))[rows:]
        behind.view(torch.uint8).fill_(garbage)
        assert torch.equal(fp8_gemm_nt(part, w, "scaled_mm"), want)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_scaled_mm_is_near_the_emulation(m: int, k: int, n: int) -> None:
    x, dy = randn(m, k), randn(m, n, seed=1)
    x8, w8 = quantize_activation(x), quantize_weight(randn(n, k, seed=2))
    y = fp8_gemm_nt(x8, w8, "scaled_mm")
    assert relative_error(y.cpu(), fp8_gemm_nt(on_cpu(x8), on_cpu(w8), out_dtype=torch.float32)) < 4e-3
    dy8 = quantize_activation(dy)
    w8_transposed = Quantized(w8.codes.t().contiguous(), w8.scale.t())
    dx = fp8_gemm_dgrad(dy8, w8_transposed, "scaled_mm")
    assert relative_error(dx.cpu(), fp8_gemm_dgrad(on_cpu(dy8), transposed(on_cpu(w8)))) < 6e-3
    dy_tokens, x_tokens = quantize_tokens(dy), quantize_tokens(x)
    dw = fp8_gemm_wgrad(dy_tokens, x_tokens, "scaled_mm")
    assert relative_error(dw.cpu(), fp8_gemm_wgrad(on_cpu(dy_tokens), on_cpu(x_tokens))) < 6e-3


@pytest.mark.parametrize(("k", "n"), [(256, 384), (640, 512), (4096, 6144), (12288, 4096)])
def test_a_rows_bits_do_not_depend_on_the_batch(k: int, n: int) -> None:
    x, w8 = randn(4096, k), quantize_weight(randn(n, k, seed=2))
    whole = fp8_gemm_nt(quantize_activation(x), w8, "scaled_mm")
    for rows in (1, 2, 3, 17, 32, 64, 128, 500, 1024):
        assert torch.equal(fp8_gemm_nt(quantize_activation(x[:rows]), w8, "scaled_mm"), whole[:rows]), rows


@pytest.mark.parametrize(("m", "k", "n"), [(300, 384, 640), (512, 1024, 1024)])
def test_float8_linear_is_near_the_bf16_one(m: int, k: int, n: int) -> None:
    linear = Float8Linear(k, n, bias=True, device="cuda", backend="scaled_mm")
    plain = Linear(k, n, bias=True, device="cuda")
    plain.load_state_dict(linear.state_dict())
    linear.requantize()
    x, dy = randn(m, k).requires_grad_(), randn(m, n, seed=1)
    of_plain = x.detach().clone().requires_grad_()
    y, y_plain = linear(x), plain(of_plain)
    y.backward(dy), y_plain.backward(dy)
    assert relative_error(y.detach(), y_plain.detach()) < 0.05
    for ours, theirs in ((x.grad, of_plain.grad), (linear.weight.grad, plain.weight.grad)):
        assert relative_error(ours, theirs) < 0.05
    with torch.no_grad():
        linear.weight.mul_(0.5)
    linear.requantize()
    assert torch.equal(linear.dgrad_operand().codes.view(torch.uint8), linear.codes.t().contiguous().view(torch.uint8))


def test_emulated_both_sides_decode_the_codes_of_each_step() -> None:
    """A kernel's writes do not move the version counter that the decoded values are kept by."""
    trainers, engines = (Float8Linear(256, 384, device="cuda", backend="emulated") for _ in range(2))
    engines.drop_weight()
    engines.codes, engines.scale = trainers.codes, trainers.scale
    x, outputs = randn(40, 256), []
    for step in range(3):
        with torch.no_grad():
            assert trainers.weight is not None
            trainers.weight.copy_(randn(384, 256, seed=1 + step))
        trainers.requantize()
        outputs.append(trainers(x))
        assert torch.equal(outputs[-1], engines(x))
        assert relative_error(outputs[-1], torch.nn.functional.linear(x, trainers.weight)) < 0.06
    assert not torch.equal(outputs[0], outputs[1])
