"""Many linears at once have the codes that each has by its own methods."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.non_finite import NonFiniteError
from octetrl.layers.linear import Float8Linear
from octetrl.layers.many_linears import LinearRows, adopt_codes, quantize_rows, requantize
from octetrl.layers.stacked import Float8StackedLinear


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
    versions = [linear.codes._version for linear in ours.values()]
    requantize(ours)
    for linear in theirs.values():
        linear.requantize()
    assert_equal(ours, theirs)
    assert torch.equal(ours["power"].codes_transposed.view(torch.uint8), ours["power"].codes.t().view(torch.uint8))
    for linear, version in zip(ours.values(), versions, strict=True):
        linear.check_codes()
        assert linear.codes._version > version, "values that were decoded before are renewed"


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
def test_a_weight_that_is_not_finite_is_named(name: str) -> None:
    ours = linears()
    weight = ours[name].weight
    assert weight is not None
    weight.data[3, 5] = torch.inf
    with pytest.raises(NonFiniteError, match=name):
        requantize(ours)
    with pytest.raises(RuntimeError, match="stale"):
        ours[name].check_codes()
