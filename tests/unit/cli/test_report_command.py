"""`octetrl report` and `octetrl status`: which file a page may replace, and what is said of a run that has ended."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.telemetry.ending import Ending, reopen, write_ending
from octetrl.workers.status import StatusReport, WorkerStatus, write_status
from tests.unit.telemetry.test_report import make_run

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = make_run(Path("run"), steps=3)
    (folder / "run.json").write_text('{"run": "ab"}')
    (folder / "checkpoints" / "step_000003").mkdir(parents=True)
    (folder / "checkpoints" / "step_000003" / "manifest.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "[1]\n"),
        ("run.json", '{"run": "ab", "ended": "x"}'),
        ("metrics.jsonl", '{"step": 1, "time/step": 1.0, "reward/mean": "x"}\n'),
    ],
)
def test_a_file_that_no_run_wrote_is_one_line(name: str, content: str, run: Path, capsys: Capture) -> None:
    (run / name).write_text(content)
    for words in (["report", "run"], ["report", "run", "--terminal"], ["status", "run"]):
        assert run_command(words) == 2
        error = capsys.readouterr().err
        assert "'run': metrics.jsonl, config.yaml or another file" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints/step_000003/manifest.json", "lock", "page.html"])
def test_a_page_replaces_only_a_page(name: str, run: Path, capsys: Capture) -> None:
    path = run / name
    (run / "page.html").write_text("{}")
    before = path.read_bytes() if path.exists() else None
    Path("link.html").symlink_to(path.absolute())
    for out in (str(path), "link.html"):
        assert run_command(["report", "run", "--out", out]) == 2
        assert capsys.readouterr().err.startswith("octetrl: --out: '")
    assert (path.read_bytes() if path.exists() else None) == before
    (run / "empty.html").touch()
    for new in ("report.html", "both.html", "both.html", "empty.html", "LOUD.HTML"):
        assert run_command(["report", "run", "--out", str(run / new)]) == 0, capsys.readouterr().err
        assert (run / new).read_text().startswith("<!doctype html>")


def test_status_says_how_a_run_ended_and_no_longer_what_its_workers_do(run: Path, capsys: Capture) -> None:
    write_status(run, [StatusReport(WorkerStatus(0, "here", "", 7, "train", 1.0, True, 0.5), 0.0)])
    (run / "lock").write_text(str(os.getpid()))
    assert run_command(["status", "run"]) == 0 and capsys.readouterr().out.startswith(
        "worker 0 (host here, CPU): train"
    )
    write_ending(run, Ending("failed", "step 3: lost."))
    assert run_command(["status", "run"]) == 0
    first, step, *_ = capsys.readouterr().out.splitlines()
    assert first == "failed: step 3: lost; `octetrl train run/config.yaml --resume` continues it"
    assert step.startswith("step 3/3")
    with (run / "lock").open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_command(["status", "run"]) == 0
        first, step, *_ = capsys.readouterr().out.splitlines()
        assert first == f"process {os.getpid()} is building the run again, to continue it"
        assert step.startswith("step 3/3")
        reopen(run)
        assert run_command(["status", "run"]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == f"running, process {os.getpid()}"
    write_ending(run, Ending("finished"))
    assert run_command(["status", "run"]) == 0 and capsys.readouterr().out.startswith("finished\nstep 3/3")


def test_status_of_a_run_that_was_killed(run: Path, capsys: Capture) -> None:
    process = os.fork()
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)
    (run / "lock").write_text(str(process))
    reopen(run)  # as a run that starts; it has the metrics of its last step, and not its checkpoint
    assert run_command(["status", "run"]) == 0
    out = capsys.readouterr().out
    assert f"process {process} has ended without a message" in out and "finished" not in out
    assert "continue the run with `octetrl train run/config.yaml --resume`" in out


def test_the_terminal_report_escapes_control_characters(run: Path, capsys: Capture) -> None:
    (run / "warnings.jsonl").write_text(json.dumps({"step": 1, "text": "\x1b]0;x\x07"}) + "\n")
    assert run_command(["report", "run", "--terminal"]) == 0
    out = capsys.readouterr().out
    assert "\\x1b]0;x\\x07" in out and all(line.isprintable() for line in out.splitlines())
