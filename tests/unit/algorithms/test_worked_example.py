"""The objective that docs/algorithms.md adds, added as it says there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octetrl.algorithms import table
from octetrl.algorithms.token_loss import LossInputs
from octetrl.config import algorithm
from octetrl.config.algorithm import GspoConfig
from tests.house.markdown import code_blocks
from tests.house.tree import REPO

DOCUMENT = (REPO / "docs/algorithms.md").read_text(encoding="utf-8")


def test_it_works_as_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    _, loss_file, section = [block for block in code_blocks(DOCUMENT) if block.language == "python"]
    module: dict[str, Any] = vars(algorithm).copy()  # the section stands in that file
    exec("from __future__ import annotations\n" + section.text, module)
    monkeypatch.setattr(algorithm, "LeakyConfig", module["LeakyConfig"], raising=False)
    exec("from __future__ import annotations\n" + loss_file.text, module)
    assert '`"leaky": _policy(leaky_loss),`' in DOCUMENT
    monkeypatch.setitem(table._BUILDERS, "leaky", table._policy(module["leaky_loss"]))
    config = module["LeakyConfig"](ratio_base="generator", leak=0.1)
    logprobs_N = torch.log(torch.tensor([1.0, 1.1, 2.0])).requires_grad_()
    zeros_N = torch.zeros(3)
    inputs = LossInputs(logprobs_N, zeros_N, torch.ones(3), zeros_N.long(), 1, generator_logprobs_N=zeros_N)
    loss = table.build_algorithm(config).loss(inputs)
    torch.testing.assert_close(loss.loss_N, -torch.tensor([1.0, 1.1, 1.2 + 0.08]))
    gradient_N = torch.autograd.grad(loss.loss_N.sum(), logprobs_N)[0]
    torch.testing.assert_close(gradient_N, -torch.tensor([1.0, 1.1, 0.2]))


def test_the_example_without_a_change_in_the_package_is_the_file_and_has_the_same_bits() -> None:
    own, loss_file, _ = [block for block in code_blocks(DOCUMENT) if block.language == "python"]
    assert own.text in (REPO / "examples/leaky_objective.py").read_text(encoding="utf-8")
    line = "        return Gain(leaky_N * inputs.advantages_N, (1.0 - fields.leak) * (clipped_N != ratio_N).float())\n"
    assert line in own.text and line.replace("fields.", "config.")[4:] in loss_file.text
    config = algorithm.OwnObjectiveConfig(name="examples.leaky_objective:leaky", ratio_base="generator", leak=0.1)
    logprobs_N = torch.log(torch.tensor([1.0, 1.1, 2.0])).requires_grad_()
    zeros_N = torch.zeros(3)
    inputs = LossInputs(logprobs_N, zeros_N, torch.ones(3), zeros_N.long(), 1, generator_logprobs_N=zeros_N)
    loss_N = table.build_algorithm(config).loss(inputs).loss_N
    torch.testing.assert_close(loss_N, -torch.tensor([1.0, 1.1, 1.2 + 0.08]))


def test_the_table_holds_every_objective() -> None:
    rows = [line for line in DOCUMENT.split("## Fields")[0].splitlines() if line.startswith("| `")]
    for name in table._BUILDERS:
        assert any(row.startswith(f"| `{name}`") for row in rows), f"{name} is not in docs/algorithms.md"


def test_own_defaults_give_way_to_the_recipe() -> None:
    assert (GspoConfig().clip_low, GspoConfig().clip_high) == (3e-4, 4e-4)
    assert (GspoConfig(clip_high=0.2).clip_low, GspoConfig(clip_high=0.2).clip_high) == (3e-4, 0.2)
