"""A model and a recipe so small that a whole step takes a few hundredths of a second on a CPU.

The model is random: its "answers" are noise, and `tiny_rewards.by_text` gives noise rewards to tell them apart. What
these runs show is not learning (that is the demo's business) but that every part of a run does what it promises.

The tasks are those of reasoning_gym's chain_sum, in a file: a process that imports reasoning_gym costs more than a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.load import recipe_from_mapping
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import precision_policy
from octetrl.models.decoder import Decoder
from octetrl.models.families import spec_from_config
from octetrl.models.hf_weights import save_weights
from octetrl.run.loop import train
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config

VOCAB_SIZE = 320
SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
}
RECIPE: dict[str, Any] = {
    "precision": "fp8_full",
    "model": {"context_length": 128},
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 100, "max_new_tokens": 12},
    "engine": {"page_size": 16},
    "trainer": {
        "tokens_per_micro_batch": 512,
        "activation_checkpointing": "none",  # for others, torch imports its compiler; tests/parity compares their bits
        "optimizer": {"lr": 1.0e-3},
    },
    "environment": {
        "kind": "jsonl",
        "dataset": str(Path(__file__).with_name("sums.jsonl")),
        "reward": "tests.e2e.tiny_rewards:by_text",
        "eval_size": 4,
    },
    "checkpoint": {"every": 0},
    "failures": {"max_empty_steps": 0},  # noise may be worth the same for several steps in a row
    "cluster": {"device": "cpu", "cpu_threads": 1},
    "logging": {"console": "quiet", "tensorboard": False},
    "seed": 3,
    "steps": 3,
}


def make_model(folder: Path, **changes: object) -> Path:
    """A random model of `SHAPE` and a tokenizer of its own, in Hugging Face form; `changes` are of its config.json."""
    folder.mkdir(parents=True)
    tokenizer = save_tokenizer(["State the final answer to: 1 + 2 - 3 ="], folder, vocab_size=VOCAB_SIZE)
    config = preset_config("tiny") | SHAPE | {"eos_token_id": tokenizer.eos_token_id} | changes
    spec = spec_from_config(config)
    model = Decoder(spec, precision_policy(spec, Fp8Config()), "train", dtype=torch.bfloat16, device="cpu")
    model.random_init(7)
    save_weights(model, folder)
    return folder


def recipe_tree(model: Path, output: Path, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`RECIPE` for this model and run folder; `changes` by dotted name: {"trainer.epochs": 2}."""
    tree = deepcopy(RECIPE)
    for name, value in {"model.path": str(model), "output_dir": str(output), **(changes or {})}.items():
        *sections, key = name.split(".")
        place = tree
        for section in sections:
            place = place.setdefault(section, {})
        place[key] = value
    return tree


def tiny_recipe(model: Path, output: Path, changes: Mapping[str, Any] | None = None) -> Recipe:
    return recipe_from_mapping(recipe_tree(model, output, changes))


def run(model: Path, output: Path, changes: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Train by the tiny recipe; the lines of its metrics.jsonl."""
    train(tiny_recipe(model, output, changes))
    return read_lines(output / "metrics.jsonl")


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def timeless(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines without what the clock says: all that is left must repeat to the bit."""
    of_clock = ("time/", "checkpoint/", "per_second")
    return [{name: line[name] for name in line if not any(part in name for part in of_clock)} for line in lines]
