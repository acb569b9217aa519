"""A model of transformers' modules trains by GRPO in emulated FP8, resumes to the same bytes, and is exported."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from octetrl.run.export import export_run
from octetrl.run.loop import train
from octetrl.run.tiny_model import save_tokenizer
from tests.e2e import tiny_run
from tests.transformers_families import config_of

pytestmark = pytest.mark.usefixtures("rewards_here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformers") / "olmo3"
    folder.mkdir()
    tokenizer = save_tokenizer(["State the final answer to: 1 + 2 - 3 ="], folder, vocab_size=tiny_run.VOCAB_SIZE)
    content = config_of("olmo3", vocab_size=tiny_run.VOCAB_SIZE, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    config = CONFIG_MAPPING["olmo3"].from_dict(content)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def digests(folder: Path) -> dict[str, str]:
    weights = sorted((folder / "checkpoints/step_000003").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}


def test_a_run_resumes_to_the_same_bytes_and_its_export_loads_in_transformers(model: Path, tmp_path: Path) -> None:
    changes = {"checkpoint.every": 1, "trainer.activation_checkpointing": "layer"}
    train(tiny_run.tiny_recipe(model, tmp_path / "whole", changes), resume=False)
    lines = (tmp_path / "whole/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    assert len(steps) == 3 and all(step["mismatch/max_abs_diff"] == 0.0 for step in steps)

    train(tiny_run.tiny_recipe(model, tmp_path / "cut", changes | {"steps": 2}), resume=False)
    train(tiny_run.tiny_recipe(model, tmp_path / "cut", changes), resume=True)
    assert digests(tmp_path / "cut") == digests(tmp_path / "whole")

    export_run(str(tmp_path / "whole"), str(tmp_path / "exported"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    before = load_file(model / "model.safetensors")
    after = again.state_dict()
    assert after.keys() == before.keys() and after["lm_head.weight"].dtype == torch.bfloat16
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items()), "something was learnt"
