"""Three APIs for one conversation: the policy sees equal tokens, and a stream says what a whole answer says."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from octetrl.environments.programs import Model
from octetrl.records import RolloutStatus
from tests.unit.agents.programs import CONTEXT, played

SYSTEM, QUESTION, RESULT = "Be brief.", "7 + 8 =", "15"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7}}\n</tool_call>'
ANSWERS = (f"I add.\n{CALL}\n{CALL}", "It is 15.")
ARGUMENTS = {"a": 7}


async def chat(client: httpx.AsyncClient, model: Model, streams: bool) -> str:
    tools: Any = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as own:
        for _ in ANSWERS:
            if streams:
                async with own.chat.completions.stream(model="m", messages=messages, tools=tools) as stream:
                    message: Any = (await stream.get_final_completion()).choices[0].message
            else:
                message = (
                    (await own.chat.completions.create(model="m", messages=messages, tools=tools)).choices[0].message
                )
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                assert json.loads(call.function.arguments) == ARGUMENTS
                messages.append({"role": "tool", "tool_call_id": call.id, "content": RESULT})
    return str(message.content)


async def responses(client: httpx.AsyncClient, model: Model, streams: bool) -> str:
    tools: Any = [{"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA, "strict": False}]
    items: list[Any] = [{"role": "user", "content": QUESTION}]
    async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as own:
        given = partial(own.responses.create, model="m", instructions=SYSTEM, tools=tools, include=[])
        for _ in ANSWERS:
            if streams:
                async with own.responses.stream(model="m", instructions=SYSTEM, tools=tools, input=items) as stream:
                    answer: Any = await stream.get_final_response()
            else:
                answer = await given(input=items)
            for item in answer.output:
                items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
            for item in answer.output:
                if item.type == "function_call":
                    assert json.loads(item.arguments) == ARGUMENTS
                    items.append({"type": "function_call_output", "call_id": item.call_id, "output": RESULT})
    return str(answer.output_text)


async def messages(client: httpx.AsyncClient, model: Model, streams: bool) -> str:
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    said: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": QUESTION, "cache_control": {"type": "x"}}]}
    ]
    for _ in ANSWERS:
        asked = {"model": "m", "max_tokens": 100, "system": SYSTEM, "tools": tools, "messages": said, "stream": streams}
        counted = await client.post("/messages/count_tokens", json={k: v for k, v in asked.items() if k != "stream"})
        answer = (await client.post("/messages", json=asked)).raise_for_status()
        message = streamed(answer.text) if streams else answer.json()
        assert message["usage"]["input_tokens"] == counted.json()["input_tokens"]
        said.append({"role": "assistant", "content": message["content"]})
        calls = [block for block in message["content"] if block["type"] == "tool_use"]
        assert message["stop_reason"] == ("tool_use" if calls else "end_turn")
        assert all(call["input"] == ARGUMENTS for call in calls)
        if calls:
            results = [{"type": "tool_result", "tool_use_id": call["id"], "content": RESULT} for call in calls]
            said.append({"role": "user", "content": results})
    return "".join(block["text"] for block in message["content"])


def streamed(text: str) -> dict[str, Any]:
    """The message that the events build, as Anthropic's client does."""
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    names = [line[7:] for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events] and names[-1] == "message_stop"
    message, blocks = events[0]["message"], list[Any]()
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "partial": ""})
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                blocks[event["index"]]["text"] += event["delta"]["text"]
            case "content_block_delta":
                blocks[event["index"]]["partial"] += event["delta"]["partial_json"]
            case "message_delta":
                message |= {**event["delta"], "usage": {**message["usage"], **event["usage"]}}
    for block in blocks:
        partial_json = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial_json)
    return {**message, "content": blocks}


@pytest.mark.parametrize("streams", [False, True])
def test_equal_conversations_have_equal_tokens_and_answers(streams: bool) -> None:
    prompts = {}
    for dialect in (chat, responses, messages):
        says = partial(next, iter(ANSWERS))
        rollout, session = played(partial(dialect, streams=streams), lambda *_, says=says: says())
        assert rollout.detail is None and rollout.status is RolloutStatus.SCORED and rollout.reward == 2
        assert rollout.text.endswith(ANSWERS[-1])
        prompts[dialect.__name__] = [request.prompt_token_ids for request in session.submitted]
    assert prompts["chat"] == prompts["responses"] == prompts["messages"]


def test_a_prompt_that_is_too_long_says_so_as_anthropics_clients_expect() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        asked = {"max_tokens": 5, "messages": [{"role": "user", "content": "so " * CONTEXT}]}
        answer = await client.post("/messages", json=asked, headers={"x-api-key": model.api_key, "authorization": ""})
        assert answer.status_code == 400 and answer.json()["type"] == "error"
        assert answer.json()["error"]["message"].startswith("prompt is too long")
        image = {"role": "user", "content": [{"type": "image", "source": {}}]}
        answer = await client.post("/messages", json={"max_tokens": 5, "messages": [image]})
        assert answer.status_code == 400 and "image" in answer.json()["error"]["message"]
        return await chat(client, model, streams=False)

    assert played(asks)[0].status is RolloutStatus.SCORED
