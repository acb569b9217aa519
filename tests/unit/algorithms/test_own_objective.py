"""`algorithm.name: module:loss`: what is checked, and that shipped objectives written again have the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.algorithms import table
from octetrl.algorithms.own_objective import build_fields, load_objective, try_loss
from octetrl.algorithms.table import build_algorithm
from octetrl.algorithms.token_loss import LossInputs
from octetrl.config import algorithm
from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.system.errors import UserError
from tests.house.markdown import code_blocks
from tests.house.tree import REPO
from tests.objectives import objective
from tests.unit.algorithms import own_losses

HERE = "tests.unit.algorithms.own_losses"


def own(name: str, **fields: Any) -> OwnObjectiveConfig:
    return OwnObjectiveConfig(name=f"{HERE}:{name}", **fields)


def made_inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(5)
    N = 64
    logprobs_N = (-torch.rand(N, generator=generator) * 3).requires_grad_()
    older_N = logprobs_N.detach() + torch.randn(N, generator=generator)
    return LossInputs(
        logprobs_N,
        torch.ones(N),
        torch.randn(N, generator=generator),
        torch.arange(N) // 8,
        8,
        generator_logprobs_N=older_N,
        reference_logprobs_N=older_N - 0.1,
    )


@pytest.mark.parametrize(
    ("mine", "shipped"),
    [
        (own("dual_clip", floor=3), objective("dual_clip")),
        (own("dual_clip", floor=1.5, kl_coefficient=0.1), objective("dual_clip", dual_clip=1.5, kl_coefficient=0.1)),
        (own("rloo", token_weighting="constant"), objective("rloo")),
    ],
    ids=["dual_clip", "dual_clip with KL", "rloo"],
)
def test_a_shipped_objective_written_again_has_its_bits(mine: OwnObjectiveConfig, shipped: Any) -> None:
    of_mine, of_shipped, inputs = build_algorithm(mine), build_algorithm(shipped), made_inputs()
    losses = [one.loss(inputs) for one in (of_mine, of_shipped)]
    gradients = [torch.autograd.grad(one.loss_N.sum(), inputs.logprobs_N)[0] for one in losses]
    assert torch.equal(losses[0].loss_N, losses[1].loss_N) and torch.equal(*gradients)
    assert losses[0].metrics.keys() == losses[1].metrics.keys()
    for name, values in losses[0].metrics.items():
        assert torch.equal(values, losses[1].metrics[name])
    groups = [[0.0, 1.0, 1.0, 0.5], [2.0, -1.0]]
    assert of_mine.advantages(groups) == of_shipped.advantages(groups)
    for name in ("token_weighting", "needs_reference", "needs_proximal", "reference_every"):
        assert getattr(of_mine, name) == getattr(of_shipped, name)


def test_a_smaller_floor_changes_the_loss() -> None:
    inputs = made_inputs()
    near, far = (build_algorithm(own("dual_clip", floor=floor)).loss(inputs).loss_N for floor in (1.0, 3.0))
    assert not torch.equal(near, far)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({}, "algorithm.floor: missing; Floor needs it"),
        ({"floor": "x"}, "algorithm.floor: 'x' is not a number"),
        ({"floor": 0.5}, 'algorithm: Floor: {"floor": 0.5} is not valid: floor must be at least 1'),
        ({"floor": 2, "mode": "sofd"}, "algorithm.mode: 'sofd' is not allowed; choose one of hard, soft; did you mean"),
        ({"floor": 2, "layers": [1, "a"]}, "algorithm.layers.1: 'a' is not a whole number"),
        ({"floor": 2, "florr": 1}, "algorithm.florr: unknown key; did you mean 'floor'?"),
        ({"floor": 2, "clip_lo": 1}, "algorithm.clip_lo: unknown key; did you mean 'clip_low'?"),
    ],
)
def test_its_fields_are_checked_by_name_and_type(fields: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as error:
        build_fields(own("dual_clip", **fields), own_losses.Floor)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_values_of_json_become_the_annotated_types() -> None:
    made = build_fields(own("dual_clip", floor=2, layers=[1, 2], dual_clip=None), own_losses.Floor)
    assert made == own_losses.Floor(2.0, layers=(1, 2)) and isinstance(made.floor, float)


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("no_gradient", "has no gradient in inputs.logprobs_N"),
        ("a_mean", "returns a loss_N of torch.float32 [] for torch.float32 [5]"),
        ("a_tensor", "returns a Tensor; return TokenLoss(loss_N, metrics)"),
        ("not_finite", "returns a loss that is not finite"),
        ("live_metric", "a metric 'mine' that is no detached tensor"),
        ("raises", "fails on five tokens (KeyError: 'no such thing')"),
        ("two", "takes 2 arguments, but is called with 3"),
        ("bare", "has no annotation; annotate it with a dataclass"),
        ("waits", "is async"),
        ("clashes", "algorithm.clip_low: it is a field of Clashes and a shared field too"),
        ("of_tensors", "the fields of Tensors can't be checked"),
        ("too_few", "are 1 for 2 rewards; return one for each"),
        ("not_callable", "is no function"),
        ("absent", "can't be imported"),
    ],
)
def test_what_is_wrong_is_one_line(name: str, line: str) -> None:
    config = own(name)
    with pytest.raises(UserError) as error:
        try_loss(load_objective(config), config)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_the_trial_passes_with_every_shared_term() -> None:
    config = own("rloo", kl_coefficient=0.1, corrections=("tis", "veto", "self_normalize"), masked_tokens="left_out")
    try_loss(load_objective(config), config)


def test_a_recipe_keeps_its_fields_when_it_is_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("extends: demo_grpo\nalgorithm: {name: 'my_losses:floor', floor: 2.5, layers: [1, 2]}\n")
    recipe = load_recipe(path, ["algorithm.clip_high=0.3", "algorithm.mode=soft"])
    assert isinstance(recipe.algorithm, OwnObjectiveConfig) and recipe.algorithm.clip_high == 0.3
    assert dict(recipe.algorithm.own_fields) == {"floor": 2.5, "layers": [1, 2], "mode": "soft"}
    again = tmp_path / "config.yaml"
    again.write_text(dump_recipe(recipe))
    assert load_recipe(again) == recipe
    with pytest.raises(UserError, match=r"algorithm.name: 'my losses:x' is not module:name"):
        load_recipe(path, ["algorithm.name='my losses:x'"])


# ---------------------------------------------------------------- the worked example


DOCUMENT = (REPO / "docs/algorithms.md").read_text(encoding="utf-8")


def test_the_example_is_the_file_and_keeps_a_share_of_the_gradient_outside_the_clip() -> None:
    (own,) = [block for block in code_blocks(DOCUMENT) if block.language == "python"]
    assert own.text in (REPO / "examples/leaky_objective.py").read_text(encoding="utf-8")
    config = algorithm.OwnObjectiveConfig(name="examples.leaky_objective:leaky", ratio_base="generator", leak=0.1)
    logprobs_N = torch.log(torch.tensor([1.0, 1.1, 2.0])).requires_grad_()
    zeros_N = torch.zeros(3)
    inputs = LossInputs(logprobs_N, zeros_N, torch.ones(3), zeros_N.long(), 1, generator_logprobs_N=zeros_N)
    loss_N = table.build_algorithm(config).loss(inputs).loss_N
    torch.testing.assert_close(loss_N, -torch.tensor([1.0, 1.1, 1.2 + 0.08]))
    gradient_N = torch.autograd.grad(loss_N.sum(), logprobs_N)[0]
    torch.testing.assert_close(gradient_N, -torch.tensor([1.0, 1.1, 0.2]))


def test_the_table_holds_every_objective() -> None:
    rows = [line for line in DOCUMENT.split("## Fields")[0].splitlines() if line.startswith("| `")]
    for name in table._BUILDERS:
        assert any(row.startswith(f"| `{name}`") for row in rows), f"{name} is not in docs/algorithms.md"
