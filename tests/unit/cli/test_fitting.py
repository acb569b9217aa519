"""A recipe that does not fit is a problem with exit code 1, and the changes that `check` names make it fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from octetrl.cli.check_machine import Device
from octetrl.cli.check_memory import MemoryPlan
from octetrl.cli.fitting import Change, fits
from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.config.memory import MemoryEstimate
from octetrl.fp8.policy import precision_policy
from octetrl.models.families import spec_from_config
from octetrl.shapes.presets import preset_config

RECIPE = """
precision: fp8_full
model: {preset: PRESET, init: random, tokenizer: none}
environment: {kind: jsonl, dataset: tasks.jsonl}
"""


def plan(path: Path, preset: str, gib: float, *overrides: str) -> MemoryPlan:
    path.write_text(RECIPE.replace("PRESET", preset))
    resolved, spec = load_recipe(path, overrides), spec_from_config(preset_config(preset))
    device = Device("a GPU", True, int(gib * 2**30), is_here=False)
    return MemoryPlan.of(resolved, spec, precision_policy(spec, resolved.fp8), device)


def problem(path: Path, preset: str, gib: float, *overrides: str) -> str | None:
    return plan(path, preset, gib, *overrides).problem(lambda changes: True)


def parts(estimate: MemoryEstimate) -> dict[str, int]:
    return {part.name: part.num_bytes for part in estimate.parts}


def ways(text: str) -> list[list[str]]:
    """The sets of overrides that a problem names."""
    return [way.split() for way in text.partition("it fits with ")[2].split("; or with ")]


@pytest.mark.parametrize(("preset", "gib"), [("qwen3-8b", 140), ("qwen3-8b", 80), ("qwen3-0.6b", 8), ("tiny", 0.75)])
def test_each_set_of_changes_makes_it_fit_and_needs_all_of_them(recipe: Path, preset: str, gib: float) -> None:
    given = ("trainer.tokens_per_micro_batch=65536", "engine.kv_cache_tokens=200000")
    text = problem(recipe, preset, gib, *given)
    assert text is not None and re.match(r"memory: it needs [\d.]+ [GM]iB of ", text), text
    for changes in ways(text):
        assert problem(recipe, preset, gib, *given, *changes) is None
        for left_out in changes:
            assert problem(recipe, preset, gib, *given, *(one for one in changes if one != left_out)) is not None


def test_a_number_is_lowered_no_further_than_necessary(recipe: Path) -> None:
    text = problem(recipe, "qwen3-0.6b", 24, "trainer.tokens_per_micro_batch=131072")
    assert text is not None
    (number,) = [int(tokens) for tokens in re.findall(r"tokens_per_micro_batch=(\d+)", text)]
    assert 2048 < number < 131072 and 131072 % number == 0
    base = plan(recipe, "qwen3-0.6b", 24)
    twice = Change("trainer.tokens_per_micro_batch", 2 * number).apply(base.recipe)
    assert not fits(twice, base.estimate(twice), 24 * 2**30, spare=0.9)


def test_what_no_change_helps_says_so(recipe: Path) -> None:
    """Its codes alone need more, so adapters do not help either."""
    text = problem(recipe, "qwen3-30b-a3b", 24)
    assert text is not None and text.endswith("fit; use a smaller model, or a device with more memory")


def test_several_workers_share_the_optimizer(recipe: Path) -> None:
    """8 billion parameters in one process need 16 GiB of weights, 32 of gradients and 96 of optimizer states."""
    assert problem(recipe, "qwen3-8b", 141) is not None
    assert problem(recipe, "qwen3-8b", 141, "cluster.gpus=2") is None


def test_as_many_gpus_are_proposed_as_are_needed(recipe: Path) -> None:
    text = problem(recipe, "qwen3-8b", 80)
    assert text is not None
    (number,) = [int(gpus) for gpus in re.findall(r"cluster\.gpus=(\d+)", text)]
    assert problem(recipe, "qwen3-8b", 80, f"cluster.gpus={number}") is None
    base = plan(recipe, "qwen3-8b", 80)
    half = Change("cluster.gpus", number // 2).apply(base.recipe)
    assert not fits(half, base.estimate(half), 80 * 2**30, spare=0.9)


def test_a_cache_without_room_for_one_rollout_is_a_problem(recipe: Path) -> None:
    tight = (
        0.001 + plan(recipe, "tiny", 1, "engine.kv_cache_tokens=4096").estimate(load_recipe(recipe)).total_bytes / 2**30
    )
    long = ("model.context_length=1000000", "rollout.max_new_tokens=900000")
    text = problem(recipe, "tiny", tight, *long)
    assert text is not None and "tokens of the KV cache, less than one rollout" in text


def test_the_command_ends_with_1_and_the_changed_recipe_with_0(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from octetrl.run.tiny_model import save_tokenizer

    save_tokenizer(["a b"], tmp_path / "model")
    (tmp_path / "model/config.json").write_text(json.dumps(preset_config("tiny") | {"max_position_embeddings": 4096}))
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "b"}\n')
    recipe.write_text(
        "precision: fp8_full\nmodel: {path: model, init: random}\n"
        "environment: {kind: jsonl, dataset: tasks.jsonl, eval_size: 1}\n"
    )
    arguments = ["check", "r.yaml", "--memory-gib", "1", "trainer.tokens_per_micro_batch=200000"]
    assert run_command(arguments) == 1
    shown = capsys.readouterr()
    assert "no problems" not in shown.out and shown.err.count("\n") == 1
    assert run_command([*arguments, *ways(shown.err.strip())[0]]) == 0
    assert run_command([*arguments, "environment.dataset=gone.jsonl"]) == 2
    assert "r.yaml: 2 problems" in capsys.readouterr().err
