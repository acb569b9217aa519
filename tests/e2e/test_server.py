"""The server by the official client: answers, streams, tools, limits, hanging up, failures; chats and responses."""

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

from octetrl.data.tokenizer import load_tokenizer
from octetrl.records import GenerationRequest, SamplingParams
from tests.e2e import tiny_run
from tests.e2e.live_server import CONTEXT_LENGTH, Live, held, live_server, saying
from tests.e2e.official_client import openai

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
    from octetrl.run.generate import generating_workers, generation_recipe, model_parts

    trained, tokenizer, _ = model_parts(model)
    return generating_workers(
        generation_recipe(trained, "bf16", {"device": "cpu"}, CONTEXT_LENGTH), tokenizer
    ).generate(requests)


def test_a_completion_takes_text_tokens_and_several_of_them(live: Live) -> None:
    complete = live.client().completions.create
    common: dict[str, Any] = {"model": "tiny", "seed": 3, "max_tokens": 9, "logprobs": 0}
    many = complete(**common, prompt=["1 + 2", "4 - 3 ="], n=2, extra_body={"return_token_ids": True})
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    first = many.choices[0].model_dump()
    by_tokens = complete(**common, prompt=first["prompt_token_ids"])
    assert by_tokens.choices[0].text == many.choices[0].text
    equal = [complete(**{**common, "seed": seed}, prompt=["4 - 3 ="] * 8) for seed in range(4)]
    assert len({choice.text for one in equal for choice in one.choices}) == 32, "no seed of a place is another's"
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
    with pytest.raises(openai.BadRequestError, match="no known format of tool calls"):
        live.client().chat.completions.create(**ASK, tools=[WEATHER])


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


ASKED: dict[str, Any] = {"model": "tiny", "input": "1 + 2 =", "extra_body": {"seed": 7}, "max_output_tokens": 12}


def test_it_is_the_chats_answer(live: Live) -> None:
    client = live.client()
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}]
    chat = client.chat.completions.create(model="tiny", messages=messages, seed=7, max_tokens=12)
    parts: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2 ="}]}]
    for asked in (
        ASKED | {"instructions": "Add."},
        ASKED | {"input": messages},
        ASKED | {"instructions": "Add.", "input": parts},
    ):
        answer = client.responses.create(**asked)
        assert answer.output_text == chat.choices[0].message.content
        assert chat.usage is not None and answer.usage is not None
        assert answer.usage.input_tokens == chat.usage.prompt_tokens
        assert answer.usage.output_tokens == chat.usage.completion_tokens
        is_cut = chat.choices[0].finish_reason == "length"
        assert answer.status == ("incomplete" if is_cut else "completed")
        assert (answer.incomplete_details is not None) == is_cut


def test_a_stream_adds_up_to_the_whole(live: Live) -> None:
    client = live.client()
    whole = client.responses.create(**ASKED)
    events = list(client.responses.create(**ASKED, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    ends = ["output_text.done", "content_part.done", "output_item.done", str(whole.status)]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"] and kinds[-4:] == ends
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert said == whole.output_text == last.response.output_text
    assert last.response.usage == whole.usage
    with client.responses.stream(**ASKED) as stream:  # the client's own accumulation
        if whole.status == "completed":
            assert stream.get_final_response().output_text == said
        else:
            assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_conversation_goes_on(live: Live) -> None:
    client = live.client()
    first = client.responses.create(**ASKED)
    items: list[Any] = [{"role": "user", "content": "1 + 2 ="}, *(one.to_dict() for one in first.output)]
    again = client.responses.create(**ASKED | {"input": [*items, {"role": "user", "content": "and 1?"}]})
    assert first.usage is not None and again.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens


def test_json_follows_its_schema(live: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    answer = live.client().responses.create(**ASKED | {"max_output_tokens": 100}, text=form)
    assert answer.status == "incomplete" or json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("field", "value", "param", "code"),
    [
        ("previous_response_id", "resp-1", "previous_response_id", "invalid_value"),
        ("background", True, "background", "unsupported_value"),
        ("tools", [{"type": "web_search"}], "tools", "unsupported_value"),
        ("input", [], "input", "invalid_value"),
        ("input", "1 " * 2_000, "input", "context_length_exceeded"),
        ("text", {"format": {"type": "json_schema", "name": "x"}}, "text", "invalid_value"),
        ("n", 2, "n", "unknown_parameter"),
        ("model", "other", "model", "model_not_found"),
    ],
)
def test_what_is_not_supported_is_refused(field: str, value: Any, param: str, code: str, live: Live) -> None:
    body = {"model": "tiny", "input": "1 + 2 =", field: value}
    refusal = openai.NotFoundError if field == "model" else openai.BadRequestError
    with pytest.raises(refusal) as error:
        live.client().responses.create(model="tiny", input="", extra_body=body)
    assert (error.value.param, error.value.code) == (param, code), error.value.message
    live.until_idle()
