"""The watched page and /metrics: what they show, when they change, and who may ask."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

import pytest

from octetrl.cli.main import run_command
from octetrl.system.files import folder_lock
from tests.required import missing
from tests.unit.telemetry.test_report import make_run

try:
    from starlette.testclient import TestClient

    from octetrl.server.watch import watch_app
except ImportError as error:
    missing("serve", str(error), whole_module=True)


def client(*folders: Path, is_local: bool = True) -> TestClient:
    app = watch_app(folders, local_name="machine.local" if is_local else None)
    return TestClient(app, base_url="http://localhost:8700")


def test_the_page_changes_with_the_runs_and_only_then(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first"), tmp_path / "second"
    second.mkdir()
    (second / "config.yaml").write_text("model: {path: models/small}\n")
    with client(first, second) as asked, folder_lock(second):
        answer = asked.get("/")
        assert answer.headers["x-runs"] == "first: step 12; second: no step yet, running"
        assert "<title>first</title>" in answer.text and "second has no finished step yet." in answer.text
        tag = answer.headers["etag"]
        assert asked.get("/", headers={"If-None-Match": tag}).status_code == 304
        line = (first / "metrics.jsonl").read_text().splitlines()[0]
        (second / "metrics.jsonl").write_text(line + "\n" + json.dumps({**json.loads(line), "step": 2}) + "\n")
        answer = asked.get("/", headers={"If-None-Match": tag})
        assert answer.status_code == 200 and "<title>first and second</title>" in answer.text
        assert answer.headers["x-runs"].endswith("second: step 2, running")
        assert "no finished step" not in answer.text
        (second / "metrics.jsonl").write_text('{"step": 1, "time/step": "slow"}\n')
        assert asked.get("/").status_code == 500  # and the server goes on
        (second / "metrics.jsonl").unlink()
        assert asked.get("/").status_code == 200


def test_the_page_runs_its_own_script_alone(tmp_path: Path) -> None:
    with client(make_run(tmp_path / "run")) as asked:
        page = asked.get("/").text
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in scripts]
    assert re.findall(r"script-src ([^;\"]+)", page) == [f"'sha256-{digest}'" for digest in digests]
    assert len(scripts) == 1 and page.count("<script") == 1


def test_metrics_are_those_of_the_last_step(tmp_path: Path) -> None:
    first, second = make_run(tmp_path / "first"), make_run(tmp_path / "second", 3, **{"loss": 0.5})
    with (second / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "loss": null, "a/b": 1, "a_b": 2}\n')
    (second / "warnings.jsonl").write_text('{"step": 2, "text": "odd"}\n')
    (second / "run.json").write_text('{"run": "ours", "ended": {"how": "failed", "why": "no memory"}}')
    with client(first, second) as asked:
        lines = asked.get("/metrics").text.splitlines()
    for line in (
        'octetrl_run_step{run="first"} 12.0',
        'octetrl_run_step{run="second"} 4.0',
        'octetrl_run_reward_mean{run="first"} 1.2',
        'octetrl_run_warnings{run="second"} 1.0',
        'octetrl_run_failed{run="second"} 1.0',
        'octetrl_run_failed{run="first"} 0.0',
        'octetrl_run_live{run="first"} 0.0',
        'octetrl_run_a_b{run="second"} 1.0',
    ):
        assert line in lines
    assert not any(line.startswith("octetrl_run_loss{") for line in lines)


def test_runs_of_one_name_and_a_removed_one(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / parent / "run", steps) for parent, steps in (("a", 3), ("b", 5))]
    with client(*runs) as asked:
        lines = asked.get("/metrics").text.splitlines()
        assert all(f'octetrl_run_step{{run="{run}"}} {step}.0' in lines for run, step in zip(runs, (3, 5), strict=True))
        shutil.rmtree(runs[0])
        answer = asked.get("/")
    assert answer.headers["x-runs"] == "run: removed; run: step 5" and "run was removed." in answer.text


def test_who_may_ask(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with client(run) as asked:
        assert asked.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
        assert asked.get("/", headers={"Host": "Machine.local:8700"}).status_code == 200  # which it listens on
    with client(run, is_local=False) as asked:
        assert asked.get("/", headers={"Host": "elsewhere.example"}).status_code == 200
    assert run_command(["watch", str(run), "--host", "0.0.0.0"]) == 2
    assert run_command(["watch", str(tmp_path)]) == 2  # no run, but a folder of runs


@pytest.mark.parametrize("arguments", [["watch"], ["watch", ""]])
def test_watch_needs_a_run(arguments: list[str]) -> None:
    assert run_command(arguments) == 2
