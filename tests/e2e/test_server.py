"""The server by the official client: answers, streams, tools, limits, hanging up, failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octetrl.records import GenerationRequest, SamplingParams
from octetrl.run.tokenizer import load_tokenizer
from tests.e2e import tiny_run
from tests.e2e.live_server import CONTEXT_LENGTH, Live, held, live_server, saying

ASK: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "1 + 2 ="}]}
LONG: dict[str, Any] = {**ASK, "max_completion_tokens": CONTEXT_LENGTH - 40, "extra_body": {"ignore_eos": True}}
TOOLS_TEMPLATE = (
    "{% if tools %}Write <tool_call>{name, arguments}</tool_call>. {% for tool in tools %}{{ tool | tojson }}"
    "{% endfor %}{% endif %}{% for message in messages %}<|user|>{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Live]:
    with live_server(model) as server:
        yield server


@pytest.fixture(scope="module")
def with_tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_run.make_model(tmp_path_factory.mktemp("tools") / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(folder)
    with live_server(folder) as server:
        yield server


def status_of(error: pytest.ExceptionInfo[openai.APIStatusError]) -> tuple[int, str | None]:
    return error.value.status_code, error.value.code


# ---------------------------------------------------------------- answers


def test_a_chat_answers_with_the_engines_own_tokens(live: Live, model: Path) -> None:
    answer = live.client().chat.completions.create(
        **ASK, seed=7, n=3, max_tokens=20, temperature=0.8, logprobs=True, extra_body={"return_token_ids": True}
    )
    body = answer.model_dump()
    prompt = tuple(body["prompt_token_ids"])
    tokenizer = load_tokenizer(model)
    assert tokenizer.decode(prompt) == "<|user|>1 + 2 =<|assistant|>"
    request = GenerationRequest("alone", prompt, SamplingParams(20, temperature=0.8), num_siblings=3, seed=7)
    live.until_idle()
    (expected,) = alone(model, [request])
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for choice, completion in zip(answer.choices, expected, strict=True):
        assert tuple(choice.model_dump()["token_ids"]) == completion.token_ids
        assert choice.message.content == completion.text and choice.message.role == "assistant"
        assert choice.finish_reason == completion.finish_reason.value
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert [entry.logprob for entry in choice.logprobs.content] == list(completion.logprobs)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == sum(len(completion.token_ids) for completion in expected)
    assert (answer.object, answer.model) == ("chat.completion", "tiny")


def alone(model: Path, requests: list[GenerationRequest]) -> list[Any]:
    from octetrl.run.generate import generating_worker, generation_recipe, tokenizer_of
    from octetrl.run.resume import trained_model

    trained = trained_model(model)
    return generating_worker(generation_recipe(trained, "bf16", "cpu", CONTEXT_LENGTH), tokenizer_of(trained)).generate(
        requests
    )


def test_a_completion_takes_text_tokens_and_several_of_them(live: Live) -> None:
    complete = live.client().completions.create
    common: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 9, "logprobs": 0}
    many = complete(**common, prompt=["1 + 2", "4 - 3 ="], n=2, extra_body={"return_token_ids": True})
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    first = many.choices[0].model_dump()
    by_tokens = complete(**common, prompt=first["prompt_token_ids"])
    assert by_tokens.choices[0].text == many.choices[0].text
    assert many.choices[2].text == complete(**{**common, "seed": 4}, prompt="4 - 3 =").choices[0].text
    logprobs = many.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None and logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(first["token_ids"]) == len(logprobs.text_offset)
    assert len(complete(model="tiny", prompt="1", extra_body={"ignore_eos": True}).choices[0].text) > 0
    assert complete(model="tiny", prompt="1", extra_body={"ignore_eos": True}).usage.completion_tokens == 16  # type: ignore[union-attr]


def test_a_seed_gives_the_same_answer_and_none_another(live: Live) -> None:
    create = live.client().chat.completions.create
    same = {create(**ASK, seed=5, max_tokens=30).choices[0].message.content for _ in range(3)}
    other = {create(**ASK, max_tokens=30).choices[0].message.content for _ in range(3)}
    greedy = {create(**ASK, temperature=0, max_tokens=30).choices[0].message.content for _ in range(2)}
    assert (len(same), len(greedy)) == (1, 1) and len(other) > 1


def test_a_stop_string_ends_the_text(live: Live) -> None:
    create = live.client().chat.completions.create
    free = create(**LONG | {"max_completion_tokens": 60}, seed=1).choices[0].message.content or ""
    stop = free[10:13]
    for stream in (False, True):
        cut = create(**LONG | {"max_completion_tokens": 60}, seed=1, stop=[stop, "never said"], stream=stream)
        if stream:
            chunks = list(cut)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            reason = chunks[-1].choices[0].finish_reason
        else:
            text, reason = cut.choices[0].message.content, cut.choices[0].finish_reason
        assert (text, reason) == (free[: free.index(stop)], "stop")


# ---------------------------------------------------------------- streams


@pytest.mark.parametrize("seed", range(4))
def test_a_streamed_chat_adds_up_to_the_whole(live: Live, seed: int) -> None:
    create = live.client().chat.completions.create
    asked = {**ASK, "seed": seed, "n": 2, "max_tokens": 60, "logprobs": True, "stop": ["4", "9 "]}
    whole = create(**asked)
    chunks = list(create(**asked, stream=True, stream_options={"include_usage": True}))
    *told, last = chunks
    assert last.choices == [] and last.usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and all(chunk.usage is None for chunk in told)
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in told if chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in own) == choice.message.content
        assert [one.finish_reason for one in own][-1] == choice.finish_reason
        assert [one.finish_reason for one in own[:-1]] == [None] * (len(own) - 1)
        assert choice.logprobs is not None
        entries = [entry for one in own if one.logprobs for entry in one.logprobs.content or []]
        assert entries == choice.logprobs.content
        assert len(own) > 3


def test_a_streamed_completion_adds_up_to_the_whole(live: Live) -> None:
    complete = live.client().completions.create
    asked: dict[str, Any] = {"model": "tiny", "prompt": ["1 + 1", "7"], "seed": 2, "max_tokens": 40, "logprobs": 0}
    whole = complete(**asked)
    chunks = list(complete(**asked, stream=True))
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(one.text for one in own) == choice.text
        assert choice.logprobs is not None
        for name in ("tokens", "token_logprobs", "text_offset"):
            told = [value for one in own for value in getattr(one.logprobs, name)]
            assert told == getattr(choice.logprobs, name)


def test_text_is_streamed_at_the_borders_of_characters(live: Live, model: Path) -> None:
    said = "né 🦊 日本語 ok"
    tokenizer = load_tokenizer(model)
    tokens = tokenizer.encode(said, add_special_tokens=False)
    assert len(tokens) > len(said)
    with saying(live.engine, [*tokens, tokenizer.eos_token_id]):
        chunks = list(live.client().chat.completions.create(**ASK, stream=True))
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(texts) == said and all("\ufffd" not in text for text in texts) and len(texts) > 8


# ---------------------------------------------------------------- tools


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_are_read_and_answers_to_them_taken(with_tools: Live, stream: bool, tmp_path: Path) -> None:
    said = ' I look. <tool_call>{"name": "weather", "arguments": {"city": "Nîmes"}}</tool_call>'
    create = with_tools.client().chat.completions.create
    tokenizer = load_tokenizer(with_tools.folder)
    tokens = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    with saying(with_tools.engine, tokens):
        answer = create(**ASK, tools=[WEATHER], stream=stream)
        if stream:
            chunks = list(answer)
            content = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
            reason = chunks[-1].choices[0].finish_reason
            assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) > 1
        else:
            message, reason = answer.choices[0].message, answer.choices[0].finish_reason
            content = message.content
            (call,) = message.tool_calls
    assert (content, reason) == ("I look.", "tool_calls")
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Nîmes"}
    turns = [
        *ASK["messages"],
        {"role": "assistant", "content": content, "tool_calls": [call.model_dump(exclude={"index"})]},
        {"role": "tool", "tool_call_id": call.id, "content": "17 degrees"},
    ]
    after = create(model="tiny", messages=turns, tools=[WEATHER], max_tokens=1, extra_body={"return_token_ids": True})
    prompt = tokenizer.decode(after.model_dump()["prompt_token_ids"])
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Nîmes"}}</tool_call>' in prompt
    assert prompt.endswith("17 degrees<|assistant|>")


def test_a_call_that_cannot_be_read_stays_text(with_tools: Live) -> None:
    tokenizer = load_tokenizer(with_tools.folder)
    tokens = [*tokenizer.encode("a <tool_call>{oops</tool_call>", add_special_tokens=False), tokenizer.eos_token_id]
    create = with_tools.client().chat.completions.create
    with saying(with_tools.engine, tokens):
        whole = create(**ASK, tools=[WEATHER]).choices[0]
    with saying(with_tools.engine, tokens):
        told = "".join(c.choices[0].delta.content or "" for c in create(**ASK, tools=[WEATHER], stream=True))
    assert told == whole.message.content == "a\n<tool_call>{oops</tool_call>"
    assert whole.message.tool_calls is None and whole.finish_reason == "stop"


def test_tools_are_refused_where_the_model_has_none(live: Live) -> None:
    with pytest.raises(openai.BadRequestError, match="is not known here"):
        live.client().chat.completions.create(**ASK, tools=[WEATHER])


# ---------------------------------------------------------------- limits and errors


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"temperature": -1}, "invalid_value", "temperature: -1 was given"),
        ({"top_p": 0}, "invalid_value", "greater than 0"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "unsupported_value", "'robot' is not served"),
        ({"frequency_penalty": 0.5}, "unsupported_value", "frequency_penalty: 0.5 is not served"),
        ({"logprobs": True, "top_logprobs": 3}, "unsupported_value", "top_logprobs: 3"),
        ({"response_format": {"type": "json_object"}}, "unsupported_value", "response_format"),
        ({"extra_body": {"beams": 3}}, "unknown_parameter", "beams: it is not served; there are"),
        ({"max_tokens": CONTEXT_LENGTH}, "context_length_exceeded", "no room for an answer of 512"),
        ({"messages": [{"role": "user", "content": "7 " * 600}]}, "context_length_exceeded", "no token of an answer"),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"n": 10_000}, None, "takes 512 at most"),
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
        together = list(clients.map(ask, range(32)))
    assert together == [ask(seed) for seed in range(32)]
    live.until_idle()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_hangs_up_frees_its_pages(live: Live, stream: bool, waits: bool) -> None:
    """While it runs, or before its first step is done."""
    cancelled = live.intake.cancelled
    client = live.client()

    def ask_and_hang_up() -> None:
        with pytest.raises((openai.APITimeoutError, openai.APIConnectionError, httpx.ReadTimeout)):
            client.with_options(timeout=0.4).chat.completions.create(**LONG, n=2)

    begun = time.monotonic()
    if waits:
        with held(live.engine) as gate:
            if stream:
                chunks = client.chat.completions.create(**LONG, stream=True)
                chunks.close()
            else:
                ask_and_hang_up()
            live.until(lambda: live.intake.num_completions == 0)
            gate.set()
    elif stream:
        chunks = client.chat.completions.create(**LONG, stream=True)
        next(iter(chunks))
        live.until(lambda: live.pages_in_use > 0)
        chunks.close()
    else:
        slow = live.engine._runner.launch
        live.engine._runner.launch = lambda *inputs: time.sleep(0.02) or slow(*inputs)  # type: ignore[func-returns-value]
        try:
            ask_and_hang_up()
            live.until_idle()
        finally:
            live.engine._runner.launch = slow
    live.until_idle()
    assert time.monotonic() - begun < 5
    assert live.intake.cancelled == cancelled + 1


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
        used = client.chat.completions.create(**ASK, max_tokens=5).usage
        list(client.chat.completions.create(**ASK, max_tokens=5, stream=True))
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
