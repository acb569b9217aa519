"""`octetrl eval --out FOLDER`: one evaluation at a time writes it, and one that ends early leaves nothing."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from octetrl.cli.eval import reserved, write_folder
from octetrl.cli.main import run_command
from octetrl.config.load import load_recipe
from octetrl.system.errors import UserError
from octetrl.telemetry.eval_report import EvalReport, Scoring


def test_a_folder_is_one_evaluations(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with reserved(str(out)):
        with (
            pytest.raises(UserError, match=r"another evaluation is writing '.*out'; give a new folder"),
            reserved(str(out)),
        ):
            raise AssertionError("it has two")
        assert out.is_dir()
        (out / "eval.json").write_text("{}")
    with pytest.raises(UserError, match="holds files already"), reserved(str(out)):
        raise AssertionError("it has files")
    assert [path.name for path in out.iterdir()] == ["eval.json"]


@pytest.mark.parametrize("was_there", [False, True])
def test_an_evaluation_that_wrote_nothing_leaves_what_was_there(was_there: bool, tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    if was_there:
        out.mkdir(parents=True)
    with pytest.raises(RuntimeError), reserved(str(out)):
        raise RuntimeError
    assert (tmp_path / "new").exists() == out.exists() == was_there


def test_a_full_disk_is_one_line_and_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", is_full)
    (tmp_path / "out").mkdir()
    report = EvalReport([], Scoring())
    with pytest.raises(UserError) as refused:
        write_folder(tmp_path / "out", load_recipe("demo_grpo"), {"model": report}, "{}")
    assert (
        str(refused.value) == f"--out: cannot write '{tmp_path / 'out'}' (No space left on device); give another folder"
    )
    assert list((tmp_path / "out").iterdir()) == [], "nothing that would stand in the way of the next attempt"


def test_sigterm_is_one_line_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def terminated(*_: object) -> None:
        assert out.is_dir() and signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL, "the test's process would end"
        signal.raise_signal(signal.SIGUSR1)

    out, model = tmp_path / "out", tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    monkeypatch.setattr("octetrl.cli.eval._evaluated", terminated)
    assert run_command(["eval", str(model), "--recipe", "demo_grpo", "--out", str(out)]) == 143
    assert capsys.readouterr().err == "octetrl: stopped by SIGUSR1\n"
    assert not out.exists() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
