"""`Linear` and `Float8Linear`: numbers against float32, exactness against dequantised math, staleness, rows'
bits.
"""

from __future__ import annotations

import copy
import ctypes

import pytest
import torch
import torch.nn.functional as F

from octetrl.fp8.non_finite import NonFiniteError
from octetrl.fp8.quantize import (
    Quantized,
    dequantize_activation,
    dequantize_tokens,
    dequantize_weight,
    quantize_activation_reference,
    quantize_tokens_reference,
    quantize_weight_reference,
)
from octetrl.fp8.relative_error import relative_error
from octetrl.layers.embedding import Embedding
from octetrl.layers.linear import Float8Linear
from octetrl.layers.many_linears import LinearRows, adopt_codes, quantize_rows, requantize
from octetrl.layers.stacked import Float8StackedLinear
from octetrl.layers.unquantized_linear import Linear


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def float8_linear(k: int, n: int, bias: bool = False, **options: bool) -> Float8Linear:
    linear = Float8Linear(k, n, bias, **options)
    with torch.no_grad():
        linear.weight.copy_(randn(n, k, seed=1) / k**0.5)
        if bias:
            linear.bias.copy_(randn(n, seed=2))
    linear.requantize()
    return linear


def gradients(linear: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    linear(x).backward(dy)
    bias = linear.bias
    return x.grad, linear.weight.grad, *([] if bias is None else [bias.grad])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 40), (2, 3, 40)])
def test_linear_in_float32_is_torchs(shape: tuple[int, ...], bias: bool) -> None:
    linear = Linear(40, 13, bias, dtype=torch.float32)
    x, dy = randn(*shape), randn(*shape[:-1], 13, seed=5)
    torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))
    plain = torch.nn.Linear(40, 13, bias)
    plain.load_state_dict(linear.state_dict())
    for ours, theirs in zip(gradients(linear, x, dy), gradients(plain, x, dy), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_linear_rounds_once_and_adds_the_bias_before() -> None:
    linear = Linear(200, 30, bias=True)
    x = randn(5, 200).bfloat16()
    exact = x.double() @ linear.weight.double().t()
    assert torch.equal(linear(x), (exact.float() + linear.bias.float()).bfloat16())


@pytest.mark.parametrize("make", [lambda: Linear(300, 140, True), lambda: float8_linear(300, 140, True)])
def test_a_rows_bits_do_not_depend_on_the_batch(make) -> None:
    linear, x = make(), randn(64, 300).bfloat16()
    with torch.no_grad():
        whole = linear(x)
        for rows in (1, 2, 3, 17):
            assert torch.equal(linear(x[:rows]), whole[:rows])
        assert torch.equal(linear(x.view(4, 16, 300)), whole.view(4, 16, 140))


@pytest.mark.parametrize(
    ("m", "k", "n", "power_of_two"),
    [(300, 256, 384, False), (300, 256, 384, True), (5, 7, 3, False), (130, 129, 200, True), (1, 128, 128, False)],
)
def test_float8_gradients_lie_where_fp8_puts_them(m: int, k: int, n: int, power_of_two: bool) -> None:
    """Measured: 0.037 for each of the three GEMMs on normal data; 0.05 leaves room for small shapes."""
    linear = float8_linear(k, n, bias=True, power_of_two=power_of_two)
    x, dy = randn(m, k).bfloat16(), randn(m, n, seed=5).bfloat16()
    plain = torch.nn.Linear(k, n)
    plain.load_state_dict({name: value.float() for name, value in linear.state_dict().items()})
    assert relative_error(linear(x), plain(x.float())) < 0.05
    for ours, theirs in zip(gradients(linear, x, dy), gradients(plain, x.float(), dy.float()), strict=True):
        assert ours.dtype == torch.bfloat16
        assert relative_error(ours, theirs) < 0.05


def test_float8_is_exactly_the_product_of_dequantized_operands() -> None:
    linear = float8_linear(300, 200)
    x, dy = randn(130, 300).bfloat16(), randn(130, 200, seed=5).bfloat16()
    w = dequantize_weight(quantize_weight_reference(linear.weight.detach())).double()
    y = dequantize_activation(quantize_activation_reference(x)).double() @ w.t()
    dx = dequantize_activation(quantize_activation_reference(dy)).double() @ w
    dw = (
        dequantize_tokens(quantize_tokens_reference(dy)).double().t()
        @ dequantize_tokens(quantize_tokens_reference(x)).double()
    )
    one_bf16_rounding = 2.0**-8
    for ours, exact in zip((linear(x), *gradients(linear, x, dy)), (y, dx, dw), strict=True):
        assert relative_error(ours, exact) < one_bf16_rounding
    torch.testing.assert_close(linear(x).double(), y, rtol=one_bf16_rounding, atol=1e-6)


def test_only_the_needed_gradients_are_made() -> None:
    linear = float8_linear(40, 30, bias=True)
    linear.weight.requires_grad_(False)
    x = randn(4, 40).bfloat16().requires_grad_()
    linear(x).float().sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is not None and x.grad is not None
    linear(x.detach()).float().sum().backward()


def test_stale_codes_are_refused_until_requantized() -> None:
    linear, x = float8_linear(40, 30), randn(4, 40).bfloat16()
    codes = linear.codes.view(torch.uint8).clone()
    before = linear(x)
    optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)
    before.float().sum().backward()
    assert torch.equal(linear.codes.view(torch.uint8), codes), "a forward never quantises the weight"
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed since requantize\(\)"):
        linear(x)
    places = [linear.codes.data_ptr(), linear.scale.data_ptr()]
    linear.requantize()
    assert [linear.codes.data_ptr(), linear.scale.data_ptr()] == places
    assert not torch.equal(linear(x), before)
    with pytest.raises(RuntimeError, match="never quantised"):
        Float8Linear(4, 4)(randn(2, 4).bfloat16())


def test_both_sides_decode_new_codes_whoever_wrote_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's kernel writes past torch, whose version counter then stands still."""

    def kernel(w_NK: torch.Tensor, power_of_two: bool, *, out: Quantized, **_: object) -> None:
        made = quantize_weight_reference(w_NK, power_of_two)
        ctypes.memmove(out.codes.data_ptr(), made.codes.data_ptr(), made.codes.numel())
        ctypes.memmove(out.scale.data_ptr(), made.scale.data_ptr(), 4 * made.scale.numel())

    monkeypatch.setattr("octetrl.layers.linear.quantize_weight", kernel)
    trainers, engines, x = float8_linear(40, 30), Float8Linear(40, 30), randn(4, 40).bfloat16()
    engines.drop_weight()
    engines.codes, engines.scale = trainers.codes, trainers.scale
    before = [linear(x) for linear in (trainers, engines)]
    assert torch.equal(*before)
    with torch.no_grad():
        trainers.weight.mul_(-1.7)
    trainers.requantize()
    after = [linear(x) for linear in (trainers, engines)]
    assert torch.equal(*after) and relative_error(after[0], -1.7 * before[0].float()) < 0.05


@pytest.mark.parametrize("power_of_two", [False, True])
def test_freed_codes_are_computed_again_with_the_same_bytes(power_of_two: bool) -> None:
    kept, remade = (float8_linear(300, 130, power_of_two=power_of_two) for _ in range(2))
    x = randn(5, 300).bfloat16()
    remade.load_state_dict(kept.state_dict())
    remade.requantize()
    codes, scale = remade.codes, remade.scale.clone()  # the tensor that an engine would share
    remade.release_codes()
    assert not remade.has_codes and codes.untyped_storage().nbytes() == 0
    with pytest.raises(AssertionError, match="freed during an update"):
        _ = remade.quantized
    results = []
    for linear in (kept, remade):
        inputs = x.clone().requires_grad_()
        y = linear(inputs)
        y.float().square().sum().backward()
        results.append((y, inputs.grad, linear.weight.grad))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    remade.requantize()
    assert remade.codes is codes and torch.equal(codes.view(torch.uint8), kept.codes.view(torch.uint8))
    assert torch.equal(remade.scale, scale)
    with torch.no_grad():
        remade.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"changed since requantize\(\)"):
        remade.release_codes()
    remade.requantize()
    remade.weight.requires_grad_(False)
    remade.release_codes()
    assert remade.has_codes, "a frozen weight's codes stay"


def test_a_weight_changed_between_forward_and_backward_is_noticed() -> None:
    linear, x = float8_linear(40, 30), randn(4, 40).bfloat16().requires_grad_()
    y = linear(x).float().sum()
    with torch.no_grad():
        linear.weight.mul_(2)
    linear.requantize()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_an_engines_copy_multiplies_by_the_published_bytes() -> None:
    trainer, x = float8_linear(300, 140), randn(9, 300).bfloat16()
    engine = Float8Linear(300, 140)
    engine.drop_weight()
    assert not list(engine.parameters())
    with torch.no_grad():
        assert engine(x).isnan().all(), "an unpublished copy must show"
        for version in range(2):
            engine.codes.copy_(trainer.codes)
            engine.scale.copy_(trainer.scale)
            assert torch.equal(engine(x), trainer(x)), version
            trainer.weight.mul_(1.3)
            trainer.requantize()
        shared = copy.deepcopy(engine)
        shared.codes, shared.scale = trainer.codes, trainer.scale
        assert torch.equal(shared(x), trainer(x))
        trainer.weight.mul_(0.7)
        trainer.requantize()
        assert torch.equal(shared(x), trainer(x)), "one set of buffers: nothing to copy"


def test_codes_are_not_part_of_a_checkpoint_and_a_cast_is_noticed() -> None:
    linear = float8_linear(40, 30)
    assert list(linear.state_dict()) == ["weight"]
    with pytest.raises(AssertionError, match="cast its weight instead"):
        linear.to(torch.float32).requantize()


def test_a_non_finite_weight_is_named_and_a_non_finite_input_is_not_hidden() -> None:
    linear = float8_linear(200, 30)
    x = randn(4, 200).bfloat16()
    x[2, 150] = torch.inf
    assert linear(x).isnan().any(1).tolist() == [False, False, True, False]
    with torch.no_grad():
        linear.weight[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.down_proj"):
        linear.requantize("layers.0.mlp.down_proj")


def test_no_rows() -> None:
    linear = float8_linear(40, 30, bias=True)
    x = torch.empty(0, 40, dtype=torch.bfloat16, requires_grad=True)
    y = linear(x)
    assert y.shape == (0, 30)
    y.sum().backward()
    assert linear.weight.grad.eq(0).all() and Linear(40, 30)(x).shape == (0, 30)


# ---------------------------------------------------------------- the embedding, whose gradient is summed in float32


def test_rows_and_gradient_equal_torch() -> None:
    embedding = Embedding(11, 4, dtype=torch.float32, device="cpu")
    torch.nn.init.normal_(embedding.weight)
    token_ids_T = torch.tensor([3, 3, 0, 10])
    dy_TE = torch.randn(4, 4)
    reference = embedding.weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(token_ids_T, reference).backward(dy_TE)
    embedding(token_ids_T).backward(dy_TE)
    assert torch.equal(embedding(token_ids_T), embedding.weight[token_ids_T])
    assert embedding.weight.grad is not None
    torch.testing.assert_close(embedding.weight.grad, reference.grad)


def test_a_frequent_token_does_not_stop_growing_in_bfloat16() -> None:
    embedding = Embedding(2, 1, dtype=torch.bfloat16, device="cpu")
    embedding(torch.zeros(4096, dtype=torch.int64)).backward(torch.ones(4096, 1, dtype=torch.bfloat16))
    assert embedding.weight.grad is not None and embedding.weight.grad[0].item() == 4096


# ---------------------------------------------------------------- many linears at once


def linears(seed: int = 0) -> dict[str, Float8Linear]:
    """Of several shapes and both roundings of scales; experts whose rows are whole blocks, and others."""
    made: dict[str, Float8Linear] = {
        "plain": Float8Linear(64, 300),
        "power": Float8Linear(160, 128, power_of_two=True),
        "experts": Float8StackedLinear(32, 128, 3),
        "ragged experts": Float8StackedLinear(32, 72, 3),
    }
    generator = torch.Generator().manual_seed(seed)
    for linear in made.values():
        assert linear.weight is not None
        linear.weight.data.normal_(generator=generator)
    return made


def assert_equal(ours: dict[str, Float8Linear], theirs: dict[str, Float8Linear]) -> None:
    for name, linear in ours.items():
        assert torch.equal(linear.codes.view(torch.uint8), theirs[name].codes.view(torch.uint8)), name
        assert torch.equal(linear.scale, theirs[name].scale), name


def test_all_are_requantized_in_place() -> None:
    ours, theirs = linears(), linears()
    ours["plain"].requantize()
    ours["plain"].release_codes()
    ours["power"].codes_transposed = torch.zeros(160, 128, dtype=torch.float8_e4m3fn)
    ours["ragged experts"].codes_transposed = torch.zeros(32, 216, dtype=torch.float8_e4m3fn)
    versions = [linear.codes._version for linear in ours.values()]
    requantize(ours)
    for linear in theirs.values():
        linear.requantize()
    assert_equal(ours, theirs)
    for name in ("power", "ragged experts"):
        linear = ours[name]
        assert linear.codes_transposed is not None
        assert torch.equal(linear.codes_transposed.view(torch.uint8), linear.codes.t().view(torch.uint8))
    for linear, version in zip(ours.values(), versions, strict=True):
        linear.check_codes()
        assert linear.codes._version > version, "values that were decoded before are renewed"


@pytest.mark.parametrize("rows", [80, 128])
def test_freed_codes_of_experts_have_the_same_bytes_in_dgrads_orientation(rows: int) -> None:
    """80: three experts' rows are no whole blocks, though all together would begin blocks elsewhere."""
    linear = Float8StackedLinear(48, rows, 8, backend="triton")
    linear.requantize()
    held = linear.dgrad_operand()
    linear.release_codes()
    made = linear.dgrad_operand()
    assert made.codes.shape == (48, 8 * rows) and torch.equal(made.scale, held.scale)
    assert torch.equal(made.codes.view(torch.uint8), held.codes.view(torch.uint8))


def test_rows_of_several_workers_make_the_whole() -> None:
    ours, theirs = linears(), linears()
    requantize(theirs)
    for part in range(2):
        parts = {}
        for name, linear in ours.items():
            unit = linear.rows_per_unit if isinstance(linear, Float8StackedLinear) else 128
            assert linear.weight is not None
            rows = slice(0, unit) if part == 0 else slice(unit, None)
            parts[name] = LinearRows(linear, part * unit, linear.weight.detach()[rows])
        quantize_rows({name: one for name, one in parts.items() if len(one.rows_RK)})
    assert_equal(ours, theirs)


def test_codes_of_others_are_adopted_and_transposed() -> None:
    ours, theirs = linears(), linears()
    requantize(theirs)
    for name, linear in ours.items():
        linear.codes.view(torch.uint8).copy_(theirs[name].codes.view(torch.uint8))
        linear.codes_transposed = None if name == "experts" else torch.zeros_like(linear.codes.t().contiguous())
        with pytest.raises(RuntimeError, match="stale"):
            linear.check_codes()
    adopt_codes(ours.values())
    for linear in ours.values():
        linear.check_codes()
        if linear.codes_transposed is not None:
            assert torch.equal(linear.codes_transposed.view(torch.uint8), linear.codes.t().view(torch.uint8))
    assert ours["experts"].codes_transposed is None


@pytest.mark.parametrize("name", ["power", "ragged experts"])
def test_a_weight_among_many_that_is_not_finite_is_named(name: str) -> None:
    ours = linears()
    weight = ours[name].weight
    assert weight is not None
    weight.data[3, 5] = torch.inf
    with pytest.raises(NonFiniteError, match=name):
        requantize(ours)
    with pytest.raises(RuntimeError, match="stale"):
        ours[name].check_codes()
