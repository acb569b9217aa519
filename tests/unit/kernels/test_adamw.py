"""The update against its formula in float64, the kernel against the reference, and moments of 8 bits against an EMA."""

from __future__ import annotations

import pytest
import torch

from octetrl.kernels.optimizer.adamw import (
    STATE_BLOCK,
    AdamScalars,
    Moment,
    adamw,
    adamw_triton,
    chance_noise,
    decode_moment,
    decode_square,
)

ONE = torch.ones(())
FORMATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


class State:
    """Weight, master and moments of one tensor."""

    def __init__(self, count: int, states: str, *, master: bool, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weight = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
        self.master = self.weight.float() if master else None
        self.exp_avg, self.exp_avg_sq = zero_moment(count, states), zero_moment(count, states)

    def update(self, gradient: torch.Tensor, step: int, beta2: float = 0.95, function=adamw, clip=ONE) -> None:
        scalars = AdamScalars(1e-2, 0.9, beta2, 1e-8, 0.1, step)
        function(self.weight, self.master, gradient, self.exp_avg, self.exp_avg_sq, clip, scalars, key=7919 * step)

    def tensors(self) -> list[torch.Tensor]:
        every = (self.weight, self.master, *self.exp_avg, *self.exp_avg_sq)
        return [tensor for tensor in every if tensor is not None]


def zero_moment(count: int, states: str) -> Moment:
    exponents = torch.ones(-(-count // STATE_BLOCK), dtype=torch.uint8) if states == "8bit" else None
    return Moment(torch.zeros(count, dtype=FORMATS[states]), exponents)


def uneven_gradient(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator) * 10 ** (2 * torch.randn(count, generator=generator))


@pytest.mark.parametrize("count", [1, 100, 5000])
@pytest.mark.parametrize("states", FORMATS)
@pytest.mark.parametrize("kind", ["master", "by chance", "float32"])
def test_the_kernel_has_the_references_bits(count: int, states: str, kind: str) -> None:
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    ours, theirs = (State(count, states, master=kind == "master", dtype=dtype) for _ in range(2))
    for step in range(1, 4):
        gradient = uneven_gradient(count, step)
        ours.update(gradient, step, function=adamw_triton, clip=torch.tensor(0.7))
        theirs.update(gradient, step, clip=torch.tensor(0.7))
    if kind == "master":  # the interpreter does not round to nearest into BF16
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=2**-7, atol=0)
        ours.weight = theirs.weight
    for our, their in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert torch.equal(our, their)


def test_float32_by_the_formula_in_float64() -> None:
    state = State(300, "float32", master=True)
    w, m, v = state.weight.double(), torch.zeros(300).double(), torch.zeros(300).double()
    for step in range(1, 6):
        g = 0.5 * uneven_gradient(300, step).double()
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        corrected = (v / (1 - 0.95**step)).sqrt() + 1e-8
        w = w * (1 - 1e-2 * 0.1) - 1e-2 * m / (1 - 0.9**step) / corrected
        state.update(uneven_gradient(300, step), step, clip=torch.tensor(0.5))
    assert state.master is not None
    torch.testing.assert_close(state.master.double(), w, rtol=1e-5, atol=1e-6)
    assert torch.equal(state.weight, state.master.bfloat16())


@pytest.mark.parametrize("states", ["bfloat16", "8bit"])
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_narrow_moments_follow_the_mean_up_and_down(states: str, beta2: float) -> None:
    """Neighbours of very different size in one block; gradients first of one size, then of a tenth of it."""
    count = 16 * STATE_BLOCK
    size = 10 ** -(torch.arange(count) % 4).float()  # 1 to 1e-3, so 1 to 1e-6 in exp_avg_sq
    state, exact = State(count, states, master=True), torch.zeros(count).double()
    steps = int(1.5 / (1 - beta2))
    for step in range(1, 2 * steps + 1):
        gradient = torch.randn(count) * size * (1.0 if step <= steps else 0.1)
        exact = beta2 * exact + (1 - beta2) * gradient.double() ** 2
        state.update(gradient, step, beta2)
        if step in (steps, 2 * steps):
            ratio = (decode_square(state.exp_avg_sq) / exact).view(-1, 4).mean(0)
            assert ((ratio - 1).abs() < 0.05).all(), ratio
            assert (decode_square(state.exp_avg_sq) > 0).all()


def test_rounding_to_nearest_would_stand_still() -> None:
    """Why chance: the same EMA in BF16 rounded to nearest keeps what it had when gradients stop."""
    nearest, by_chance = torch.ones(1000, dtype=torch.bfloat16), State(1000, "bfloat16", master=True)
    by_chance.exp_avg_sq.values.fill_(1.0)
    for step in range(1, 501):
        nearest = (nearest.float() * 0.999).bfloat16()
        by_chance.update(torch.zeros(1000), step, 0.999)
    assert (nearest == 1).all()
    assert by_chance.exp_avg_sq.values.float().mean().item() == pytest.approx(0.999**500, rel=0.03)


def test_an_8bit_value_is_within_a_code_and_right_in_the_mean() -> None:
    count = 400 * STATE_BLOCK
    state = State(count, "8bit", master=True)
    gradient = (10 ** -(4 * torch.rand(STATE_BLOCK))).repeat(400) * torch.where(torch.rand(count) < 0.5, -1.0, 1.0)
    state.update(gradient, 1)
    for got, exact in (
        (decode_moment(state.exp_avg), 0.1 * gradient),
        (decode_square(state.exp_avg_sq), 0.05 * gradient**2),
    ):
        step = torch.maximum(exact.abs() / 8, exact.abs().amax() * 2**-17)
        assert ((got - exact).abs() <= step).all()
        mean, expected = got.abs().view(400, -1).mean(0), exact.abs().view(400, -1).mean(0)
        assert ((mean - expected).abs() < 5 * step.view(400, -1)[0] / 2 / 400**0.5).all()
        assert (got * exact >= 0).all()


@pytest.mark.parametrize("states", FORMATS)
def test_zero_tiny_and_huge_gradients(states: str) -> None:
    state = State(3 * STATE_BLOCK, states, master=True)
    gradient = torch.zeros(3, STATE_BLOCK)
    gradient[1], gradient[1, 0], gradient[1, 1], gradient[2] = 1e-2, 1e4, 1e-12, 1e-18
    before = state.weight.clone()
    for step in range(1, 30):
        state.update(gradient.view(-1) * (step % 5 > 0), step)  # now and then none: m > 0 over what is left of v
        assert state.master is not None and state.master.isfinite().all()
    moved = (state.master - before.float() * 0.999**29).abs().view(3, -1)
    assert (moved[0] < 1e-5).all()  # decay alone
    assert 0.6 * 29e-2 < moved[1, 0] < 29e-2
    assert (moved <= 29e-2 * 1.3).all()  # no step far above the learning rate
    assert (decode_square(state.exp_avg_sq)[:STATE_BLOCK] == 0).all()


@pytest.mark.parametrize("states", FORMATS)
def test_pieces_have_the_bits_of_the_whole(states: str) -> None:
    whole, cut = State(1000, states, master=False), State(1000, states, master=False)
    scalars, gradient = AdamScalars(1e-2, 0.9, 0.95, 1e-8, 0.0, 1), uneven_gradient(1000, 1)
    adamw(whole.weight, None, gradient, whole.exp_avg, whole.exp_avg_sq, ONE, scalars, key=5)
    for part, blocks in ((slice(0, 512), slice(0, 4)), (slice(512, 1000), slice(4, 8))):
        moments = [
            Moment(moment.values[part], None if moment.exponents is None else moment.exponents[blocks])
            for moment in (cut.exp_avg, cut.exp_avg_sq)
        ]
        adamw(cut.weight[part], None, gradient[part], *moments, ONE, scalars, key=5, first=part.start)
    for one, other in zip(whole.tensors(), cut.tensors(), strict=True):
        assert torch.equal(one, other)


def test_noise_is_even_and_its_three_parts_have_nothing_to_do_with_each_other() -> None:
    first, other = (torch.stack(chance_noise(key, 0, 1 << 16)) for key in (123456789, 1987654321))
    parts = torch.cat([first, other]).double() / torch.tensor([65536, 65536, 1 << 20] * 2).unsqueeze(1)
    assert parts.min() >= 0 and parts.max() < 1
    assert ((parts.mean(1) - 0.5).abs() < 0.005).all()
    correlation = torch.corrcoef(torch.cat([parts, parts[:3].roll(1, dims=1)]))
    assert (correlation - torch.eye(9)).abs().max() < 0.02
