"""The objective of your own that docs/algorithms.md shows is the example's file, and it has the loss that it says."""

from __future__ import annotations

import torch

from octetrl.algorithms import table
from octetrl.algorithms.token_loss import LossInputs
from octetrl.config import algorithm
from tests.house.markdown import code_blocks
from tests.house.tree import REPO

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
