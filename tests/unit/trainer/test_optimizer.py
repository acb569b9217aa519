"""The optimizer against AdamW's formula, and what is ours: float32 sums, masters, rounding, exact state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octetrl.config.errors import UserError
from octetrl.config.schema import OptimizerConfig
from octetrl.trainer.optimizer import Optimizer

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=1e9)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    torch.manual_seed(3)
    shapes = {"embedding.weight": (6, 4), "layers.0.mlp.weight": (5, 4), "norm.weight": (4,), "lm_head.weight": (6, 4)}
    return {name: nn.Parameter(torch.randn(shape).to(dtype)) for name, shape in shapes.items()}


def give_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    torch.manual_seed(step)
    losses = [(parameter.float() * torch.randn(parameter.shape).bfloat16()).sum() for parameter in named.values()]
    sum(losses).backward()


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


def test_adamw_by_its_formula_with_decay_on_matrices_other_than_the_embedding() -> None:
    ours, theirs = parameters(), parameters()
    run(ours, CONFIG, range(5))
    first, second = CONFIG.betas
    moments = {name: (torch.zeros_like(parameter), torch.zeros_like(parameter)) for name, parameter in theirs.items()}
    for step in range(5):
        give_gradients(theirs, step)
        for name, parameter in theirs.items():
            gradient, (mean, square) = parameter.grad, moments[name]
            mean.mul_(first).add_((1 - first) * gradient)
            square.mul_(second).add_((1 - second) * gradient**2)
            update = mean / (1 - first ** (step + 1)) / ((square / (1 - second ** (step + 1))).sqrt() + CONFIG.eps)
            decay = 0.1 if name in ("layers.0.mlp.weight", "lm_head.weight") else 0.0
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


def test_clipping_scales_by_the_global_norm() -> None:
    named = {"a": nn.Parameter(torch.zeros(1)), "b": nn.Parameter(torch.zeros(1))}
    optimizer = Optimizer(named.items(), OptimizerConfig(max_grad_norm=1.0))
    (3 * named["a"] + 4 * named["b"]).sum().backward()
    assert optimizer.clip_gradients().item() == pytest.approx(5.0)
    assert [slot.gradient.item() for slot in optimizer.slots] == pytest.approx([0.6, 0.8])


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


@pytest.mark.parametrize("master", ["float32", "stochastic_rounding"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_restores_every_bit(master: str, dtype: torch.dtype) -> None:
    config = CONFIG.model_copy(update={"master": master})
    straight, stopped = parameters(dtype), parameters(dtype)
    run(straight, config, range(6))
    state = {name: tensor.clone() for name, tensor in run(stopped, config, range(3)).state_tensors().items()}
    resumed = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in stopped.items()}
    optimizer = run(resumed, config, range(3, 6), state)
    assert optimizer.step_count == 6
    for name in straight:
        assert torch.equal(straight[name], resumed[name]), name


def test_weights_change_in_place_and_autograd_can_tell() -> None:
    named = parameters(torch.bfloat16)
    before = {name: (parameter.data_ptr(), parameter._version) for name, parameter in named.items()}
    run(named, CONFIG, range(1))
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
    assert not torch.equal(optimizer.slots[0].exp_avg, torch.ones(6, 4))


def test_non_finite_gradients_are_named() -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), CONFIG)
    (named["norm.weight"].sum() * torch.nan).backward()
    assert optimizer.non_finite_gradients() == ["norm.weight"]
