from __future__ import annotations

import torch

from octetrl.trainer.gradients import chance_key, round_stochastically


def rounded(value: torch.Tensor, seed: int = 0, step: int = 0, name: str = "w") -> torch.Tensor:
    return round_stochastically(value, key=chance_key(seed=seed, step=step, name=name))


def test_what_bf16_holds_stays() -> None:
    value = torch.randn(500).bfloat16()
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.38e38, 1e-40]).bfloat16()
    for exact in (value, special):
        assert torch.equal(rounded(exact.float()).view(torch.int16), exact.view(torch.int16))
    assert rounded(torch.tensor([torch.nan])).isnan().all()


def test_only_the_two_neighbours_and_the_right_share_of_each() -> None:
    low, high = 1.0, 1.0 + 2**-7
    for sign in (1, -1):
        result = rounded(torch.full((40_000,), sign * (low + 0.3 * 2**-7))).float() * sign
        assert set(result.unique().tolist()) == {low, high}
        share = (result == high).float().mean().item()
        assert abs(share - 0.3) < 0.01  # four standard deviations


def test_small_updates_add_up_where_rounding_to_nearest_loses_them() -> None:
    weight = torch.ones(2000, dtype=torch.bfloat16)
    nearest = weight.clone()
    for step in range(100):
        weight = rounded(weight.float() + 1e-4, step=step)
        nearest = (nearest.float() + 1e-4).bfloat16()
    assert (nearest == 1).all()
    assert abs(weight.float().mean().item() - 1.01) < 1e-3


def test_bits_depend_on_seed_step_and_name_alone() -> None:
    value = torch.randn(100)
    assert torch.equal(rounded(value), rounded(value))
    torch.rand(3)
    assert torch.equal(rounded(value), rounded(value))
    for other in (rounded(value, seed=1), rounded(value, step=1), rounded(value, name="v")):
        assert not torch.equal(other, rounded(value))
