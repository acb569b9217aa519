"""`octetrl serve` as a process: the page's examples, signals and exit codes, and what it refuses."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.e2e.official_client import openai  # first: it skips a module that lacks the server's packages

# isort: split
from octetrl.cli import serve as serve_command
from octetrl.cli.main import run_command
from octetrl.server import serve as run_serve
from tests.house.markdown import code_blocks, commands
from tests.house.shown_commands import check_command
from tests.house.tree import REPO

pytestmark = pytest.mark.slow
PAGE = (REPO / "docs" / "server.md").read_text(encoding="utf-8")
LONG: dict[str, Any] = {
    "model": "demo",
    "messages": [{"role": "user", "content": "1 + 2 ="}],
    "max_tokens": 1000,
    "n": 8,
    "extra_body": {"ignore_eos": True},
    "stream": True,
}
WARNINGS = r"(WARNING:  (Invalid HTTP request received\.|\d+ connections are open, as many as fit; .*)\n)*"


class Serving(NamedTuple):
    process: subprocess.Popen[str]
    url: str

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)


@contextmanager
def serving(model: Path, *options: str, open_files: int | None = None) -> Iterator[Serving]:
    command = [sys.executable, "-m", "octetrl.cli.main", "serve", str(model), "--port", "0", "--name", "demo"]
    shell = [] if open_files is None else ["bash", "-c", f'ulimit -n {open_files}; exec "$0" "$@"']
    whole = [*shell, *command, "--device", "cpu", *options]
    process = subprocess.Popen(whole, stderr=subprocess.PIPE, text=True, cwd=REPO)
    assert process.stderr is not None
    try:
        line = process.stderr.readline()
        found = re.match(r"serving at (http://127\.0\.0\.1:\d+/v1) \(\w+\)", line)
        assert found, line + process.stderr.read()
        assert process.stderr.readline().startswith(f"try: curl {found[1]}/chat/completions -H ")
        yield Serving(process, found[1])
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str], seconds: float = 60.0) -> int:
    return process.wait(seconds)


def refusal(url: str) -> tuple[int, str]:
    """Of a request that comes after the signal."""
    answer = httpx.post(f"{url}/chat/completions", json={"model": "demo", "messages": LONG["messages"]})
    return answer.status_code, answer.json()["error"]["code"]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def test_the_pages_examples_and_a_drain_that_lets_all_finish(model: Path) -> None:
    for command in commands(PAGE):
        if command.startswith("octetrl"):
            check_command(command)
    (python,) = [block.text for block in code_blocks(PAGE) if block.language == "python"]
    (curl,) = [block.text for block in code_blocks(PAGE) if block.text.startswith("curl")]
    options = ("--context-length", "1024", "--drain-seconds", "600")
    with serving(model, *options, open_files=256) as (process, url), ExitStack() as idle:
        here = url.removesuffix("/v1")
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile(python.replace("http://127.0.0.1:8000", here), "server.md", "exec"), {})
        assert printed.getvalue().strip()
        if shutil.which("curl"):
            shown = subprocess.run(["bash", "-c", curl.replace("http://127.0.0.1:8000", here)], capture_output=True)
            assert b'"chat.completion"' in shown.stdout
        open_idle_connections(Serving(process, url), here, idle)
        chunks = iter(Serving(process, url).client.chat.completions.create(**LONG | {"max_tokens": 300, "n": 2}))
        next(chunks)
        process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(f"{here}/health").status_code == 503)
        assert refusal(url) == (503, "draining")
        *_, last = chunks
        assert last.choices[0].finish_reason == "length"
        assert ended(process) == 0
        assert process.stderr is not None and re.fullmatch(WARNINGS, said := process.stderr.read()) and len(said) < 1000


def open_idle_connections(server: Serving, here: str, idle: ExitStack) -> None:
    """More than open files: each is accepted, the oldest make room, and an answer that is being streamed goes on."""
    host, port = here.removeprefix("http://").split(":")
    chunks = iter(server.client.chat.completions.create(**LONG | {"n": 1, "max_tokens": 100}))
    next(chunks)
    for number in range(330):
        client = idle.enter_context(socket.create_connection((host, int(port)), timeout=30))
        client.sendall(b"not HTTP\r\n\r\n" if number < 30 else b"GET /health HT" if number % 2 else b"")
        if number % 110 == 109:
            assert httpx.get(f"{here}/health", timeout=30).status_code == 200
    *_, last = chunks
    assert last.choices[0].finish_reason == "length"
    assert server.client.chat.completions.create(**LONG | {"stream": False, "n": 1, "max_tokens": 2}).choices


def test_a_drain_ends_in_time_and_says_so_to_who_is_left(model: Path) -> None:
    with serving(model, "--drain-seconds", "0.1") as server:
        chunks = iter(server.client.chat.completions.create(**LONG))
        next(chunks)
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError, match="shutting down"):
            list(chunks)
        assert ended(server.process) == 0


def test_a_second_signal_ends_it_at_once(model: Path) -> None:
    with serving(model, "--drain-seconds", "600") as server:
        chunks = iter(server.client.chat.completions.create(**LONG))
        next(chunks)
        server.process.send_signal(signal.SIGINT)
        until(lambda: httpx.get(f"{server.url.removesuffix('/v1')}/health").status_code == 503)  # it drains
        server.process.send_signal(signal.SIGINT)
        assert ended(server.process) == 130
        assert server.process.stderr is not None and server.process.stderr.read() == "octetrl: stopped\n"


def test_a_text_to_calibrate_on_ends_with_its_line(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[run_serve.ServeOptions] = []
    monkeypatch.setattr(run_serve, "serve", lambda options, **_: asked.append(options))
    texts = tmp_path / "texts.txt"
    texts.write_text("a\u2028b\u0085c\n \nd\x0ce\n", encoding="utf-8")
    assert run_command(["serve", str(model), "--calibrate-on", str(texts)]) == 0
    assert asked[0].calibration_texts == ["a\u2028b\u0085c", "d\x0ce"]


@pytest.mark.parametrize(("key", "variable", "shown"), [("k", "k", "$OCTETRL_API_KEY"), ("k", None, "KEY")])
def test_the_request_to_try_has_the_key_that_a_shell_can_fill_in(
    key: str, variable: str | None, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OCTETRL_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("OCTETRL_API_KEY", variable)
    serve_command._say(run_serve.ServeOptions("m", api_key=key), "serving at http://127.0.0.1:8000/v1")
    assert f'-H "Authorization: Bearer {shown}"' in capsys.readouterr().err


def test_an_address_with_colons_has_brackets_in_a_url() -> None:
    assert run_serve.url_of("::1", 8000) == "http://[::1]:8000/v1"
    assert run_serve.url_of("127.0.0.1", 8000) == "http://127.0.0.1:8000/v1"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1"])
def test_an_address_of_this_machine_needs_no_key(host: str) -> None:
    run_serve._check_key(run_serve.ServeOptions("m"), host)


@pytest.mark.parametrize("options", [{"api_key": "k"}, {"without_key": True}])
def test_other_machines_may_come_in_with_a_key_or_where_that_is_said(options: dict[str, Any]) -> None:
    run_serve._check_key(run_serve.ServeOptions("m", **options), "0.0.0.0")
