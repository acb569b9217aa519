"""`octetrl doctor`: what it prints, its exit code, and each wrong input: one line, exit code 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from octetrl.cli.main import run_command
from tests.e2e import tiny_run

SMALL = ("--prompts", "2", "--sequences", "1", "--answer-tokens", "5")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("doctor")
    tree = tiny_run.recipe_tree(tiny_run.make_model(folder / "model"), folder / "run")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(tree))
    return str(folder / "recipe.yaml")


def test_equal_is_said_in_one_line_and_nothing_is_written(recipe: str, capsys: Capture) -> None:
    capsys.readouterr()
    before = sorted(Path(recipe).parent.rglob("*"))
    assert run_command(["doctor", recipe, *SMALL, "--attribute"]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert captured.err == ""
    assert lines[0].endswith("fp8_full, on cpu: 2 prompts x 1 answers of 5 tokens")
    assert lines[-2].startswith("equal: every bit of ") and lines[-2].endswith(" of 10 sampled tokens")
    assert " tokens x 1 layers" in lines[-2]
    assert lines[-1] == "nothing to attribute: every log-prob is equal"
    assert all(line.endswith(" equal") for line in lines if line.startswith("  "))
    assert {"forwards, against the trainer's packed one", "log-probs, against those of the engine"} <= set(lines)
    assert sorted(Path(recipe).parent.rglob("*")) == before


def test_codes_that_are_made_anew_in_training_are_equal_too(recipe: str, capsys: Capture) -> None:
    assert run_command(["doctor", recipe, "trainer.weight_codes=remade", *SMALL]) == 0
    assert "equal: every bit of " in capsys.readouterr().out


def test_a_difference_is_named_and_attributed(recipe: str, capsys: Capture) -> None:
    capsys.readouterr()
    assert run_command(["doctor", recipe, "precision=fp8_rollout", *SMALL, "--attribute"]) == 1
    text = capsys.readouterr().out
    assert "\nfirst difference: layer 0, qkv_proj: " in text
    assert "position 0" in text and "trainer, packed" in text
    assert "engine, decode" in text and "differs from layer 0, qkv_proj on" in text
    assert "\n  weights " in text and "\n  activations " in text and "\n  the rest " in text


def test_a_preset_with_random_weights(recipe: str, tmp_path: Path, capsys: Capture) -> None:
    model = {"preset": "tiny", "init": "random", "tokenizer": str(Path(recipe).parent / "model"), "context_length": 128}
    tree = tiny_run.recipe_tree(Path("unused"), tmp_path / "run") | {"model": model}
    (tmp_path / "preset.yaml").write_text(yaml.safe_dump(tree))
    assert run_command(["doctor", str(tmp_path / "preset.yaml"), "fp8.kv_cache=dynamic", *SMALL]) == 0
    assert "tokens x 4 layers" in capsys.readouterr().out
