"""The emulated GEMMs against the contract's arithmetic done with exact fractions, and rows that keep their
bits.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octetrl.fp8.backends import fp8_gemm_dgrad, fp8_gemm_nt, fp8_gemm_wgrad, transposed
from octetrl.fp8.choose_backend import choose_backend
from octetrl.fp8.format import BLOCK, decode_e4m3
from octetrl.fp8.quantize import (
    Quantized,
    dequantize_activation,
    dequantize_tokens,
    dequantize_weight,
    quantize_activation_reference,
    quantize_activation_values,
    quantize_tokens_reference,
    quantize_tokens_values,
    quantize_weight_reference,
)
from octetrl.fp8.relative_error import relative_error
from octetrl.system.errors import UserError


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def float32(exact: Fraction) -> np.float32:
    """Nearest float32 of an exact number (through float64, as the contract's emulated fma does)."""
    return np.float32(float(exact))


def nt_by_the_contract(x: Quantized, w: Quantized) -> torch.Tensor:
    """Element by element: exact 128-wide partials, rounded, then fma(partial, sx * sw, acc), K ascending."""
    x_values, w_values = decode_e4m3(x.codes).tolist(), decode_e4m3(w.codes).tolist()
    depth = x.codes.shape[1]
    out = torch.empty(x.codes.shape[0], w.codes.shape[0])
    for i, j in np.ndindex(out.shape):
        acc = np.float32(0)
        for start in range(0, depth, 128):
            ks = range(start, min(depth, start + 128))
            partial = float32(sum((Fraction(x_values[i][k]) * Fraction(w_values[j][k]) for k in ks), Fraction(0)))
            scale = np.float32(x.scale[i, start // 128].item()) * np.float32(w.scale[j // 128, start // 128].item())
            acc = float32(Fraction(float(partial)) * Fraction(float(scale)) + Fraction(float(acc)))
        out[i, j] = float(acc)
    return out


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 2), (2, 128, 3), (2, 300, 130), (1, 129, 1)])
def test_forward_is_the_contract_bit_for_bit(m: int, k: int, n: int) -> None:
    x, w = quantize_activation_reference(randn(m, k)), quantize_weight_reference(randn(n, k, seed=1))
    last_block = (n - 1) // 128
    some = Quantized(w.codes[last_block * 128 :][:6], w.scale[last_block:])
    y = fp8_gemm_nt(x, w, out_dtype=torch.float32)
    assert torch.equal(y[:, last_block * 128 :][:, :6], nt_by_the_contract(x, some))
    assert torch.equal(fp8_gemm_nt(x, w), y.bfloat16())


def test_partials_that_float32_cannot_hold_are_rounded_once_and_before_scaling() -> None:
    """Fifth powers spread over all of E4M3's exponents, so that a sum of 128 products needs more than 24 bits."""
    x, w = quantize_activation_reference(randn(3, 300) ** 5), quantize_weight_reference(randn(40, 300, seed=1) ** 5)
    products = decode_e4m3(x.codes, torch.float64)[:, :128] @ decode_e4m3(w.codes, torch.float64)[:, :128].t()
    assert (products.float().double() != products).any()
    assert torch.equal(fp8_gemm_nt(x, w, out_dtype=torch.float32), nt_by_the_contract(x, w))


def test_a_rows_bits_do_not_depend_on_the_batch() -> None:
    w = quantize_weight_reference(randn(200, 400, seed=1))
    x = randn(1400, 400)
    whole = fp8_gemm_nt(quantize_activation_values(x), w, out_dtype=torch.float32)
    for rows in (1, 2, 3, 17, 64):
        alone = fp8_gemm_nt(quantize_activation_values(x[:rows]), w, out_dtype=torch.float32)
        assert torch.equal(alone, whole[:rows])
    last = fp8_gemm_nt(quantize_activation_values(x[-1:]), w, out_dtype=torch.float32)
    assert torch.equal(last, whole[-1:])


def test_bytes_and_values_give_the_same_product() -> None:
    x, w = randn(40, 300), quantize_weight_reference(randn(130, 300, seed=1))
    decoded = Quantized(decode_e4m3(w.codes, torch.float64), w.scale)
    of_bytes = fp8_gemm_nt(quantize_activation_reference(x), w)
    assert torch.equal(of_bytes, fp8_gemm_nt(quantize_activation_values(x), decoded))
    dy, tokens = randn(40, 130, seed=2), quantize_tokens_reference
    assert torch.equal(
        fp8_gemm_wgrad(tokens(dy), tokens(x)),
        fp8_gemm_wgrad(quantize_tokens_values(dy), quantize_tokens_values(x)),
    )


def test_dgrad_and_wgrad_are_the_products_of_the_dequantized_values() -> None:
    x, dy, w = randn(200, 300), randn(200, 130, seed=2), quantize_weight_reference(randn(130, 300, seed=1))
    dy8, dy_tokens, x_tokens = quantize_activation_reference(dy), *map(quantize_tokens_reference, (dy, x))
    dx = fp8_gemm_dgrad(dy8, transposed(w), out_dtype=torch.float32)
    assert relative_error(dx, dequantize_activation(dy8).double() @ dequantize_weight(w).double()) < 1e-6
    assert relative_error(dx, dy.double() @ dequantize_weight(w).double()) < 0.04
    dw = fp8_gemm_wgrad(dy_tokens, x_tokens)
    exact = dequantize_tokens(dy_tokens).double().t() @ dequantize_tokens(x_tokens).double()
    assert relative_error(dw, exact) < 1e-6
    assert relative_error(dw, dy.double().t() @ x.double()) < 0.04


def test_wgrad_takes_x_in_square_blocks() -> None:
    """The same product as the forward's, with dy for x and x for the weight; K = 1 is square and not, and no matter."""
    for columns in (1, 130, 300):
        x, dy = randn(200, columns), randn(200, 70, seed=2)
        dy_tokens, x_tokens = quantize_tokens_reference(dy), quantize_tokens_reference(x, square=True)
        dw = fp8_gemm_wgrad(dy_tokens, x_tokens)
        assert relative_error(dw, fp8_gemm_nt(dy_tokens, x_tokens, out_dtype=torch.float32)) < 1e-6
        assert relative_error(dw, dy.double().t() @ x.double()) < 0.05
        assert torch.equal(dw, fp8_gemm_wgrad(dy_tokens, quantize_tokens_values(x, square=True)))


def test_a_poisoned_activation_poisons_its_row_alone() -> None:
    x, w = randn(4, 300), quantize_weight_reference(randn(5, 300, seed=1))
    x[1, 200] = torch.nan
    y = fp8_gemm_nt(quantize_activation_values(x), w)
    assert y.isnan().any(1).tolist() == [False, True, False, False]


def test_misfitting_operands_are_refused() -> None:
    x, w = quantize_activation_reference(randn(4, 256)), quantize_weight_reference(randn(5, 200))
    with pytest.raises(AssertionError, match="K differs"):
        fp8_gemm_nt(x, w)
    with pytest.raises(AssertionError, match="activation scale"):
        fp8_gemm_nt(Quantized(x.codes, x.scale[:, :1]), quantize_weight_reference(randn(5, 256)))
    dy_tokens, x_tokens = (
        quantize_tokens_reference(randn(130, 8)),
        quantize_tokens_reference(randn(130, 200), False, True),
    )
    with pytest.raises(AssertionError, match=r"token scale \(3, 2\), expected \(2, 2\)"):
        fp8_gemm_wgrad(dy_tokens, Quantized(x_tokens.codes, torch.ones(3, 2)))
    with pytest.raises(AssertionError, match="second operand"):
        fp8_gemm_wgrad(x_tokens, dy_tokens)


def test_choosing_a_backend() -> None:
    assert choose_backend("cpu") == choose_backend("cpu", True) == "emulated"
    with pytest.raises(UserError, match=r"fp8\.emulate=true"):
        choose_backend("cpu", False)
    with pytest.raises(UserError, match=r"'mps'.*fp8\.emulate=true"):
        choose_backend("mps")
    assert choose_backend("mps", True) == "emulated"


# ---------------------------------------------------------------- scaled_mm's padding, without a GPU


EVEN = (64, 256, 384)
ODD = [(1, 128, 128), (33, 576, 960), (70, 300, 500), (35, 192, 8000), (64, 4000, 192)]


def double(
    a_MK: Tensor, b_KN: Tensor, a_scale: Tensor, _a_recipe: object, b_scale: Tensor, b_recipe: object, **kwargs: object
) -> Tensor:
    """`F.scaled_mm` as fp8/scaled_mm.py calls it."""
    (rows, depth), columns, blocks = a_MK.shape, b_KN.shape[1], a_MK.shape[1] // BLOCK
    square = b_recipe == F.ScalingType.BlockWise128x128
    assert a_MK.is_contiguous() and b_KN.t().is_contiguous(), "a is row-major, b column-major"
    assert rows >= 32 and rows % 4 == 0 and depth % BLOCK == 0 and columns % (BLOCK if square else 16) == 0
    assert a_scale.shape == (rows, blocks) and a_scale.stride(0) == 1
    assert blocks == 1 or a_scale.stride(1) == rows
    if square:
        padded_blocks = -(-blocks // 4) * 4
        assert b_scale.shape == (padded_blocks, columns // BLOCK) and b_scale.stride(0) == 1
        b_scale_NB = b_scale[:blocks].t().repeat_interleave(BLOCK, 0)
    else:
        assert b_scale.shape == (columns, blocks) and b_scale.stride(0) == 1
        b_scale_NB = b_scale
    a = decode_e4m3(a_MK, torch.float64) * a_scale.repeat_interleave(BLOCK, 1)
    b = decode_e4m3(b_KN.t(), torch.float64) * b_scale_NB.repeat_interleave(BLOCK, 1)
    return (a @ b.t()).to(kwargs["output_dtype"])  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(("m", "k", "n"), [EVEN, *ODD])
def test_results_are_contiguous_and_the_emulations_whatever_was_padded(
    m: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(F, "scaled_mm", double)
    x, w, dy = randn(m, k, seed=0), quantize_weight_reference(randn(n, k, seed=1)), randn(m, n, seed=2)
    x8, dy8 = quantize_activation_reference(x), quantize_activation_reference(dy)
    w8_transposed = Quantized(w.codes.t().contiguous(), w.scale.t())
    dy_tokens = quantize_tokens_reference(dy)
    products = {
        "nt": (fp8_gemm_nt, x8, w),
        "dgrad": (fp8_gemm_dgrad, dy8, w8_transposed),
        "wgrad": (fp8_gemm_wgrad, dy_tokens, quantize_tokens_reference(x)),
        "square wgrad": (fp8_gemm_wgrad, dy_tokens, quantize_tokens_reference(x, square=True)),
    }
    for name, (gemm, a, b) in products.items():
        for dtype in (torch.bfloat16, torch.float32):
            got, want = gemm(a, b, "scaled_mm", dtype), gemm(a, b, "emulated", torch.float32)
            assert got.shape == want.shape and got.dtype == dtype and got.is_contiguous(), f"{name} {dtype}"
            assert relative_error(got, want) < 4e-3, f"{name} {dtype}"
