"""What users of vLLM, lm-eval and Open WebUI send: further log-probs, echo, penalties, JSON, demanded tools, tokens."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octetrl.data.tokenizer import load_tokenizer
from tests.e2e import tiny_run
from tests.e2e.live_server import Live, live_server
from tests.e2e.official_client import openai
from tests.e2e.test_server import ASK, TOOLS_TEMPLATE, WEATHER

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder = tiny_run.make_model(tmp_path_factory.mktemp("fields") / "model")
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TOOLS_TEMPLATE
    tokenizer.save_pretrained(folder)
    with live_server(folder, origins=("https://chat.example",), access_log=True) as server:
        yield server


def post(live: Live, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
    return httpx.post(f"{live.url}{path}", json=body, timeout=60, **options)


# ---------------------------------------------------------------- log-probs


def test_a_chat_shows_the_likeliest_tokens(live: Live) -> None:
    create = live.client().chat.completions.create
    asked = {**ASK, "seed": 3, "max_tokens": 12, "logprobs": True, "temperature": 0}
    plain, shown = create(**asked), create(**asked, top_logprobs=5)
    assert shown.choices[0].message == plain.choices[0].message
    entries = shown.choices[0].logprobs.content
    for entry, bare in zip(entries, plain.choices[0].logprobs.content, strict=True):
        assert (entry.token, entry.logprob) == (bare.token, bare.logprob)
        assert len(entry.top_logprobs) == 5 and entry.top_logprobs[0].logprob == entry.logprob  # greedy
    told = [one for chunk in create(**asked, top_logprobs=5, stream=True) for one in chunk.choices]
    assert [e for one in told if one.logprobs for e in one.logprobs.content or []] == entries


@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_has_the_logprobs_of_its_sampling(live: Live, stream: bool) -> None:
    complete = live.client().completions.create
    common: dict[str, Any] = {"model": "tiny", "seed": 2, "temperature": 0.7}
    first = complete(
        **common, prompt="1 + 2 =", max_tokens=14, logprobs=3, echo=True,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )  # fmt: skip
    choice = first.choices[0]
    ids = [*choice.model_dump()["prompt_token_ids"], *choice.model_dump()["token_ids"]]
    assert choice.text.startswith("1 + 2 =") and choice.logprobs.token_logprobs[0] is None
    again: Any = complete(**common, prompt=ids, max_tokens=0, logprobs=3, echo=True, stream=stream)
    if stream:
        chunks = list(again)
        found = {
            name: [one for chunk in chunks for one in getattr(chunk.choices[0].logprobs, name)]
            for name in ("token_logprobs", "top_logprobs", "tokens")
        }
        reason = chunks[-1].choices[0].finish_reason
    else:
        found, reason = again.choices[0].logprobs.model_dump(), again.choices[0].finish_reason
        assert again.usage.completion_tokens == 0 and again.choices[0].text == choice.text
    assert reason == "length"
    assert found["token_logprobs"] == choice.logprobs.token_logprobs
    assert found["tokens"] == choice.logprobs.tokens and len(found["tokens"]) == len(ids)
    assert found["top_logprobs"] == choice.logprobs.top_logprobs
    assert all(1 <= len(one) <= 4 for one in found["top_logprobs"][1:])


def test_prompt_logprobs_are_in_vllms_form(live: Live) -> None:
    body = {"model": "tiny", "prompt": "1 + 2 =", "max_tokens": 1, "prompt_logprobs": 2, "return_token_ids": True}
    choice = post(live, "/v1/completions", body).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None and len(others) == len(choice["prompt_token_ids"]) - 1
    for token, entry in zip(choice["prompt_token_ids"][1:], others, strict=True):
        assert str(token) in entry and 2 <= len(entry) <= 3
        best = max(entry.values(), key=lambda one: one["logprob"])
        assert best["rank"] == 1
    chat = post(live, "/v1/chat/completions", {**ASK, "max_tokens": 1, "prompt_logprobs": 0}).json()
    assert chat["prompt_logprobs"][0] is None and len(chat["prompt_logprobs"]) > 5


def test_a_served_harness_scores_answers(live: Live) -> None:
    """lm-eval's request for log-likelihoods, and how it reads the answer (lm_eval/models/openai_completions.py)."""
    tokens = post(live, "/tokenize", {"prompt": "1 + 2 = 3"}).json()["tokens"]
    context = len(tokens) - 2
    body = {
        "model": "tiny", "prompt": [tokens], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234,
        "echo": True,
    }  # fmt: skip
    answer = post(live, "/v1/completions", body).json()
    logprobs = answer["choices"][0]["logprobs"]
    scores, tops = logprobs["token_logprobs"][context:-1], logprobs["top_logprobs"][context:-1]
    assert len(scores) == 2 and all(score < 0 for score in scores)
    assert all(max(top.values()) >= score for score, top in zip(scores, tops, strict=True))


# ---------------------------------------------------------------- sampling


def test_penalties_and_least_lengths_change_what_is_sampled(live: Live) -> None:
    complete = live.client().completions.create
    common: dict[str, Any] = {"model": "tiny", "prompt": "7", "seed": 1, "max_tokens": 24, "temperature": 0}
    ids = {"return_token_ids": True, "ignore_eos": True}

    def drawn(**fields: Any) -> list[int]:
        extra = {**ids, **fields.pop("extra_body", {})}
        return complete(**common, **fields, extra_body=extra).choices[0].model_dump()["token_ids"]

    free = drawn()
    assert drawn(presence_penalty=0, frequency_penalty=0, logit_bias={}, extra_body={"repetition_penalty": 1.0}) == free
    assert len(set(drawn(extra_body={"repetition_penalty": 1.8}))) > len(set(free))
    assert len(set(drawn(frequency_penalty=2.0))) > len(set(free))
    assert set(drawn(logit_bias={"40": 100})) == {40}
    eos = live.engine._admission.eos_token_ids
    ended = drawn(logit_bias={str(token): 100 for token in eos}, extra_body={"ignore_eos": False})
    assert len(ended) == 1
    late = drawn(logit_bias={str(token): 100 for token in eos}, extra_body={"ignore_eos": False, "min_tokens": 9})
    assert len(late) == 10 and not eos & set(late[:9])


def test_the_model_may_be_left_out(live: Live) -> None:
    bodies = {
        "/v1/completions": {"prompt": "1 + 2 =", "max_tokens": 2},
        "/v1/chat/completions": {"messages": ASK["messages"], "max_tokens": 2},
        "/v1/responses": {"input": "1 + 2 =", "max_output_tokens": 2},
    }
    for path, body in bodies.items():
        answer = post(live, path, body)
        assert answer.status_code == 200 and answer.json()["model"] == "tiny", answer.text


def test_values_that_change_nothing_are_accepted(live: Live) -> None:
    neutral = {
        "repetition_penalty": 1.0, "skip_special_tokens": True, "spaces_between_special_tokens": True, "best_of": 1,
        "use_beam_search": False, "length_penalty": 1.0, "include_stop_str_in_output": False, "min_tokens": 0,
        "presence_penalty": 0.0, "frequency_penalty": None, "logit_bias": None, "stop_token_ids": None,
    }  # fmt: skip
    body = {"model": "tiny", "prompt": "1", "seed": 1, "max_tokens": 5}
    plain = post(live, "/v1/completions", body).json()["choices"]
    assert post(live, "/v1/completions", {**body, **neutral}).json()["choices"] == plain


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"presence_penalty": 3}, "presence_penalty: 3 is not valid"),
        ({"logprobs": 21}, "logprobs: 21 is not valid"),
        ({"skip_special_tokens": False}, "skip_special_tokens: False is not supported"),
        ({"logit_bias": {"100000": 1}}, "logit_bias is \\[100000\\]; give token ids below"),
        ({"min_tokens": 8, "max_tokens": 4}, "400 - min_tokens is 8; give 0 to max_tokens"),
        ({"stop_token_ids": [100000]}, "stop_token_ids is \\[100000\\]; give token ids below"),
        ({"temperature": 1e-40}, "temperature is 1e-40; give 0 \\(greedy\\), or 1e-08 or more"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty: 1e-40 is not valid"),
        ({"top_k": 10**20}, "top_k: 100000000000000000000 is not valid"),
    ],
)
def test_what_cannot_be_followed_is_refused(live: Live, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        live.client().completions.create(model="tiny", prompt="1", extra_body=fields)


# ---------------------------------------------------------------- grammars


def test_json_modes_give_json(live: Live) -> None:
    pytest.importorskip("llguidance")
    create = live.client().chat.completions.create
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    answer = create(**ASK, seed=1, n=3, max_tokens=60, response_format=form)
    ended = [one for one in answer.choices if one.finish_reason == "stop"]
    assert len(ended) >= 2
    for choice in ended:
        value = json.loads(choice.message.content or "")
        assert set(value) == {"n", "ok"} and 0 <= value["n"] <= 99 and isinstance(value["ok"], bool)
    loose = create(**ASK, seed=2, max_tokens=20, response_format={"type": "json_object"})
    for choice in loose.choices:
        assert (choice.message.content or "").lstrip().startswith("{")
    for schema in ({"type": "no"}, {"$ref": "#"}):
        with pytest.raises(openai.BadRequestError, match="the schema can't be followed"):
            create(**ASK, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_demanded_tools_are_called(live: Live, choice: Any) -> None:
    pytest.importorskip("llguidance")
    closed = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
    weather = {
        "type": "function",
        "function": {"name": "weather", "parameters": {**closed, "additionalProperties": False}},
    }
    answer = live.client().chat.completions.create(
        **ASK, seed=4, n=2, max_tokens=110, tools=[weather], tool_choice=choice, parallel_tool_calls=False
    )
    ended = [one for one in answer.choices if one.finish_reason == "tool_calls"]
    assert ended
    for one in ended:
        (call,) = one.message.tool_calls or []
        assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_an_unknown_tool_is_refused(live: Live) -> None:
    create = live.client().chat.completions.create
    with pytest.raises(openai.BadRequestError, match="there is no tool 'sun'; the tools are: weather"):
        create(**ASK, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "sun"}})
    with pytest.raises(openai.BadRequestError, match="'required' needs tools"):
        create(**ASK, tool_choice="required")


CALLED = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "[" * 100_000}}]}
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
REFUSED = {
    "a program instead of the template": {"chat_template_kwargs": {"chat_template": ENDLESS}},
    "an option of the tokenizer": {"chat_template_kwargs": {"tokenize": True}},
    "messages twice": {"chat_template_kwargs": {"messages": []}},
    "likeliest tokens without log-probs": {"top_logprobs": 5},
    "a tool without a name": {"tools": [{"type": "function", "function": {}}], "tool_choice": "required"},
    "a name that is a number": {"tools": [{"type": "function", "function": {"name": 5}}]},
    "no schema": {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
    "deep arguments": {"messages": [*ASK["messages"], CALLED]},
}


@pytest.mark.parametrize("given", REFUSED)
def test_what_would_break_the_server_or_its_template_is_refused(live: Live, given: str) -> None:
    answer = post(live, "/v1/chat/completions", {**ASK, "max_tokens": 1, **REFUSED[given]})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, next(iter(REFUSED[given]))) and "Value error" not in str(error)
    assert "\n" not in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_arguments_that_are_no_json_are_refused(live: Live, number: str) -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": f'{{"a": {number}}}'}}
    messages = [*ASK["messages"], {"role": "assistant", "tool_calls": [call]}]
    answer = post(live, "/v1/chat/completions", {**ASK, "messages": messages, "max_tokens": 1})
    assert answer.status_code == 400 and "are not a JSON object" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "schema",
    [
        {"$id": "x", "$ref": "x"},
        {"type": "object", "properties": {f"p{place}": {"type": "string"} for place in range(2100)}},
    ],
)
def test_a_schema_beyond_a_limit_of_the_library_is_refused_before_the_answer(live: Live, schema: Any) -> None:
    pytest.importorskip("llguidance")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = post(live, "/v1/chat/completions", {**ASK, "response_format": form})
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and "the schema can't be followed: " in message and "<state>" not in message


# ---------------------------------------------------------------- around it


def test_tokens_of_texts_and_chats(live: Live) -> None:
    made = post(live, "/tokenize", {"model": "tiny", "prompt": "1 + é", "return_token_strs": True}).json()
    tokenizer = load_tokenizer(live.folder)
    assert made["tokens"] == tokenizer("1 + é")["input_ids"] and made["count"] == len(made["tokens"])
    assert len(made["token_strs"]) == made["count"] and made["max_model_len"] == 512
    assert post(live, "/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": tokenizer.decode(made["tokens"])}
    chat = post(live, "/tokenize", {"messages": ASK["messages"]}).json()["tokens"]
    body = {**ASK, "max_tokens": 1, "return_token_ids": True}
    assert chat == post(live, "/v1/chat/completions", body).json()["prompt_token_ids"]
    assert post(live, "/detokenize", {"tokens": [1 << 40]}).status_code == 400
    both = post(live, "/tokenize", {"prompt": "1", "messages": ASK["messages"]})
    assert both.status_code == 400 and "messages or tools are given as well" in both.json()["error"]["message"]
    assert httpx.get(f"{live.url}/version").json()["version"]


def test_a_browser_of_an_allowed_page_may_ask(live: Live) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = httpx.options(f"{live.url}/v1/completions", headers={"Origin": "https://chat.example", **ask})
    assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
    other = httpx.options(f"{live.url}/v1/completions", headers={"Origin": "https://elsewhere.example", **ask})
    assert "access-control-allow-origin" not in other.headers


def test_every_request_leaves_a_line(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="octetrl.access"):
        post(live, "/v1/completions", {"model": "nobody", "prompt": "1"})
        httpx.get(f"{live.url}/version")
        live.until(lambda: len(caplog.messages) >= 2)
    assert any("'POST /v1/completions' 404" in line for line in caplog.messages)
    assert any("'GET /version' 200" in line for line in caplog.messages)


def test_a_port_without_a_key_is_warned_of(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from octetrl.cli import serve as command
    from octetrl.server import serve as run

    monkeypatch.setattr(run, "serve", lambda *args, **kwargs: None)
    options: dict[str, Any] = {"port": 8123, "max_body_mb": 8.0, "calibrate_on": None, "api_key": None}
    command.serve(str(model), host="0.0.0.0", without_key=True, **options)
    assert "warning: anyone who can reach 0.0.0.0:8123" in capsys.readouterr().err
    command.serve(str(model), host="127.0.0.1", **options)
    assert not capsys.readouterr().err
