"""The optimizer against AdamW's formula, and what is ours: float32 sums, masters, rounding, exact state."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from octetrl.config.schema import OptimizerConfig
from octetrl.kernels.optimizer.adamw import decode_moment
from octetrl.records import PackedBatch
from octetrl.system.errors import UserError
from octetrl.trainer.forward import KVReplay
from octetrl.trainer.optimizer import Optimizer
from octetrl.trainer.optimizer_states import pieces_of, update_piece
from octetrl.trainer.packing import pack
from tests.objectives import objective
from tests.unit.trainer.tiny_trainer import random_samples, supervised, tiny_trainer

STATES = ("float32", "bfloat16", "8bit")
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.01, "8bit": 0.13}
CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(3)
    shapes = {"embedding.weight": (6, 4), "layers.0.mlp.weight": (5, 4), "norm.weight": (4,), "lm_head.weight": (6, 4)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def give_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    losses = [(parameter.float() * torch.randn(parameter.shape).bfloat16()).sum() for parameter in named.values()]
    sum(losses).backward()


@pytest.mark.parametrize("gradients", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [500, 12_000])
def test_the_norm_of_a_large_tensor(rows: int, gradients: Literal["float32", "bfloat16"]) -> None:
    """torch's own norm is 4e-4 too small on a CPU, for the smaller one 6e-6."""
    weight = nn.Parameter(torch.zeros(rows, 1024))
    optimizer = Optimizer([("lm_head.weight", weight)], CONFIG, seed=1, gradients=gradients)
    optimizer.zero_grad()
    given = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    (weight * given).sum().backward()
    assert float(optimizer.clip_gradients()) == pytest.approx(float(given.double().norm()), rel=2e-7)


def run(named: dict[str, nn.Parameter], config: OptimizerConfig, steps: range, state: dict | None = None) -> Optimizer:
    optimizer = Optimizer(named.items(), config, seed=1)
    if state is not None:
        optimizer.load_state_tensors(state)
    for step in steps:
        optimizer.zero_grad()
        give_gradients(named, step)
        optimizer.clip_gradients()
        optimizer.step(config.lr)
    return optimizer


@pytest.mark.parametrize("where", ["linears", "matrices", "all"])
def test_adamw_by_its_formula_with_decay_where_the_recipe_says(where: str) -> None:
    ours, theirs = parameters(), parameters()
    run(ours, CONFIG.model_copy(update={"weight_decay_on": where}), range(5))
    first, second = CONFIG.betas
    moments = {name: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for name, parameter in theirs.items()}
    for step in range(5):
        give_gradients(theirs, step)
        for name, parameter in theirs.items():
            gradient, (mean, square) = parameter.grad, moments[name]
            mean.mul_(first).add_((1 - first) * gradient)
            square.mul_(second).add_((1 - second) * gradient**2)
            update = mean / (1 - first ** (step + 1)) / ((square / (1 - second ** (step + 1))).sqrt() + CONFIG.eps)
            decays = {"linears": ("layers.0.mlp.weight", "lm_head.weight"), "all": tuple(theirs)}
            decay = 0.1 if name in decays.get(where, (*decays["linears"], "embedding.weight")) else 0.0
            with torch.no_grad():
                parameter.mul_(1 - 1e-2 * decay).sub_(1e-2 * update)
            parameter.grad = None
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_gradients_are_summed_in_float32_and_freed() -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    optimizer = Optimizer([("weight", weight)], CONFIG)
    for contribution in (256.0, 1.0, 1.0):  # BF16 holds 256 and 258 but not 257: 256 + 1 stays 256
        (weight.float() * contribution).sum().backward()
    assert weight.grad is None and optimizer.slots[0].gradient.item() == 258.0


@pytest.mark.parametrize("states", STATES)
def test_clipping_scales_by_the_global_norm(states: str) -> None:
    """Seen in exp_avg, half of the gradient: narrow formats are off by a code."""
    named = {"a": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(1))}
    optimizer = Optimizer(named.items(), OptimizerConfig(max_grad_norm=1.0, betas=(0.5, 0.5), states=states))
    for expected in (0.3, 0.75 * 0.6):  # and a step without clipping is not clipped like the one before
        (3 * named["a"] + 4 * named["b"]).sum().backward()
        assert optimizer.clip_gradients().item() == pytest.approx(5.0)
        optimizer.step(0.0)
        assert decode_moment(optimizer.slots[0].exp_avg).item() == pytest.approx(expected, rel=TOLERANCE[states])
        optimizer.zero_grad()
    (3 * named["a"]).sum().backward()
    optimizer.step(0.0)
    assert decode_moment(optimizer.slots[0].exp_avg).item() == pytest.approx(1.725, rel=TOLERANCE[states])


def test_float32_masters_follow_float32_training() -> None:
    named, exact = parameters(torch.bfloat16), parameters(torch.bfloat16)
    exact = {name: nn.Parameter(parameter.detach().float()) for name, parameter in exact.items()}
    optimizer = run(named, CONFIG, range(20))
    run(exact, CONFIG, range(20))
    for slot in optimizer.slots:
        assert slot.master is not None and slot.has_own_master
        torch.testing.assert_close(slot.master, exact[slot.name].detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(slot.parameter, slot.master.bfloat16())


def test_stochastic_rounding_keeps_no_master_and_lands_beside_the_float32_value() -> None:
    config = CONFIG.model_copy(update={"master": "stochastic_rounding"})
    named, exact = parameters(torch.bfloat16), parameters(torch.bfloat16)
    exact = {name: nn.Parameter(parameter.detach().float()) for name, parameter in exact.items()}
    optimizer = run(named, config, range(1))
    run(exact, CONFIG, range(1))
    assert not any("master" in name for name in optimizer.state_tensors())
    for name, parameter in named.items():
        step = exact[name].detach().abs() * 2**-7
        assert ((parameter.detach().float() - exact[name].detach()).abs() <= step).all()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize(
    ("master", "dtype"),
    [("float32", torch.float32), ("float32", torch.bfloat16), ("stochastic_rounding", torch.bfloat16)],
)
def test_state_restores_every_bit(states: str, master: str, dtype: torch.dtype) -> None:
    config = CONFIG.model_copy(update={"master": master, "states": states})
    straight, stopped = parameters(dtype), parameters(dtype)
    run(straight, config, range(6))
    state = {name: tensor.clone() for name, tensor in run(stopped, config, range(3)).state_tensors().items()}
    resumed = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in stopped.items()}
    optimizer = run(resumed, config, range(3, 6), state)
    assert optimizer.step_count == 6
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name


@pytest.mark.parametrize("states", STATES)
def test_weights_change_in_place_and_autograd_can_tell(states: str) -> None:
    named = parameters(torch.bfloat16)
    before = {name: (parameter.data_ptr(), parameter._version) for name, parameter in named.items()}
    run(named, CONFIG.model_copy(update={"states": states}), range(1))
    for name, parameter in named.items():
        assert parameter.data_ptr() == before[name][0] and parameter._version > before[name][1]


def test_another_optimizers_state_is_refused_by_name_and_changes_nothing() -> None:
    optimizer = run(parameters(torch.bfloat16), CONFIG, range(1))
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    state["exp_avg/norm.weight"] = torch.zeros(5)
    state["exp_avg/embedding.weight"] = torch.ones(6, 4)
    del state["master/lm_head.weight"]
    with pytest.raises(UserError, match=r"exp_avg/norm\.weight.*master/lm_head\.weight.*2 such tensors"):
        optimizer.load_state_tensors(state)
    assert not torch.equal(optimizer.slots[0].exp_avg.values, torch.ones(6, 4))


def test_non_finite_gradients_are_named() -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), CONFIG)
    with optimizer.gradients.inspect() as bad:
        sum(named[name].sum() * torch.nan for name in ("norm.weight", "embedding.weight")).backward()
    assert bad == ["embedding.weight", "norm.weight"]
    assert all(named[name].grad is None and not optimizer.gradients.owned[name].any() for name in bad)


def test_states_of_another_format_are_refused_in_one_line() -> None:
    for states, other in (("float32", "8bit"), ("8bit", "bfloat16"), ("bfloat16", "float32")):
        given = Optimizer(parameters().items(), CONFIG.model_copy(update={"states": states})).state_tensors()
        optimizer = Optimizer(parameters().items(), CONFIG.model_copy(update={"states": other}))
        with pytest.raises(UserError, match=f"states are {states}, .* is {other}: resume with .*={states}") as error:
            optimizer.load_state_tensors(given)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", ["float32", "stochastic_rounding"])
def test_a_regression_ends_where_float64_adam_ends(states: str, master: str) -> None:
    """Rows of inputs differ by a factor of a thousand, so blocks of moments hold sizes from 1 to 1e-6."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 160) * 10 ** -(3 * torch.rand(160))
    targets = inputs @ torch.randn(160, 8)
    start = torch.randn(160, 8) * 0.1

    def loss_of(weight: torch.Tensor) -> torch.Tensor:
        return (inputs.to(weight.dtype) @ weight - targets.to(weight.dtype)).square().mean()

    weight = nn.Parameter(start.bfloat16())
    optimizer = Optimizer([("w.weight", weight)], OptimizerConfig(master=master, states=states))
    exact = nn.Parameter(start.bfloat16().double())
    adam = torch.optim.Adam([exact], betas=(0.9, 0.95))
    losses, exact_losses = [], []
    for step in range(300):
        lr = 0.02 * (1 - step / 300)
        optimizer.zero_grad()
        master_weight = optimizer.slots[0].master
        with torch.enable_grad():
            loss = loss_of(weight.float())
        loss.backward()
        optimizer.step(lr)
        adam.param_groups[0]["lr"] = lr
        adam.zero_grad()
        exact_loss = loss_of(exact)
        exact_loss.backward()
        adam.step()
        losses.append(float(loss_of(weight.detach().float() if master_weight is None else master_weight)))
        exact_losses.append(float(loss_of(exact.detach())))
    halfway = exact_losses[100]
    assert halfway < 0.2 * exact_losses[0]
    assert losses[100] == pytest.approx(halfway, rel=0.25)
    assert losses[-1] < exact_losses[-1] + 0.01 * exact_losses[0]


def sft_losses(states: str, batches: list[PackedBatch], master: str = "float32") -> tuple[list[float], list]:
    config = OptimizerConfig(lr=3e-3, states=states, master=master)
    trainer = tiny_trainer(algorithm=objective(name="sft"), optimizer=config, total_steps=1000)
    losses = [trainer.train(batch, KVReplay(), None).metrics["loss"] for batch in batches]
    return losses, [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_a_tiny_decoder_learns_alike_in_every_format_and_twice_the_same() -> None:
    layout = tiny_trainer().layout
    batches = [pack(supervised(random_samples(6, seed % 2)), layout, "token") for seed in range(16)]
    exact, _ = sft_losses("float32", batches)
    assert exact[-1] < 0.7 * exact[0]
    for states in ("bfloat16", "8bit"):
        losses, _ = sft_losses(states, batches)
        assert losses[-1] == pytest.approx(exact[-1], rel=0.03)
        (again, weights), (_, weights_again) = (sft_losses(states, batches[:2]) for _ in range(2))
        assert losses[:2] == again and all(map(torch.equal, weights, weights_again))


@pytest.mark.parametrize("states", STATES[1:])
@pytest.mark.parametrize("master", ["float32", "stochastic_rounding"])
def test_updated_in_pieces_a_parameter_has_the_bits_of_the_whole(states: str, master: str) -> None:
    config = CONFIG.model_copy(update={"states": states, "master": master})
    whole, cut = ({"w.weight": nn.Parameter(torch.ones(10, 100, dtype=torch.bfloat16))} for _ in range(2))
    optimizers = [Optimizer(named.items(), config) for named in (whole, cut)]
    for named in (whole, cut):
        give_gradients(named, 0)
    optimizers[0].step(1e-2)
    slot, clip = optimizers[1].slots[0], torch.ones(())
    own = slot.weight, slot.gradient, slot.exp_avg, slot.exp_avg_sq, slot.master
    pieces = list(pieces_of(slot.name, *own, decays=True, elements=384))
    assert [piece.first for piece in pieces] == [0, 384, 768]
    shard = pieces_of(slot.name, *own, decays=True, elements=384, first=12_800)
    assert [piece.first for piece in shard] == [12_800, 13_184, 13_568]
    for piece in pieces:
        states_there = [state.clone() for state in piece.states]
        update_piece(piece, states_there, clip, optimizers[1]._scalars(1e-2, True), optimizers[1]._key(slot.name))
        for state, there in zip(piece.states, states_there, strict=True):
            state.copy_(there)
    assert torch.equal(whole["w.weight"], cut["w.weight"])
    state = optimizers[0].state_tensors()
    for name, tensor in optimizers[1].state_tensors().items():
        assert name == "step_count" or torch.equal(tensor, state[name]), name
