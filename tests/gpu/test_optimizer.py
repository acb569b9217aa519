"""The optimizer on a GPU: the kernel against the reference, states in the host's memory, and repetition."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from octetrl.config.schema import OptimizerConfig
from octetrl.kernels.optimizer.adamw import decode_moment, decode_square
from octetrl.trainer import optimizer_states as optimizer_offload
from octetrl.trainer.optimizer import Optimizer

pytestmark = pytest.mark.gpu

STATES = ("float32", "bfloat16", "8bit")
MASTERS = ("float32", "stochastic_rounding")
SHAPES = {"embedding.weight": (300, 96), "layers.0.mlp.weight": (1000, 257), "norm.weight": (96,)}


def run(device: str, steps: range = range(6), resumed: Optimizer | None = None, **choices: object) -> Optimizer:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, max_grad_norm=100.0, **choices)
    generator = torch.Generator().manual_seed(0)
    named = {
        name: nn.Parameter(torch.randn(shape, generator=generator).bfloat16().to(device))
        for name, shape in SHAPES.items()
    }
    optimizer = Optimizer(named.items(), config, seed=1)
    if resumed is not None:
        optimizer.load_state_tensors(resumed.state_tensors())
        for slot in resumed.slots:
            named[slot.name].data.copy_(slot.parameter.detach())
    for step in steps:
        optimizer.zero_grad()
        for number, slot in enumerate(optimizer.slots):
            generator.manual_seed(100 * step + number)
            size = 10 ** torch.randn(slot.gradient.shape, generator=generator)
            slot.gradient.copy_(torch.randn(slot.gradient.shape, generator=generator) * size)
        optimizer.clip_gradients()
        optimizer.step(config.lr)
    return optimizer


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", MASTERS)
def test_the_gpu_follows_the_cpu(states: str, master: str) -> None:
    ours, theirs = run("cuda", states=states, master=master), run("cpu", states=states, master=master)
    for our, their in zip(ours.slots, theirs.slots, strict=True):
        steps = (our.parameter.detach().cpu().float() - their.parameter.detach().float()).abs()
        assert (steps > 2**-7 * their.parameter.detach().float().abs() + 1e-4).float().mean() < 1e-3
        for decode, kind in ((decode_moment, "exp_avg"), (decode_square, "exp_avg_sq")):
            got, expected = decode(getattr(our, kind)).cpu(), decode(getattr(their, kind))
            assert (got - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("master", MASTERS)
def test_offloaded_states_give_the_same_bits(states: str, master: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_offload, "PIECE_ELEMENTS", 1 << 14)  # many pieces, the last one ragged
    there, here = (run("cuda", states=states, master=master, offload=offload) for offload in (True, False))
    assert not there.slots[0].exp_avg.values.is_cuda and here.slots[0].exp_avg.values.is_cuda
    for one, other in zip(there.slots, here.slots, strict=True):
        assert torch.equal(one.parameter, other.parameter)
    state = here.state_tensors()
    for name, tensor in there.state_tensors().items():
        assert torch.equal(tensor, state[name].cpu()), name


@pytest.mark.parametrize("offload", [False, True])
def test_a_run_repeats_and_resumes_to_the_bit(offload: bool) -> None:
    choices = {"states": "8bit", "master": "stochastic_rounding", "offload": offload}
    straight, again = run("cuda", **choices), run("cuda", **choices)
    for one, other in zip(straight.slots, again.slots, strict=True):
        assert torch.equal(one.parameter, other.parameter)
    resumed = run("cuda", range(3, 6), run("cuda", range(3), **choices), **choices)
    for one, other in zip(straight.slots, resumed.slots, strict=True):
        assert torch.equal(one.parameter, other.parameter), one.name
