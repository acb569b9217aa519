"""The server's limits, hanging up, failing, and what it says of itself."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.live_server import CONTEXT_LENGTH, Live, held, live_server
from tests.e2e.official_client import openai

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "1 + 2 ="}]}
LONG: dict[str, Any] = {**ASK, "max_completion_tokens": CONTEXT_LENGTH - 40, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Live]:
    with live_server(model) as server:
        yield server


def status_of(error: pytest.ExceptionInfo[openai.APIStatusError]) -> tuple[int, str | None]:
    return error.value.status_code, error.value.code


# ---------------------------------------------------------------- limits and errors


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"temperature": -1}, "invalid_value", "temperature: -1 is not valid"),
        ({"top_p": 0}, "invalid_value", "greater than 0"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unsupported_value", "'robot' is not supported"),
        ({"frequency_penalty": 2.5}, "invalid_value", "frequency_penalty: 2.5 is not valid"),
        ({"logprobs": True, "top_logprobs": 21}, "invalid_value", "top_logprobs: 21"),
        ({"response_format": {"type": "xml"}}, "unsupported_value", "response_format"),
        ({"extra_body": {"beams": 3}}, "unknown_parameter", "beams: it is not supported; the fields are"),
        ({"max_tokens": CONTEXT_LENGTH}, "context_length_exceeded", "no room for an answer of 512"),
        ({"messages": [{"role": "user", "content": "7 " * 600}]}, "context_length_exceeded", "no token of an answer"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"n": 10_000}, None, "this server allows 512"),
        ({"n": 10**15}, None, "this server allows 512"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_a_400_that_says_why(live: Live, changes: Any, code: str | None, said: str) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        live.client().chat.completions.create(**{**ASK, **changes})
    assert status_of(error) == (400, code) and said in str(error.value)
    assert error.value.type == "invalid_request_error"


def test_other_models_paths_and_methods_are_not_there(live: Live) -> None:
    client = live.client()
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(**{**ASK, "model": "gpt-4"})
    assert status_of(error) == (404, "model_not_found")
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{live.url}/v2").json()["error"]["type"] == "invalid_request_error"
    assert httpx.get(f"{live.url}/v1/completions").status_code == 405
    for body in (b"{", b"[]", b"\xff", b'{"model": "tiny", "messages": NaN}'):
        answer = httpx.post(f"{live.url}/v1/chat/completions", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_the_key_and_the_limit_on_bodies(model: Path) -> None:
    with live_server(model, max_body_bytes=3000, api_key="s3cret") as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="s3cret", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as wrong_key:
            live.client().models.list()
        assert status_of(wrong_key) == (401, "invalid_api_key")
        with pytest.raises(openai.APIStatusError) as large:
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
        assert status_of(large) == (413, "body_too_large")
        assert httpx.get(f"{live.url}/health").json() == {"status": "ok", "model": "tiny"}
        assert client.chat.completions.create(**ASK, max_tokens=3).usage is not None


def test_a_full_queue_is_a_429_and_empties_again(model: Path) -> None:
    with live_server(model, max_batch=2, max_queue=2) as live, ThreadPoolExecutor(4) as others:
        create = live.client().chat.completions.create
        with held(live.engine) as gate:
            waiting = [others.submit(create, **ASK, max_tokens=4) for _ in range(4)]
            live.until(lambda: live.intake.num_completions == 4)
            with pytest.raises(openai.RateLimitError) as error:
                create(**ASK)
            assert status_of(error) == (429, "queue_full") and error.value.response.headers["retry-after"] == "1"
            gate.set()
        assert all(answer.result().choices for answer in waiting)
        assert create(**ASK, max_tokens=2).choices


# ---------------------------------------------------------------- company, hanging up, failing


def test_many_at_once_get_what_they_would_alone(live: Live) -> None:
    create = live.client().chat.completions.create

    def ask(seed: int) -> str:
        if seed % 2:
            return create(**ASK, seed=seed, max_tokens=25).choices[0].message.content or ""
        chunks = create(**ASK, seed=seed, max_tokens=25, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(16) as clients:
        together = list(clients.map(ask, range(16)))
    assert together == [ask(seed) for seed in range(16)]
    live.until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_hangs_up_frees_its_pages(live: Live, stream: bool, waits: bool) -> None:
    """While it runs, or before its first step is done."""
    cancelled = live.intake.cancelled

    def ask_and_hang_up() -> None:
        body = json.dumps({**ASK, "max_completion_tokens": LONG["max_completion_tokens"], "ignore_eos": True, "n": 2})
        host, port = live.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
            live.until(lambda: live.intake.num_completions == 2 if waits else live.pages_in_use > 0)

    if waits:
        with held(live.engine) as gate:
            if stream:
                chunks = live.client().chat.completions.create(**LONG, stream=True)
                chunks.close()
            else:
                ask_and_hang_up()
            live.until(lambda: live.intake.num_completions == 0)
            gate.set()
        live.until_idle()
    else:
        launch = live.engine._runner.launch  # so slow that an answer would take longer than `until_idle` waits
        live.engine._runner.launch = lambda *inputs: time.sleep(0.2) or launch(*inputs)  # type: ignore[func-returns-value]
        try:
            if stream:
                chunks = live.client().chat.completions.create(**LONG, stream=True)
                next(iter(chunks))
                live.until(lambda: live.pages_in_use > 0)
                chunks.close()
            else:
                ask_and_hang_up()
            live.until_idle()
        finally:
            live.engine._runner.launch = launch
    live.until(lambda: live.intake.cancelled == cancelled + 1)


def test_an_engine_that_fails_fails_those_at_hand_and_serves_the_next(model: Path) -> None:
    with live_server(model) as live, ThreadPoolExecutor(3) as others:
        create = live.client().chat.completions.create
        launch = live.engine._runner.launch

        def fail(*inputs: Any) -> None:
            raise RuntimeError("out of luck")

        with held(live.engine) as gate:
            chunks = create(**ASK, stream=True)
            waiting = [others.submit(create, **ASK) for _ in range(2)]
            live.until(lambda: live.intake.num_completions == 3)
            live.engine._runner.launch = fail
            gate.set()
            for answer in waiting:
                assert isinstance(answer.exception(), openai.InternalServerError)
            with pytest.raises(openai.APIError, match="out of luck"):
                list(chunks)
        health = httpx.get(f"{live.url}/health")
        assert health.status_code == 500 and "out of luck" in health.json()["error"]
        live.engine._runner.launch = launch
        assert create(**ASK, max_tokens=3).choices
        assert httpx.get(f"{live.url}/health").status_code == 200
        assert f"octetrl_engine_failures {live.intake.engine.failures:.1f}" in httpx.get(f"{live.url}/metrics").text


def test_an_engine_that_is_broken_for_good_fails_each_request_at_once(model: Path) -> None:
    with live_server(model) as live:
        create = live.client().chat.completions.create

        def fail(*inputs: Any) -> None:
            raise RuntimeError("no device")

        live.engine._runner.launch = live.engine._cache_for = fail
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="no device"):
                create(**ASK)


# ---------------------------------------------------------------- what it says of itself


def test_metrics_count_what_was_done(model: Path) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    with live_server(model) as live:
        client = live.client()
        used = client.chat.completions.create(**ASK, max_tokens=5, seed=1).usage
        list(client.chat.completions.create(**ASK, max_tokens=5, seed=1, stream=True))
        with pytest.raises(openai.BadRequestError):
            client.chat.completions.create(**ASK, temperature=-1)
        live.until_idle()
        text = httpx.get(f"{live.url}/metrics").text
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    assert samples["octetrl_responses_total", "/v1/chat/completions", "200"] == 2
    assert samples["octetrl_responses_total", "/v1/chat/completions", "400"] == 1
    assert used is not None and samples["octetrl_prompt_tokens_total",] == 2 * used.prompt_tokens
    assert samples["octetrl_generated_tokens_total",] >= used.completion_tokens + 1
    assert samples["octetrl_first_token_seconds_count",] == 1
    assert samples["octetrl_running_completions",] == samples["octetrl_cache_pages_in_use",] == 0
    assert samples["octetrl_cache_pages",] > 0


@pytest.mark.parametrize("precision", ["fp8_rollout", "fp8_full"])
def test_fp8_is_served_with_a_calibrated_cache(model: Path, precision: str) -> None:
    with live_server(model, precision=precision) as live:
        answer = live.client().chat.completions.create(**ASK, max_tokens=10, seed=1)
        again = live.client().chat.completions.create(**ASK, max_tokens=10, seed=1, stream=True)
        assert answer.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in again)


def test_threads_end_with_the_server(model: Path) -> None:
    with live_server(model):
        assert "engine" in {thread.name for thread in threading.enumerate()}
