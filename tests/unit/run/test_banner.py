"""How a run's first line names its model."""

from __future__ import annotations

import pytest

from octetrl.run.report import model_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("tiny", "tiny"),
        ("models/Qwen3-0.6B", "models/Qwen3-0.6B"),
        ("/models/Qwen3-0.6B", "models/Qwen3-0.6B"),
        ("runs/demo/sft/export", "sft/export"),
        ("runs/first/checkpoints/step_000030", "runs/first@30"),
        ("/scratch/runs/first/checkpoints/step_000030", "runs/first@30"),
        ("/c/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca", "Qwen/Qwen3-0.6B"),
        ("runs/first/checkpoints/step_best", "checkpoints/step_best"),
    ],
)
def test_a_model_is_named_by_what_a_person_knows(model: str, name: str) -> None:
    assert model_name(model) == name
