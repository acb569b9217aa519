"""What a program sends back is what was recorded, however it writes it: one segment, and each sampled token once."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, BadRequestError

from octetrl.agents.capture import OpenRollout
from octetrl.environments.programs import Model
from octetrl.records import GenerationRequest, RolloutStatus
from octetrl.server.intake import Answer
from tests.unit.agents.programs import FAMILY, played
from tests.unit.agents.test_capture import body, said
from tests.unit.agents.test_dialects import SCHEMA, SYSTEM
from tests.unit.rollout.templates import tokenizer_of

CALL = '<tool_call>\n{"name":"add","arguments":{"b":"é","a":7}}\n</tool_call>'
ANSWERS = (f"<think>\nhm\n</think>\n\nI add.\n{CALL}", "<think>\nso\n</think>\n\nIt is 15.", "Sure.")
TOOLS = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}]
Messages = list[dict[str, Any]]


def as_it_came(messages: Messages) -> Messages:
    return messages


def with_reordered_arguments(messages: Messages) -> Messages:
    (call,) = messages[0]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 7, "b": "é"}
    call["function"]["arguments"] = '{"a":7,   "b":"\\u00e9"}'
    return [{**messages[0], "tool_calls": [{**call, "id": "another"}]}, {**messages[1], "tool_call_id": "another"}]


def without_thoughts(messages: Messages) -> Messages:
    return [{**messages[0], "content": "I add.", "reasoning_content": "hm"}, messages[1]]


def in_parts(messages: Messages) -> Messages:
    parts = [{"type": "text", "text": "I "}, {"type": "text", "text": "add."}]
    return [{**messages[0], "content": parts}, messages[1]]


def split(messages: Messages) -> Messages:
    text, calls = {**messages[0], "tool_calls": None}, {**messages[0], "content": None}
    return [text, calls, messages[1]]


@pytest.mark.parametrize("sent", [as_it_came, with_reordered_arguments, without_thoughts, in_parts, split])
def test_messages_that_say_what_was_recorded_keep_its_tokens(sent: Callable[[Messages], Messages]) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        messages: Messages = [{"role": "user", "content": "7 + 8 ="}]
        for _ in ANSWERS:
            answer = await client.post("/chat/completions", json={"messages": messages, "tools": TOOLS})
            message = answer.raise_for_status().json()["choices"][0]["message"]
            if calls := message.get("tool_calls"):
                result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "15"}
                messages += sent([message, result])
            else:
                messages += [{"role": "assistant", "content": message["content"]}, {"role": "user", "content": "sure?"}]
        return str(message["content"])

    answers = iter(ANSWERS)
    rollout, session = played(asks, lambda *_: next(answers))
    assert rollout.detail is None and [len(turns) for turns in rollout.segments] == [3]
    tokenizer = tokenizer_of(FAMILY)
    whole = session.submitted[-1].prompt_token_ids
    text = tokenizer.decode(whole)
    assert all(text.count(answer) == 1 for answer in ANSWERS[:2]) and text.count("<tool_response>\n15\n") == 1
    before = session.submitted[0].prompt_token_ids
    recorded = (*before, *tokenizer.encode(ANSWERS[0]), tokenizer.eos_token_id)
    assert whole[: len(recorded)] == recorded


def test_a_message_that_says_another_thing_is_another_branch() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        first = await said(client, body("7 + 8 ="))
        await said(client, body("7 + 8 =", f"{first}!", "sure?"))
        return await said(client, body("7 + 8 =", first, "sure?"))

    rollout, session = played(asks)
    assert [len(turns) for turns in rollout.segments] == [1, 2]
    assert "so 15!" in tokenizer_of(FAMILY).decode(session.submitted[1].prompt_token_ids)


def test_a_request_with_other_tools_is_another_branch() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        first = await said(client, body("7 + 8 ="))
        await said(client, body("7 + 8 =", first, "sure?"))
        return await said(client, body("7 + 8 =", first, "sure?", tools=TOOLS))

    rollout, session = played(asks)
    assert rollout.detail is None and [len(turns) for turns in rollout.segments] == [2, 1]
    texts = [tokenizer_of(FAMILY).decode(request.prompt_token_ids) for request in session.submitted]
    assert ["adds" in text for text in texts] == [False, False, True]


def test_equal_answers_with_other_thoughts_are_told_apart_where_the_program_keeps_them() -> None:
    answers = iter([f"<think>\n{thought}\n</think>\n\n15" for thought in ("one", "two")] + ["a", "b", "c"])

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        both = [await said(client, body("7 + 8 =")) for _ in range(2)]
        for first in (*both, "15"):
            await said(client, body("7 + 8 =", first, "sure?"))
        return first

    rollout, session = played(asks, lambda *_: next(answers))
    texts = [tokenizer_of(FAMILY).decode(request.prompt_token_ids) for request in session.submitted[2:]]
    assert [("one" in text, "two" in text) for text in texts] == [(True, False), (False, True), (True, False)]
    assert sorted(len(turns) for turns in rollout.segments) == [1, 2, 2]


def test_a_response_continues_an_earlier_one_by_its_id() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        async with AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as own:
            ask = partial(own.responses.create, model="m")
            first = await ask(input="7 + 8 =", instructions=SYSTEM)
            second = await ask(input="sure?", instructions=SYSTEM, previous_response_id=first.id)
            await ask(input="really?", instructions=SYSTEM, previous_response_id=second.id)
            await ask(input="and?", previous_response_id=first.id)
            with pytest.raises(BadRequestError, match="previous_response_id"):
                await ask(input="sure?", previous_response_id="resp-x")
        return second.output_text

    rollout, session = played(asks)
    assert rollout.detail is None and [len(turns) for turns in rollout.segments] == [3, 1]
    texts = [tokenizer_of(FAMILY).decode(request.prompt_token_ids) for request in session.submitted]
    assert [text.count(SYSTEM) for text in texts] == [1, 1, 1, 0]  # instructions are each request's own
    assert [text.count("7 + 8 =") for text in texts] == [1] * 4


def test_what_is_sampled_is_trained_discarded_or_constrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches, repeats, a grammar, and two answers whose client had gone before: a retry fetches the second."""
    asked, left = threading.Event(), threading.Event()
    leave = OpenRollout.leave

    def leave_seen(self: OpenRollout, answer: Answer) -> None:
        leave(self, answer)
        left.set()

    def says(request: GenerationRequest, chance: random.Random) -> str:
        if "gone" in tokenizer_of(FAMILY).decode(request.prompt_token_ids):
            asked.set()
            assert left.wait(60)
        return f"so {chance.randrange(10**6)}"

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        first, again = [await said(client, body("7 + 8 =")) for _ in range(2)]
        assert first != again
        await asyncio.gather(*(said(client, body("7 + 8 =", first, text)) for text in ("a", "b")))
        await said(client, body("7 + 8 =", response_format={"type": "json_object"}))
        for question in ("gone 1", "gone 2"):
            left.clear()
            asked.clear()
            task = asyncio.create_task(said(client, body(question)))
            await asyncio.to_thread(asked.wait, 60)
            task.cancel()
        for text in "cde":  # until the answer is there
            await said(client, body("7 + 8 =", first, text))
        return await said(client, body("gone 2"), **{"x-stainless-retry-count": "1"})

    monkeypatch.setattr(OpenRollout, "leave", leave_seen)
    rollout, session = played(asks, says)
    assert rollout.status is RolloutStatus.SCORED and len(session.submitted) == 10 == rollout.reward
    trained = sum(len(turn.completion.token_ids) for turn in rollout.turns)
    counted = {name: rollout.metrics[f"agent/{name}_tokens"] for name in ("sampled", "discarded", "constrained")}
    assert counted["constrained"] > 0 and counted["discarded"] > 0
    assert rollout.result in {turn.completion.text for turn in rollout.turns}
    assert trained + counted["discarded"] + counted["constrained"] == counted["sampled"]
    assert len(rollout.turns) == 8
    assert [line["parent"] for line in rollout.calls] == [None, None, 0, 0, None, None, None, 0, 0, 0]
    assert rollout.calls[2]["messages"][0]["text"] in "ab" and len(rollout.calls[2]["messages"]) == 1
    left = [(line["text"], *line.keys() & {"discarded", "constrained"}) for line in rollout.calls if "turn" not in line]
    assert [why for _, why in left] == ["constrained", "discarded"]
    assert sorted(line["turn"] for line in rollout.calls if "turn" in line) == list(range(8))
