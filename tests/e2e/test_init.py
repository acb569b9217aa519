"""`octetrl init` makes a project that checks, trains and is tested as it stands."""

from __future__ import annotations

import importlib
import json
import runpy
import sys
from pathlib import Path

import pytest

from octetrl.cli.init import TOKENIZER_TEXTS
from octetrl.cli.main import run_command
from octetrl.config.json_schema import recipe_json_schema
from octetrl.data.tokenizer import load_tokenizer
from octetrl.run.tiny_model import VOCABULARY, save_tokenizer, write_tokenizer
from tests.e2e.tiny_run import read_lines


def test_a_new_project_checks_trains_and_is_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", "grpo", "my/project"]) == 0
    assert "next: cd my/project && octetrl train recipe.yaml" in capsys.readouterr().out
    assert run_command(["init", "grpo", "my/project"]) == 2
    assert "already has recipe.yaml" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert run_command(["init", "grpo", "file"]) == 2
    assert "init: cannot write 'file' (File exists); give another folder" in capsys.readouterr().err
    assert run_command(["status", "file"]) == 2
    assert "'file' is a file; give the folder of a run" in capsys.readouterr().err
    assert len((tmp_path / "my/project/README.md").read_text().splitlines()) <= 10

    monkeypatch.chdir("my/project")
    monkeypatch.syspath_prepend(str(tmp_path / "my/project"))
    runpy.run_path("test_environment.py", run_name="__main__")
    assert "2 tests passed" in capsys.readouterr().out
    assert run_command(["check", "recipe.yaml"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "reference answer reward 1 empty text reward 0" in shown and "0% too long" in shown
    small = ["steps=2", "rollout.prompts_per_step=2", "evaluation.every=2", "cluster.device=cpu"]
    assert run_command(["train", "recipe.yaml", *small]) == 0
    lines = read_lines(Path("runs/first/metrics.jsonl"))
    assert len(lines) == 2 and all(line["train/samples"] > 0 for line in lines)
    assert all(line["mismatch/max_abs_diff"] == 0.0 for line in lines)
    assert lines[0]["reward/mean"] < 0.3 and lines[1]["eval/accuracy"] == 0.0, "it has much to learn"


@pytest.mark.parametrize("objective", ["sft", "dpo", "ppo", "agent"])
def test_each_objective_checks_as_it_stands(objective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(["init", objective, "."]) == 0
    first = Path("recipe.yaml").read_text().splitlines()[0]
    assert json.loads(Path(first.partition("$schema=")[2]).read_text()) == recipe_json_schema()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    assert run_command(["check", "recipe.yaml"]) == 0
    held_out = {task.prompt for task in importlib.import_module("environment").environment.tasks}
    for file in tmp_path.glob("*.jsonl"):
        assert not held_out & {line["prompt"] for line in read_lines(file)}


def test_its_tokenizer_is_the_one_that_transformers_would_write(tmp_path: Path) -> None:
    texts = TOKENIZER_TEXTS
    write_tokenizer(texts, tmp_path / "ours")
    save_tokenizer(texts, tmp_path / "theirs")
    ours, theirs = (load_tokenizer(tmp_path / name, VOCABULARY) for name in ("ours", "theirs"))
    chat = [{"role": "user", "content": "Give ant 3 a letter.\n\u00e9 <|end|>12"}]
    assert ours.apply_chat_template(chat, add_generation_prompt=True, tokenize=True) == theirs.apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True
    )
    for text in ("Give dog 7 a letter.", "", "a<|assistant|>b", "\u2603 123"):
        assert ours.encode(text) == theirs.encode(text)
    tokens = list(range(VOCABULARY))
    assert all(ours.decode([token]) for token in tokens), "a sampled id without a text would be invisible"
    for skips in (True, False):
        assert ours.decode(tokens, skip_special_tokens=skips) == theirs.decode(tokens, skip_special_tokens=skips)
    assert (ours.eos_token_id, ours.pad_token_id) == (theirs.eos_token_id, theirs.pad_token_id)
    assert ours.all_special_ids == theirs.all_special_ids
