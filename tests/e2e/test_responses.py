"""/v1/responses by the official client: the same answers as a chat, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live_server import Live, live_server
from tests.e2e.official_client import openai

ASK: dict[str, Any] = {"model": "tiny", "input": "1 + 2 =", "extra_body": {"seed": 7}, "max_output_tokens": 12}


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[Live]:
    with live_server(model) as server:
        yield server


def test_it_is_the_chats_answer(live: Live) -> None:
    client = live.client()
    messages: list[Any] = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 2 ="}]
    chat = client.chat.completions.create(model="tiny", messages=messages, seed=7, max_tokens=12)
    parts: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "1 + 2 ="}]}]
    for asked in (
        ASK | {"instructions": "Add."},
        ASK | {"input": messages},
        ASK | {"instructions": "Add.", "input": parts},
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
    whole = client.responses.create(**ASK)
    events = list(client.responses.create(**ASK, stream=True))
    kinds = [event.type.removeprefix("response.") for event in events]
    ends = ["output_text.done", "content_part.done", "output_item.done", str(whole.status)]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"] and kinds[-4:] == ends
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))  # type: ignore[union-attr]
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last: Any = events[-1]
    assert said == whole.output_text == last.response.output_text
    assert last.response.usage == whole.usage
    with client.responses.stream(**ASK) as stream:  # the client's own accumulation
        if whole.status == "completed":
            assert stream.get_final_response().output_text == said
        else:
            assert [event.type for event in stream][-1] == "response.incomplete"


def test_a_conversation_goes_on(live: Live) -> None:
    client = live.client()
    first = client.responses.create(**ASK)
    items: list[Any] = [{"role": "user", "content": "1 + 2 ="}, *(one.to_dict() for one in first.output)]
    again = client.responses.create(**ASK | {"input": [*items, {"role": "user", "content": "and 1?"}]})
    assert first.usage is not None and again.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens


def test_json_follows_its_schema(live: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
    answer = live.client().responses.create(**ASK | {"max_output_tokens": 100}, text=form)
    assert answer.status == "incomplete" or json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.text is not None and answer.text.format is not None and answer.text.format.type == "json_schema"


@pytest.mark.parametrize(
    ("field", "value", "param", "code"),
    [
        ("previous_response_id", "resp-1", "previous_response_id", "invalid_value"),
        ("background", True, "background", "unsupported_value"),
        ("tools", [{"type": "web_search"}], "tools", "invalid_value"),
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
