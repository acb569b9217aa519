"""NVFP4 of the study against a definition of its own in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import torch

from lab.study.codecs import nvfp4, round_to_e2m1
from octetrl.fp8.format import E4M3

E2M1 = [Fraction(value) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]


def test_every_value_goes_to_the_nearest_of_eight() -> None:
    for x in torch.linspace(-6, 6, 97).tolist():  # eighths: all ties are among them
        place = min(range(8), key=lambda one: (abs(E2M1[one] - abs(Fraction(x))), one % 2))
        assert abs(float(round_to_e2m1(torch.tensor(x)))) == E2M1[place]


def test_a_block_has_an_e4m3_scale_of_the_tensors() -> None:
    generator = torch.Generator().manual_seed(4)
    x_MK = (torch.randn(3, 40, generator=generator) * 10 ** torch.randn(3, 1, generator=generator)).bfloat16().float()
    x_MK[1, 16:32] = 0
    x_MK[2] *= 1e-6  # its scales are below the smallest E4M3 number, and round to 0
    found = nvfp4(x_MK)
    tensor = x_MK.abs().max() / (6 * 448)
    for row in range(3):
        for block in range(3):
            part = slice(16 * block, 16 * block + 16)
            scale = (x_MK[row, part].abs().max() / 6 / tensor).to(E4M3).float()
            steps = (
                (x_MK[row, part] / (scale * tensor)).nan_to_num(0, 0, 0)
                if scale
                else torch.zeros(16)[: 40 - 16 * block]
            )
            assert torch.equal(found[row, part], round_to_e2m1(steps.clamp(-6, 6)) * (scale * tensor))
    assert not found[2].any() and found[:2].any(1).all()
    error = (found[:2] - x_MK[:2]).norm() / x_MK[:2].norm()
    assert 0.05 < error < 0.15
