"""A mixture made from a dense model trains by GRPO in emulated FP8, and its routers' settings do what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.upcycle import upcycle
from octetrl.run.loop import train
from octetrl.system.errors import UserError
from tests.e2e import tiny_run

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("moe")
    dense = tiny_run.make_model(folder / "dense")
    upcycle(dense, folder / "mixture")
    return dense, folder / "mixture"


def steps_of(model: Path, folder: Path, **changes: Any) -> list[dict[str, float]]:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    train(tiny_run.tiny_recipe(model, folder, {"steps": 2, **changes}), resume=False)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_says_its_loads_and_that_log_probs_are_equal(models: tuple[Path, Path], tmp_path: Path) -> None:
    for step in steps_of(models[1], tmp_path / "run", checkpoint__every=1):
        assert step["mismatch/max_abs_diff"] == 0.0 and step["mismatch/unequal_tokens"] == 0.0
        assert step["router/load_max_over_mean"] > 1.0
        assert 0.0 < step["router/entropy"] <= torch.log(torch.tensor(8.0)).item()


def test_router_losses_change_the_router_and_not_the_first_steps_loss(
    models: tuple[Path, Path], tmp_path: Path
) -> None:
    (plain,) = steps_of(models[1], tmp_path / "plain", steps=1, precision="bf16")
    losses = {"trainer__router__balance_loss": 1.0, "trainer__router__z_loss": 0.1}
    (balanced,) = steps_of(models[1], tmp_path / "both", steps=1, precision="bf16", **losses)
    assert balanced["loss"] == plain["loss"]
    assert balanced["grad_norm"] != plain["grad_norm"]


@pytest.mark.parametrize(
    ("which", "changes", "words"),
    [
        (0, {"trainer__router__z_loss": 0.1}, r"trainer\.router\.z_loss: this model has no experts"),
        (1, {"trainer__router__bias_rate": 0.1}, "the routers of qwen3_moe have no correction bias"),
    ],
)
def test_settings_that_this_model_cannot_follow_are_refused(
    which: int, changes: dict[str, Any], words: str, models: tuple[Path, Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        steps_of(models[which], tmp_path / "run", **changes)


def test_upcycling_refuses_what_it_would_spoil(models: tuple[Path, Path], tmp_path: Path) -> None:
    dense, mixture = models
    with pytest.raises(UserError, match="family qwen3_moe; give a dense Qwen3"):
        upcycle(mixture, tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    for taken in (dense, mixture):
        before = {path.name: path.read_bytes() for path in taken.iterdir()}
        with pytest.raises(UserError, match="is not empty; give a new folder"):
            upcycle(dense, taken)
        assert {path.name: path.read_bytes() for path in taken.iterdir()} == before
