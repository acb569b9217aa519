"""`engine.backend: openai`: failures that concern one answer end no run."""

from __future__ import annotations

import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from octetrl import endpoint
from octetrl.backends.openai import session as server_session
from octetrl.backends.openai.session import GIVES_UP
from octetrl.endpoint import Endpoint, EndpointError
from octetrl.records import FinishReason, GenerationRequest, SamplingParams
from octetrl.system.errors import UserError
from tests.unit.backends.test_openai import CHAT, asked, one, replaced, said, settings, texts
from tests.unit.environments.judge_double import judge_double


def test_failures_after_good_answers_never_end_the_run() -> None:
    def by_prompt(body: dict[str, Any]) -> Any:
        return (500, "out of order", {}) if body["messages"][1]["content"] == "bad" else said()

    with judge_double(by_prompt) as double:
        asked_for = [asked("good"), replaced(asked("bad", siblings=GIVES_UP + 1), "8:task")]
        (good,), bad = texts(double.url, concurrency=1, retries=0).generate(asked_for)
    assert good.text == "four" and {one.finish_reason for one in bad} == {FinishReason.FAILED}


@pytest.mark.parametrize("kind", [httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError])
def test_a_connection_that_is_lost_in_an_answer_is_no_missing_server(
    kind: type[httpx.TransportError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was reached, so this answer is lost and not the whole evaluation."""

    def lose(*_: object) -> None:
        raise kind("reset by peer")

    monkeypatch.setattr(Endpoint, "_exchange", lose)
    found = one(texts("http://127.0.0.1:9/v1", retries=0), asked())
    assert found.finish_reason is FinishReason.FAILED and f"{kind.__name__}: reset by peer" in str(found.detail)


@pytest.mark.parametrize("status", [405, 413, 415, 422, 501])
def test_a_request_that_would_fail_again_in_any_form_ends_the_run_at_once(status: int) -> None:
    expected = "refuses the request .*unknown field.*; correct the setting that it names"
    with judge_double((status, "unknown field", {})) as double, pytest.raises(UserError, match=expected) as error:
        one(texts(double.url), asked())
    assert "\n" not in str(error.value) and len(double.asked) == 1


def test_a_wait_for_a_retry_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Once for all requests that wait, with the reason, the time and what is left; nothing of a wait that is short."""
    busy = (503, "busy", {})
    with judge_double(busy, busy, said("four"), said("four")) as double:
        backend = texts(double.url, retries=4, backoff_seconds=1.0)
        with backend.session() as session:
            for name in ("a", "b"):
                session.submit(GenerationRequest(name, CHAT.prompt_tokens("hi"), SamplingParams(8)))
            while session.has_work:
                session.advance()
        backend.close()
    error = capsys.readouterr().err
    (line,) = [line for line in error.splitlines() if line.startswith("octetrl: ")]
    assert re.search(r"/v1/chat/completions: status 503: busy; retry 1 of 4 in (0\.[5-9]|1\.0) s", line)
    with judge_double(busy, said("four")) as double:
        one(texts(double.url), asked())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("retry_after", "seconds"), [("inf", 60.0), ("20", 20.0)])
def test_a_wait_is_what_the_server_asks_for_up_to_a_minute(
    retry_after: str, seconds: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waited: list[float] = []
    with judge_double((429, "slow", {"Retry-After": retry_after})) as double:
        client = Endpoint(settings(double.url, retries=5, backoff_seconds=1.0))
        never = SimpleNamespace(is_set=lambda: False, wait=waited.append, set=lambda: None)
        monkeypatch.setattr(client, "_closed", never)
        with pytest.raises(EndpointError, match="status 429"):
            client.post("/v1/completions", {})
        client.close()
    assert waited == [seconds] * 5
    assert f"retry 1 of 5 in {seconds} s" in capsys.readouterr().err


SLASHED = "sk-123/x+9=abc"


@pytest.mark.parametrize(
    "echoed",
    ["sk-123%2Fx%2b9%3Dabc", "%73k-123/x+9=abc", r"sk-123\/x+9=abc", r"sk-123\u002Fx+9\u003dabc"],
)
def test_a_key_is_masked_as_urls_and_json_write_it(echoed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", SLASHED)
    for given in (
        (400, f"no access for {echoed} here", {}),
        (302, "", {"Location": f"http://there/?key={echoed}"}),
        (200, json.dumps(said(f"it is {echoed}")), {}),
    ):
        with judge_double(given) as double:
            client = Endpoint(settings(double.url, api_key_variable="MY_KEY", retries=0))
            with pytest.raises(EndpointError) as error:
                client.post("/v1/completions", {})
            client.close()
        found = str(error.value)
        assert "123" not in found.replace(double.url, "") and ("***" in found or "contains the key" in found)


def test_a_connection_that_the_end_itself_closed_is_no_wait_for_a_retry(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = texts("http://127.0.0.1:9/v1", retries=4, backoff_seconds=2.0)

    def closed_meanwhile(endpoint: Endpoint, *_: object) -> None:
        endpoint.close()
        raise httpx.ReadError("Bad file descriptor")

    monkeypatch.setattr(Endpoint, "_exchange", closed_meanwhile)
    found = one(backend, asked())
    assert "not retried, because the run ends" in str(found.detail) and capsys.readouterr().err == ""


def test_an_error_that_comes_with_status_200_is_shown() -> None:
    with judge_double((200, '{"error": {"message": "no such adapter"}}', {})) as double:
        found = one(texts(double.url), asked())
    assert "status 200 with an error: no such adapter" in str(found.detail)


def test_the_idle_share_is_of_the_time_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    tally = server_session.Tally(2, started=10.0, _since=10.0)
    clock = iter((11.0, 14.0, 18.0))  # idle 1 s, one request 3 s, idle 4 s
    monkeypatch.setattr(server_session, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    tally.unfinished(1)
    tally.unfinished(0)
    found = tally.metrics()
    assert (found.seconds, found.idle_share, found.batch_occupancy) == (8.0, 5 / 8, 3 / 16)


@pytest.mark.parametrize(
    ("text", "headers"),
    [(" " * 4800 + "{}", {"X-Drips": "yes"}), ("{}", {"X-Drips-First": "HTTP/1.0 200 OK\r\nX: " + "a" * 1200})],
    ids=["text", "headers"],
)
def test_the_time_limit_is_for_the_whole_answer(text: str, headers: dict[str, str]) -> None:
    with judge_double((200, text, headers)) as double:  # 60 s
        began = time.monotonic()
        found = one(texts(double.url, timeout_seconds=0.4, retries=0), asked())
        seconds = time.monotonic() - began
    assert found.detail is not None and re.search(r"no answer in \d", found.detail) and seconds < 40.0


def test_callers_that_come_together_share_one_loop() -> None:
    together = threading.Barrier(8)

    def ask(_: int) -> Any:
        together.wait()
        return endpoint._requests()

    endpoint._begun.cache_clear()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(ask, range(8)))) == 1
