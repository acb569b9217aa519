"""A model with linear attention trains by GRPO in emulated FP8, and its folder is that of a model that reads images."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.run.export import export_run
from octetrl.run.loop import train
from tests.e2e import tiny_run

pytestmark = pytest.mark.usefixtures("rewards_here")

DELTA: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
OTHERS = {"model.visual.blocks.0.attn.qkv.weight": torch.randn(6, 4), "mtp.fc.weight": torch.randn(4, 8).bfloat16()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3.5 as the hub has it: as a part of a model that reads images."""
    folder = tiny_run.make_model(tmp_path_factory.mktemp("delta") / "model", **DELTA)
    text = json.loads((folder / "config.json").read_text())
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "vision_config": {"depth": 1},
    }
    text |= {"attn_output_gate": True, "architectures": None}
    (folder / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": True, "text_config": text}))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): one for name, one in tensors.items()}
    save_file(tensors | OTHERS, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def digests(folder: Path) -> dict[str, str]:
    weights = sorted((folder / "checkpoints/step_000003").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: one for file in folder.glob("*.safetensors") for name, one in load_file(file).items()}


def test_a_run_resumes_to_the_same_bytes_and_its_export_has_the_other_parts_as_they_were(
    model: Path, tmp_path: Path
) -> None:
    changes = {"checkpoint.every": 1}
    train(tiny_run.tiny_recipe(model, tmp_path / "whole", changes), resume=False)
    steps = [json.loads(line) for line in (tmp_path / "whole/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 3 and all(step["mismatch/max_abs_diff"] == 0.0 for step in steps)

    train(tiny_run.tiny_recipe(model, tmp_path / "cut", changes | {"steps": 2}), resume=False)
    train(tiny_run.tiny_recipe(model, tmp_path / "cut", changes), resume=True)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")

    export_run(str(tmp_path / "whole"), str(tmp_path / "exported"))
    before, after = tensors_of(model), tensors_of(tmp_path / "exported")
    assert after.keys() == before.keys() and {name: after[name].dtype for name in OTHERS} == {
        name: one.dtype for name, one in OTHERS.items()
    }
    assert all(torch.equal(after[name], tensor) for name, tensor in OTHERS.items())
    learnt = {name.rpartition("layers.0.")[2] for name in before if not torch.equal(after[name], before[name])}
    assert {"linear_attn.A_log", "linear_attn.dt_bias", "linear_attn.conv1d.weight"} <= learnt
    config, given = (json.loads((one / "config.json").read_text()) for one in (tmp_path / "exported", model))
    assert config["vision_config"] == given["vision_config"] and config["text_config"]["attn_output_gate"]
    assert config["architectures"] == given["architectures"]
