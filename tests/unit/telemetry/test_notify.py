"""Messages of a run: what is sent for which event, and what failures do."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from octetrl.config.schema import NotifyConfig
from octetrl.system.errors import RunFailed
from octetrl.telemetry import notify
from octetrl.telemetry.notify import notify_problems, notifying


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """What was posted to the address in the variable HOOK; with "refuse" in its text, status 500. One with "moved" is
    redirected to where a GET succeeds."""
    bodies: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            text = bodies[-1]["text"]
            self.send_response(500 if "refuse" in text else 302 if "moved" in text else 200)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("HOOK", f"http://127.0.0.1:{server.server_port}/hook")
        yield bodies
        server.shutdown()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    return tmp_path / "mine"


def test_warnings_and_the_end_reach_webhook_and_command(folder: Path, posted: list[dict[str, Any]]) -> None:
    program = "import sys, pathlib; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read() + '\\n')"
    config = NotifyConfig(webhook="HOOK", command=(sys.executable, "-c", program, str(folder / "got")))
    warned = list[str]()
    with notifying(config, folder, warned.append) as tell:
        assert tell(1, []) == []
        assert tell(2, ["first", "second"]) == ["first", "second"]
        (folder / "run.json").write_text('{"run": "a", "ended": {"how": "finished", "why": "stopped early, done"}}')
    assert [(one["event"], one["step"], one["text"]) for one in posted] == [
        ("warning", 2, "mine, step 2: first; second"),
        ("end", 2, "mine, step 2: finished: stopped early, done"),
    ]
    assert [json.loads(line) for line in (folder / "got").read_text().splitlines()] == posted and warned == []


@pytest.mark.parametrize(
    ("error", "event"), [(RunFailed("step 3: no memory"), "failure"), (KeyboardInterrupt(), "end")]
)
def test_an_error_is_sent_as_what_it_is(
    folder: Path, posted: list[dict[str, Any]], error: BaseException, event: str
) -> None:
    with pytest.raises(type(error)), notifying(NotifyConfig(webhook="HOOK"), folder, print):
        raise error
    assert [one["event"] for one in posted] == [event]


def test_only_the_asked_events_are_sent(folder: Path, posted: list[dict[str, Any]]) -> None:
    with notifying(NotifyConfig(webhook="HOOK", events=("failure",)), folder, print) as tell:
        tell(1, ["odd"])
    assert posted == []


def test_failures_are_counted_and_end_nothing(
    folder: Path, posted: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "CLOSING", 10.0)
    config = NotifyConfig(webhook="HOOK", command=(sys.executable, "-c", "import time; time.sleep(60)"))
    config = config.model_copy(update={"timeout_seconds": 0.2})
    warned = list[str]()
    with notifying(config, folder, warned.append) as tell:
        tell(1, ["refuse this"])
    assert len(posted) == 2 and "3 of 4 messages failed" in warned[-1] and len(warned) == 2
    with notifying(None, folder, warned.append) as tell:
        assert tell(1, ["as it is"]) == ["as it is"]


def test_a_redirect_is_a_failure(folder: Path, posted: list[dict[str, Any]]) -> None:
    warned = list[str]()
    with notifying(NotifyConfig(webhook="HOOK", events=("warning",)), folder, warned.append) as tell:
        tell(1, ["it moved"])
    assert len(posted) == 1 and "1 of 1 message failed" in warned[-1]


def test_a_command_that_exits_with_an_error_is_a_failure(folder: Path) -> None:
    warned = list[str]()
    with notifying(NotifyConfig(command=("sh", "-c", "exit 3")), folder, warned.append):
        pass
    assert "1 of 1 message failed" in warned[-1]


@pytest.mark.parametrize(("waits", "failed"), [("wait", 1), ("exit", 0)])
def test_a_command_that_starts_others(folder: Path, waits: str, failed: int) -> None:
    """They end with a command that is too slow, and keep none that has ended."""
    alive = folder / "alive"
    alive.touch()
    program = f"(while test -e {alive}; do sleep 0.05; done; touch {folder}/outlived) & {waits}"
    limit = 1.0 if failed else 60.0
    config = NotifyConfig(command=("sh", "-c", program), events=("end",), timeout_seconds=limit)
    warned = list[str]()
    with notifying(config, folder, warned.append):
        pass
    alive.unlink()
    assert len([text for text in warned if "1 of 1 message failed" in text]) == failed
    until = time.monotonic() + limit
    while not (folder / "outlived").exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert (folder / "outlived").exists() == (not failed)


def test_what_is_missing_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_ADDRESS", "here")
    for webhook in ("UNSET_VARIABLE", "NO_ADDRESS", "ftp://host/hook"):
        assert len(list(notify_problems(NotifyConfig(webhook=webhook)))) == 1, webhook
    assert len(list(notify_problems(NotifyConfig(command=("no-such-program",))))) == 1
    assert list(notify_problems(NotifyConfig(webhook="https://host/hook", command=("true",)))) == []
    assert list(notify_problems(None)) == []
