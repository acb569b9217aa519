"""Which device is taken, and generators that go on where they were saved."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

import numpy
import pytest
import torch

from octetrl.config.schema import ClusterConfig
from octetrl.run.device import random_state, resolve_device, restore_random_state, seed_everything
from octetrl.system.errors import UserError


@pytest.fixture
def same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draws() -> tuple[list[float], list[float], list[float]]:
    """Some of each kind; the odd number of normals leaves one in Python's and one in numpy's cache."""
    return (
        [random.random(), random.gauss(), *random.sample(range(100), 3)],
        [float(numpy.random.rand()), *numpy.random.randn(3).tolist()],
        [*torch.rand(2).tolist(), *torch.randn(3).tolist()],
    )


def test_generators_go_on_where_they_were_saved() -> None:
    seed_everything(3)
    draws()
    saved = json.dumps(random_state())
    expected = draws(), draws()
    seed_everything(4)
    restore_random_state(json.loads(saved))
    assert (draws(), draws()) == expected


@pytest.mark.parametrize("seed", [0, 5, 2**32 - 1, 2**32, 2**63 - 1])
def test_every_seed_that_a_recipe_may_have_repeats_all_of_them(seed: int) -> None:
    seed_everything(seed)
    first = draws()
    seed_everything(seed)
    assert draws() == first
    seed_everything(seed)
    assert seed >= 2**32 or numpy.random.rand() == numpy.random.RandomState(seed).rand(), "small ones are numpy's own"
    seed_everything(seed + 1)
    assert all(now != before for now, before in zip(draws(), first, strict=True))


def test_cpu_is_taken_when_asked_for(same_threads: None) -> None:
    assert resolve_device(ClusterConfig(device="cpu", cpu_threads=1)) == torch.device("cpu")
    assert torch.get_num_threads() == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu() -> None:
    assert resolve_device(ClusterConfig()) == torch.device("cpu")
    with pytest.raises(UserError, match=r"'cuda' was requested, .* .cluster.device=cpu in a recipe"):
        resolve_device(ClusterConfig(device="cuda"))
