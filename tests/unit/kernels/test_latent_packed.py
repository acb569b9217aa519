"""MLA over packed sequences: reference and interpreted kernel against float64."""

from __future__ import annotations

import pytest
import torch

from octetrl.fp8.relative_error import relative_error
from octetrl.kernels.attention.latent_packed import latent_packed, latent_packed_triton
from tests.unit.kernels.latent_cases import SCALE, latents, written_out

CASES = {"ragged": ((70, 1, 20), 3, 40, 8), "many heads": ((1, 9), 20, 32, 16)}


@pytest.mark.parametrize("name", CASES)
def test_the_reference_is_the_formula(name: str) -> None:
    case = latents(*CASES[name], torch.bfloat16)
    found = latent_packed(*case[:4], case.cu_seqlens_B1, max(case.lengths), SCALE)
    assert relative_error(found, written_out(case)) < 4e-3
    wide = case._replace(**{name: value.float() for name, value in case._asdict().items() if name != "lengths"})
    found = latent_packed(*wide[:4], case.cu_seqlens_B1, max(case.lengths), SCALE)
    assert relative_error(found, written_out(case)) < 1e-6


def test_chunks_of_keys_are_merged() -> None:
    case = latents((1_100,), 1, 32, 16, torch.bfloat16)
    found = latent_packed(*case[:4], case.cu_seqlens_B1, 1_100, SCALE)
    assert relative_error(found, written_out(case)) < 4e-3


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_is_near_the_reference(name: str) -> None:
    case = latents(*CASES[name], torch.bfloat16)
    arguments = case[:4], case.cu_seqlens_B1, max(case.lengths), SCALE
    found = latent_packed_triton(*arguments[0], *arguments[1:])
    assert relative_error(found, latent_packed(*arguments[0], *arguments[1:])) < 1e-2
    assert relative_error(found, written_out(case)) < 1e-2
