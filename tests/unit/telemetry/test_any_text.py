"""Texts that UTF-8 lacks letters for go through every writer, and come back where the form is JSON."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from octetrl.cli.main import run_command
from octetrl.cli.rollouts import RolloutsView
from octetrl.environments.tasks import Taskset
from octetrl.records import Completion, FinishReason, Reply, Rollout, RolloutGroup, RolloutStatus, Task, Turn
from octetrl.run.report import leave_report
from octetrl.system.text import escaped, to_utf8
from octetrl.telemetry.console import Console
from octetrl.telemetry.curves import TensorBoard
from octetrl.telemetry.rollout_page import write_page
from octetrl.telemetry.rollouts import Filter, RolloutFiles, select
from octetrl.telemetry.sinks import MetricsFile
from octetrl.trainer import checkpoint
from tests.saved_checkpoint import save_checkpoint

HALF = "naïve\ud800 \udcff\u2028\0<b>"


def rollout_with(text: str) -> Rollout:
    completion = Completion((1,), (-0.5,), text, FinishReason.STOP, 0, "digest")
    turn = Turn((2,), completion, (Reply("tool", text),))
    task = Task(text, text, answer=text, metadata={text: text})
    return Rollout(task, (turn,), RolloutStatus.REWARD_ERROR, None, detail=text, trace=text, answered=text)


@given(st.text(st.characters(), max_size=20))
@settings(max_examples=50, deadline=None, derandomize=True)
def test_a_line_of_json_gives_any_text_back(text: str) -> None:
    line = to_utf8(json.dumps({"text": text}, ensure_ascii=False))
    assert to_utf8(json.loads(line)["text"]) == to_utf8(text)
    assert escaped(escaped(text)) == escaped(text)


def test_rollouts_are_written_shown_and_read_back(tmp_path: Path) -> None:
    rollout = rollout_with(HALF)
    path = RolloutFiles(tmp_path / "rollouts").write(1, [RolloutGroup(rollout.task, (rollout,))])
    line = json.loads(path.read_text(encoding="utf-8"))
    for key in ("task_id", "prompt", "answer", "detail", "trace", "answered"):
        assert line[key] == HALF, key
    assert line["text"] == HALF and line["turns"][0]["replies"][0]["text"] == HALF

    selection = select(tmp_path, Filter(), None)
    shown = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    RolloutsView(RichConsole(file=shown, width=200), Filter(), letters=0).show(selection)
    shown.flush()
    assert b"na\xc3\xafve\\ud800" in shown.buffer.getvalue()  # type: ignore[attr-defined]
    write_page(tmp_path / "page.html", HALF, selection, Filter())
    assert "na\\u00efve\\ud800" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_report_of_a_run_is_written(tmp_path: Path) -> None:
    task = rollout_with(HALF).task
    RolloutFiles(tmp_path / "rollouts").write(1, [RolloutGroup(task, (rollout_with(HALF),))])
    (tmp_path / "config.yaml").write_text("model: {path: models/small}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    leave_report(tmp_path, Console("plain", 1))
    assert "na\u00efve\\ud800" in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / ".report.html").symlink_to("/dev/full")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.25}\n')
    report, console = (tmp_path / "report.html").read_bytes(), Console("plain", 1, err=(said := io.StringIO()))
    leave_report(tmp_path, console)
    assert "no report.html was written ([Errno 28]" in said.getvalue(), "the disk is full"
    assert (tmp_path / "report.html").read_bytes() == report and not (tmp_path / ".report.html").is_symlink()
    assert run_command(["report", str(tmp_path), "--out", str(tmp_path / "again.html")]) == 0
    assert run_command(["report", str(tmp_path), "--out", "/proc/x.html"]) == 2


def test_console_metrics_and_checkpoints(tmp_path: Path) -> None:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    console = Console("plain", 1, out, err)
    console.note(HALF)
    console.warn(HALF)
    for stream in (out, err):
        stream.flush()
        assert b"\\ud800" in stream.buffer.getvalue()  # type: ignore[attr-defined]
    MetricsFile(tmp_path / "metrics.jsonl").write(1, {f"reward/component/{HALF}": 1.0})
    board = TensorBoard(tmp_path)
    board.write(1, {f"reward/component/{HALF}": 1.0})
    board.close()
    saved = save_checkpoint(tmp_path, 1, {"cursor.json": {"lengths": {HALF: 3}}})
    assert checkpoint.load(saved).json("cursor.json") == {"lengths": {HALF: 3}}


def test_the_place_in_tasks_of_any_text_is_found_again() -> None:
    tasks = [Task(f"{index}{HALF}", f"{HALF}{index}") for index in range(8)]
    state = json.loads(json.dumps(Taskset(tasks, eval_size=2, seed=0).state()))
    Taskset(tasks, eval_size=2, seed=0).restore(state)


def test_what_goes_to_a_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    httpx = pytest.importorskip("httpx")
    from octetrl.config.environment import JudgeConfig
    from octetrl.environments.judge import Judge

    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"][0]["content"])
        return httpx.Response(200, json={"choices": [{"message": {"content": "Score: 1"}}]})

    client = httpx.AsyncClient
    monkeypatch.setattr(httpx, "AsyncClient", lambda **options: client(transport=httpx.MockTransport(answer)))
    config = JudgeConfig(base_url="http://judge/v1", model="m", api_key_variable=None, template="{completion} Score?")
    (score,) = Judge(config).score([(Task("1", "p"), HALF)])
    assert score.status is RolloutStatus.SCORED, score.detail
    assert asked == [f"{HALF} Score?"]


def test_pages_show_what_they_would_hide_or_obey(tmp_path: Path) -> None:
    hidden = "".join(map(chr, [0, 8, 0x1B, 0x7F, 0x9B, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
    rollout = rollout_with(f"a\tb\n{hidden}[2Jc")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.0}\n')
    RolloutFiles(tmp_path / "rollouts").write(1, [RolloutGroup(rollout.task, (rollout,))])
    selection = select(tmp_path, Filter(), None)
    write_page(tmp_path / "rollouts.html", "x", selection, Filter(), lambda ids: [hidden for _ in ids])
    leave_report(tmp_path, Console("quiet", 1))
    page = (tmp_path / "rollouts.html").read_text(encoding="utf-8")
    (data,) = re.findall(r'<script [^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    (group,) = json.loads(data)["groups"]
    shown = "a\tb\n\\x00\\x08\\x1b\\x7f\\x9b\\u202a\\u202b\\u202c\\u202d\\u202e\\u2066\\u2067\\u2068\\u2069[2Jc"
    assert group["prompt"] == shown and group["rows"][0]["said"][0]["text"] == shown
    assert shown in (tmp_path / "report.html").read_text(encoding="utf-8")
