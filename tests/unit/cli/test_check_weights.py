"""`octetrl check` says in one line what the loader would refuse in a model's weight files, from their headers alone."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from octetrl.cli.check_files import file_problems
from octetrl.config.load import load_recipe
from octetrl.config.schema import Recipe
from octetrl.models.families import load_spec
from octetrl.models.weight_files import SCORE, SINGLE, pieces
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config

RECIPE = """
model: {path: model}
environment: {kind: jsonl, dataset: tasks.jsonl}
cluster: {device: cpu}
"""
NORM, UP = "model.norm.weight", "model.layers.3.mlp.up_proj.weight"

Headers = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name


def headers(folder: Path, *, scalar: bool = False) -> Headers:
    return {piece.name: ("BF16", piece.shape) for piece in pieces(load_spec(folder, scalar=scalar), scalar=scalar)}


def write(file: Path, tensors: Headers) -> None:
    """A safetensors file of these headers, its tensors a hole: nobody may read them."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * 2
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    content = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(content)) + content)
        stream.truncate(stream.tell() + end)


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model folder beside a recipe, in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text(RECIPE)
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    folder = tmp_path / "model"
    save_tokenizer(["a b"], folder)
    (folder / "config.json").write_text(json.dumps(preset_config("tiny") | {"max_position_embeddings": 4096}))
    write(folder / SINGLE, headers(folder))
    return folder


def recipe(*overrides: str) -> Recipe:
    return load_recipe("r.yaml", list(overrides))


def the_problem(*overrides: str) -> str:
    (problem,) = file_problems(recipe(*overrides), load_spec("model"))
    assert "\n" not in problem
    return problem


def test_a_tensor_that_is_missing_is_named(model: Path) -> None:
    assert not list(file_problems(recipe(), load_spec("model")))
    tensors = headers(model)
    del tensors[NORM]
    write(model / SINGLE, tensors)
    assert f"1 missing: {NORM}" in the_problem()
    assert not list(file_problems(recipe("model.init=random"), load_spec("model")))
    (model / SINGLE).write_bytes((model / SINGLE).read_bytes()[:1000])
    assert f"{SINGLE} can't be read as safetensors" in the_problem()
    (model / SINGLE).unlink()
    assert "has neither model.safetensors nor" in the_problem()


def test_every_model_of_the_run_is_looked_at(model: Path) -> None:
    def folder(name: str, architecture: str, tensors: Headers) -> None:
        (model.parent / name).mkdir()
        config = json.loads((model / "config.json").read_text()) | {"architectures": [architecture]}
        (model.parent / name / "config.json").write_text(json.dumps(config))
        write(model.parent / name / SINGLE, tensors)

    causal, scalar = headers(model), headers(model, scalar=True)
    del causal[UP]
    folder("causal", "Qwen3ForCausalLM", causal)
    folder("headless", "Qwen3ForSequenceClassification", {name: scalar[name] for name in scalar if name != SCORE})
    ppo = "algorithm.name=ppo"
    assert not list(file_problems(recipe(ppo, "critic.path=headless"), load_spec("model")))  # its head begins at zero
    assert the_problem(ppo, "critic.path=causal").startswith("critic.path: 'causal' does not hold")
    judged = the_problem("environment.reward_model=headless")
    assert judged.startswith("environment.reward_model: 'headless'") and f"1 missing: {SCORE}" in judged
    taught = the_problem("algorithm.name=distill", "algorithm.teacher=causal")
    assert taught.startswith("algorithm.teacher: 'causal'") and f"1 missing: {UP}" in taught
