"""What tests of `octetrl check` share: a tokenizer, a place for a recipe, and what the command says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.run.rehearsal import Rehearsal
from octetrl.run.tiny_model import save_tokenizer

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer") / "model"
    save_tokenizer(["a b"], folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a recipe in the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path / "r.yaml"


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Check:
    """`octetrl check r.yaml` with these words: its exit code, its output with single blanks, its errors."""

    def check(*arguments: str) -> tuple[int, str, str]:
        code = run_command(["check", "r.yaml", *arguments])
        shown = capsys.readouterr()
        return code, " ".join(shown.out.split()), shown.err

    return check


@pytest.fixture
def unrehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans alone: tasks, tokenizer and score are not tried, which takes nine tenths of the time of a check."""
    monkeypatch.setattr("octetrl.cli.check.start_tokenizer", lambda recipe, spec: (None, None))
    monkeypatch.setattr("octetrl.cli.check.rehearse", lambda recipe, tokenizer: Rehearsal())
