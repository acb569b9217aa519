"""What a newcomer mistypes or leaves out is answered in one line that says what to do."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import octetrl
from octetrl.cli.eval import recipe_of
from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.run.tiny_model import save_tokenizer
from octetrl.shapes.presets import preset_config
from octetrl.system.errors import UserError


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert run_command(arguments) == code
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    return text


def test_a_recipe_extends_a_shipped_one_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("extends: demo_grpo\nsteps: 7\n")
    mine, theirs = load_recipe(path), load_recipe("demo_grpo")
    assert mine.steps == 7 and mine.model_copy(update={"steps": theirs.steps}) == theirs
    path.write_text("extends: demo_gppo\n")
    with pytest.raises(UserError, match=r"extends: .*did you mean 'demo_\w+'"):
        load_recipe(path)


def test_another_kind_of_environment_drops_the_parameters_of_the_former() -> None:
    changed = load_recipe("demo_grpo", ["environment.kind=jsonl", "environment.dataset=t.jsonl"]).environment
    assert load_recipe("demo_grpo").environment.parameters and not changed.parameters
    assert load_recipe("demo_grpo", ["environment.kind=reasoning_gym"]) == load_recipe("demo_grpo")


@pytest.mark.parametrize("name", ["", "config.json", "chat_template.jinja"])
def test_a_link_that_leads_nowhere_is_named(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a hub's cache from which the files were removed."""
    model, blob = tmp_path / "model", tmp_path / "blobs/1f"
    link = model / name if name else model
    if name:
        save_tokenizer(["1 + 1"], model)
        (model / "config.json").write_text(json.dumps(preset_config("tiny")))
        link.unlink(missing_ok=True)
    link.symlink_to(blob)
    text = said(capsys, "generate", str(model), "-p", "hi")
    assert str(link) in text and str(blob) in text


def test_python_is_answered_in_python() -> None:
    with pytest.raises(UserError, match=r"octetrl\.train: model: missing"):
        octetrl.train(tasks=[{"prompt": "a", "answer": "b"}])
    with pytest.raises(UserError, match=r"octetrl\.train: tasks: missing"):
        octetrl.train(model="m")
    with pytest.raises(UserError, match=r"tasks\[1\]: it has no answer"):
        octetrl.train(model="m", tasks=[{"prompt": "a", "answer": "b"}, {"prompt": "a"}])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a module beside it, in a folder that is not the working directory."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "tasks_to_find.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    environment = {"kind": "jsonl", "eval_size": 0, "dataset": str(folder / "tasks_to_find.jsonl")}
    model = {"preset": "tiny", "init": "random", "context_length": 512, "tokenizer": str(folder / "tokenizer")}
    save_tokenizer(["a b"], folder / "tokenizer")
    environment |= {"reward": "beside_recipe:right"}
    rollout = {"max_prompt_tokens": 64, "max_new_tokens": 64}
    tree = {"model": model, "rollout": rollout, "cluster": {"device": "cpu"}, "environment": environment}
    (folder / "mine.yaml").write_text(json.dumps(tree))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    return folder


def test_a_module_is_found_beside_the_recipe(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "beside_recipe.py").write_text("def right(task, text):\n    return float(text == task.answer)\n")
    assert run_command(["check", "project/mine.yaml"]) == 0
    shown = capsys.readouterr()
    assert "reference answer    reward 1" in shown.out and shown.err == ""


def test_a_module_that_fails_says_where_and_why(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for code, says in (
        ("import no_such_library\n", "fails when imported (ModuleNotFoundError: No module named 'no_such_library'"),
        ("from json import nothing\n", "fails when imported (ImportError: cannot import name 'nothing' from 'json'"),
        ("\nright = 1 / 0\n", "ZeroDivisionError: division by zero (beside_recipe.py:2)"),
    ):
        (project / "beside_recipe.py").write_text(code)
        assert run_command(["check", "project/mine.yaml"]) == 2
        text = capsys.readouterr().err
        assert says in text and "no such module" not in text
    assert "no such module" in said(capsys, "check", "project/mine.yaml", "environment.reward=nowhere_at_all:right")
    assert "did you mean 'project/mine.yaml'?" in said(capsys, "check", "project/mime.yaml")


def test_eval_takes_the_recipe_of_the_first_run(tmp_path: Path) -> None:
    run, model = tmp_path / "run", tmp_path / "model"
    (run / "checkpoints/step_000003").mkdir(parents=True)
    model.mkdir()
    (model / "config.yaml").write_text("no run's")
    (run / "config.yaml").write_text("a run's")
    for targets in ([run], [model, run], [run / "checkpoints/step_000003"]):
        assert recipe_of([str(target) for target in targets]) == str(run / "config.yaml")


def test_a_run_on_given_data_needs_a_recipe_with_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "sft"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "model: {preset: tiny, init: random, tokenizer: t, context_length: 64}\nsteps: 1\noutput_dir: sft\n"
        "algorithm: {name: sft, conversations: c.jsonl, batch_size: 2}\n"
        "rollout: {max_prompt_tokens: 32, max_new_tokens: 32}\n"
    )
    text = said(capsys, "eval", str(run))
    assert "was trained on given data (sft)" in text and "give --recipe RECIPE.yaml" in text
    assert "reasoning_gym" not in text
    given = ("environment.kind=jsonl", "environment.dataset=tasks.jsonl")
    assert "has no checkpoint yet" in said(capsys, "eval", str(run), *given), "the next step: it has tasks"


def test_the_recipe_of_a_moved_run_does_not_resume_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)
    config = {"model": {"path": "m"}, "output_dir": "first", "environment": {"kind": "jsonl", "dataset": "t.jsonl"}}
    (tmp_path / "moved" / "config.yaml").write_text(json.dumps(config))
    resume = ("train", "moved/config.yaml", "--resume")
    assert "its output_dir is 'first'; add output_dir=moved to continue the run in 'moved'" in said(capsys, *resume)
    for folder in ("moved", "first"):
        assert "add output_dir" not in said(capsys, *resume, f"output_dir={folder}")
