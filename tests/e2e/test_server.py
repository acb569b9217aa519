"""The server by the official client: answers, streams, tools, limits, hanging up, failures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octetrl.data.tokenizer import load_tokenizer
from octetrl.records import GenerationRequest, SamplingParams
from tests.e2e import tiny_run
from tests.e2e.live_server import CONTEXT_LENGTH, Live, live_server, saying
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
    with pytest.raises(openai.BadRequestError, match="form of tool calls is not supported"):
        live.client().chat.completions.create(**ASK, tools=[WEATHER])
