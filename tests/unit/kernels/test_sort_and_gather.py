"""Sorting and gathering in one launch (interpreted), against the two kernels and their references."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

import octetrl.kernels.rows.sort_and_gather as op
import octetrl.kernels.rows.sort_by_expert as sort_module
from octetrl.fp8.quantize import Quantized, quantize_activation_reference
from octetrl.kernels.rows.gather_codes import gather_codes_triton
from octetrl.kernels.rows.sort_and_gather import sort_and_gather, sort_and_gather_triton
from octetrl.kernels.rows.sort_by_expert import sort_by_expert_triton
from tests.unit.kernels.fused_row_cases import bytes_of
from tests.unit.kernels.test_sort_by_expert import CASES, chosen


def all_bytes(found: tuple[tuple[Tensor, ...], Quantized]) -> list[list[bytes]]:
    return [*(bytes_of(tensor) for tensor in found[0]), bytes_of(found[1])]


def codes_of(tokens: int, columns: int) -> Quantized:
    """A row of NaN and one of infinity too. Scales as the kernels allocate them."""
    x_TK = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).bfloat16()
    x_TK *= torch.arange(1, tokens + 1)[:, None]
    if tokens > 2:
        x_TK[0, 3], x_TK[2, columns - 1] = torch.nan, torch.inf
    x = quantize_activation_reference(x_TK)
    return x._replace(scale=x.scale.t().contiguous().t())


@pytest.mark.parametrize(("programs", "step_bytes", "columns"), [(256, 16384, 128), (60, 512, 640), (1, 256, 200)])
@pytest.mark.parametrize("name", CASES)
def test_one_launch_has_the_bytes_of_two(
    name: str, programs: int, step_bytes: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "PROGRAMS", programs)
    monkeypatch.setattr(op, "STEP_BYTES", step_bytes)
    monkeypatch.setattr(sort_module, "TILES_WRITTEN", tl.constexpr(1))
    tokens, slots, experts = CASES[name]
    expert_TS, x = chosen(tokens, slots, experts), codes_of(tokens, columns)
    apart = sort_by_expert_triton(expert_TS, experts)
    want = apart, gather_codes_triton(x, apart.token_P)
    assert all_bytes(sort_and_gather_triton(expert_TS, experts, x)) == all_bytes(want)
    assert all_bytes(sort_and_gather(expert_TS, experts, x)) == all_bytes(want)


@pytest.mark.parametrize("tokens", [1, 300])
def test_one_expert_may_have_most_rows(tokens: int) -> None:
    """Expert 3 is every token's, most experts are nobody's."""
    expert_TS = torch.stack((torch.full((tokens,), 3), 5 + torch.arange(tokens) % 2), 1)
    x = codes_of(tokens, 256)
    found, codes = sort_and_gather_triton(expert_TS, 64, x)
    assert found.first_X1[3:5].tolist() == [0, tokens] and found.token_P[:tokens].tolist() == list(range(tokens))
    assert all_bytes((found, codes)) == all_bytes(sort_and_gather(expert_TS, 64, x))
