"""BF16 gradient sums: their error as measured and as they report it, updates, and the same bits again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from octetrl.config.schema import OptimizerConfig
from octetrl.trainer.gradients import GradientRounding, chance_key, gradient_sums, round_stochastically
from octetrl.trainer.optimizer import GradientFormat, Optimizer
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.shards import GradientMode, cut_rows
from tests.objectives import objective
from tests.team import run_team
from tests.unit.trainer.same_state import LOSS, joined
from tests.unit.trainer.test_many_workers import LR, Run, assert_equal_everywhere, batches, trained

CPU = torch.device("cpu")


SHAPE = (32, 512)


def micro_batches(count: int, noise: float) -> list[Tensor]:
    """Gradients of micro-batches: a part that all share, and `noise` times as much of their own."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(SHAPE, generator=generator)
    return [(common + noise * torch.randn(SHAPE, generator=generator)).bfloat16() for _ in range(count)]


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("noise", "count", "stochastic", "nearest"), [(4.0, 16, 0.0062, 0.0046), (0.1, 256, 0.021, 0.072)]
)
def test_the_error_is_as_docs_say_and_as_the_metric_says(
    noise: float, count: int, stochastic: float, nearest: float
) -> None:
    """Contributions that are mostly noise, and contributions that are nearly equal."""
    given = micro_batches(count, noise)
    exact = torch.stack([one.double() for one in given]).sum(0)
    rounding, sum_, to_nearest = GradientRounding(3, CPU), torch.zeros(SHAPE).bfloat16(), torch.zeros(SHAPE).bfloat16()
    rounding.begin(0)
    for one in given:
        rounding.add(sum_, one, "weight")
        to_nearest += one
    assert relative(sum_, exact) == pytest.approx(stochastic, rel=0.05)
    assert relative(to_nearest, exact) == pytest.approx(nearest, rel=0.05)
    rounding.end(exact.norm(), ALONE)
    assert rounding.take_metrics()["gradients/rounding_error"] == pytest.approx(relative(sum_, exact), rel=0.03)
    assert rounding.take_metrics() == {}


def test_a_gradient_of_zero_has_no_relative_error() -> None:
    rounding, sum_ = GradientRounding(3, CPU), torch.zeros(SHAPE).bfloat16()
    rounding.begin(0)
    rounding.add(sum_, torch.zeros(SHAPE), "weight")
    rounding.end(torch.tensor(0.0), ALONE)
    assert rounding.take_metrics() == {}


@pytest.mark.parametrize("states", ["float32", "bfloat16"])
def test_a_sum_without_rounding_updates_as_a_float32_sum(states: str) -> None:
    """Also if it is clipped."""
    config = OptimizerConfig(lr=1e-2, max_grad_norm=0.3, states=states)  # type: ignore[arg-type]

    def updated(gradients: GradientFormat) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.linspace(-1, 1, 300).view(3, 100).bfloat16())
        optimizer = Optimizer([("weight", weight)], config, seed=2, gradients=gradients)
        for _ in range(3):
            optimizer.zero_grad()
            weight.backward(torch.randint(-4, 5, weight.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
            norm = optimizer.clip_gradients()
            optimizer.step(config.lr)
        return weight.detach(), norm

    ours, theirs = updated("bfloat16"), updated("float32")
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-6, atol=0)


@pytest.mark.parametrize("mode", ["local", "sharded"])
def test_two_workers_train_as_with_float32_sums_and_repeat_their_bits(mode: GradientMode) -> None:
    given, unclipped = batches(4, sft=True), OptimizerConfig(lr=LR, max_grad_norm=1e9)
    alone = trained(ALONE, given, objective(name="sft"), optimizer=unclipped)

    def work(peers: Peers) -> Run:
        states = [step.before for step in alone.steps]
        return trained(peers, given, objective(name="sft"), states=states, optimizer=unclipped, gradients="bfloat16")

    runs, again = (run_team(2, work, gradients=mode) for _ in range(2))
    assert_equal_everywhere(runs)
    assert_equal_everywhere([runs[0], again[0]])
    for number, step in enumerate(alone.steps):
        of_workers = [run.steps[number] for run in runs]
        gradients = joined(one.gradients for one in of_workers)
        assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
        exact, rounded = (torch.cat([one[name].flatten() for name in gradients]) for one in (step.gradients, gradients))
        errors = [one.update.metrics["gradients/rounding_error"] for one in of_workers]
        assert errors[0] == errors[1] and 1e-4 < errors[0] < 5e-3
        assert relative(rounded, exact.double()) == pytest.approx(errors[0], rel=0.3)
        assert of_workers[0].update.metrics["loss"] == pytest.approx(step.update.metrics["loss"], rel=LOSS)


def summed(peers: Peers, given: list[Tensor], dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The owned rows of the sum of this worker's gradients, one a micro-batch."""
    weight = nn.Parameter(torch.zeros(given[0].shape, dtype=dtype))
    rows = cut_rows([weight.shape], peers.share.count)
    sums = gradient_sums({"weight": weight}, rows, peers, GradientRounding(3, CPU))
    sums.zero()
    for gradient in given:
        weight.backward(gradient)
        sums.end_micro_batch()
    sums.finish()
    return sums.owned["weight"]


def test_the_sum_over_workers_has_no_bias() -> None:
    """Worker 1's gradient rounds up to the next BF16 number with probability 0.1, and the sum of both with 1/4 of that.
    With the random bits of the micro-batch, the sum would round up whenever the gradient did."""
    step, weights = 2**-9, (1024, 64)  # BF16 numbers from 1/4 are a step apart, those from 1 are 4 steps apart
    given = [torch.full(weights, value) for value in (1.0, 0.25 + 0.1 * step)]
    for own in run_team(2, lambda peers: summed(peers, [given[peers.share.rank]], torch.float32), gradients="local"):
        steps = (own.double() - 1.25) / step  # 4 with probability 0.025: its deviation is 0.62
        assert abs(float(steps.mean()) - 0.1) < 4 * 0.62 / steps.numel() ** 0.5


@pytest.mark.parametrize("mode", ["local", "sharded"])
def test_groups_of_owners_round_alike_and_count_an_error_once(mode: GradientMode) -> None:
    given = micro_batches(4, 1.0)
    exact = torch.stack([one.double() for one in given]).sum(0)

    def work(peers: Peers) -> tuple[Tensor, float]:
        weight, rounding = nn.Parameter(torch.zeros(512, 32).bfloat16()), GradientRounding(3, CPU)
        sums = gradient_sums({"weight": weight}, cut_rows([weight.shape], peers.owners.count), peers, rounding)
        sums.zero()
        weight.backward(given[peers.share.rank].view(512, 32))
        sums.end_micro_batch()
        sums.finish()
        rounding.end(exact.norm(), peers)
        return sums.owned["weight"], rounding.take_metrics()["gradients/rounding_error"]

    (first, error), (second, _), *others = run_team(4, work, gradients=mode, owners=2)
    assert torch.equal(first, others[0][0]) and torch.equal(second, others[1][0])
    assert relative(torch.cat([first, second]).view(SHAPE), exact) == pytest.approx(error, rel=0.1)


def test_sharded_sums_have_the_same_bits_on_any_number_of_workers() -> None:
    """The bits of an addition are counted from the start of the whole parameter, wherever its rows are. The gradients
    come from one worker, so that no order of sums differs."""
    generator = torch.Generator().manual_seed(4)
    given = [torch.randn(600, 5, generator=generator).bfloat16() for _ in range(3)]
    nothing = [torch.zeros_like(gradient) for gradient in given]

    def work(peers: Peers) -> Tensor:
        return summed(peers, nothing if peers.share.rank else given)

    two, five = (torch.cat(run_team(count, work, gradients="sharded")) for count in (2, 5))
    nearest = (given[0] + given[1]) + given[2]
    assert torch.equal(two, five) and not torch.equal(two, nearest)


def test_local_sums_of_equal_gradients_round_differently_on_each_worker() -> None:
    """So their errors partly cancel: by the root of two for two workers. With equal bits the sum would just double."""
    given = micro_batches(64, 0.1)
    exact = torch.stack([one.double() for one in given]).sum(0)
    alone, two = (
        relative(torch.cat(run_team(count, lambda peers: summed(peers, given))), count * exact) for count in (1, 2)
    )
    assert two == pytest.approx(alone / 2**0.5, rel=0.1)


# ---------------------------------------------------------------- one rounding


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
