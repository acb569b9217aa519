"""What a program asks over HTTP becomes calls: keys, retries, limits, and tokens that are kept."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import socket
import sys
import threading
from typing import Any

import httpx
import pytest

from octetrl.config.environment import AgentConfig
from octetrl.environments.dialogue import Failed
from octetrl.environments.programs import CommandEnvironment, Model
from octetrl.environments.turns import Conversation
from octetrl.records import GenerationRequest, RolloutStatus, Task
from octetrl.rollout.history import History
from tests.unit.agents.programs import CONTEXT, FAMILY, Program, played
from tests.unit.rollout.templates import tokenizer_of


def body(*said: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(said)]
    return {"model": "any", "messages": messages, **fields}


async def said(client: httpx.AsyncClient, asked: dict[str, Any], **headers: str) -> str:
    answer = await client.post("/chat/completions", json=asked, headers=headers)
    return str(answer.raise_for_status().json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize(
    ("history", "answer", "segments"),
    [
        ("template", "so 15", [2]),
        ("template", "<think>\nhm\n</think>\n\nso 15", [1, 1]),
        ("recorded", "<think>\nhm\n</think>\n\nso 15", [2]),
    ],
)
def test_a_loop_keeps_its_tokens(history: History, answer: str, segments: list[int]) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        first = await said(client, body("7 + 8 ="))
        assert first == answer
        return await said(client, body("7 + 8 =", first, "sure?"))

    rollout, session = played(asks, lambda *_: answer, history)
    assert rollout.status is RolloutStatus.SCORED and rollout.reward == 2
    assert [len(turns) for turns in rollout.segments] == segments
    tokenizer = tokenizer_of(FAMILY)
    first, second = (request.prompt_token_ids for request in session.submitted)
    if history == "template":
        for prompt, texts in ((first, ["7 + 8 ="]), (second, ["7 + 8 =", answer, "sure?"])):
            messages = body(*texts)["messages"]
            written = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert tokenizer.decode(prompt) == written
    else:
        assert second[: len(first) + 1] == (*first, tokenizer.encode(answer)[0])
        assert tokenizer.decode(second).count("hm") == 1
    assert session.submitted[1].continues == ("agent/0.0.0", 0)


def test_a_marked_retry_joins_or_replays_and_an_unmarked_repeat_is_a_new_call() -> None:
    def says(request: GenerationRequest, chance: random.Random) -> str:
        return f"so {chance.randrange(10**6)}"

    async def asks(client: httpx.AsyncClient, model: Model) -> list[str]:
        asked, retry = body("7 + 8 ="), {"x-stainless-retry-count": "1"}
        together = await asyncio.gather(said(client, asked), *(said(client, asked, **retry) for _ in range(2)))
        again = [await said(client, asked, **retry), await said(client, asked)]
        keys = [await said(client, asked, **{"idempotency-key": key}) for key in "aab"]
        assert keys[0] == keys[1] and again[0] in together
        return [*together, *again, *keys]

    rollout, session = played(asks, says)
    assert rollout.metrics["agent/joined_retries"] >= 3  # the first two may arrive before what they retry
    assert len(session.submitted) == rollout.reward == 8 - rollout.metrics["agent/joined_retries"]


def test_a_replayed_stream_has_the_same_answer() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> list[str]:
        asked = body("7 + 8 =", stream=True)
        first = await client.post("/chat/completions", json=asked)
        again = await client.post("/chat/completions", json=asked, headers={"x-stainless-retry-count": "1"})
        texts = [
            "".join(
                json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                for line in answer.text.splitlines()
                if line.startswith("data: {")
            )
            for answer in (first, again)
        ]
        assert texts == ["so 15", "so 15"]
        return texts

    rollout, session = played(asks)
    assert rollout.detail is None and len(session.submitted) == 1 == len(rollout.turns)


def test_an_answer_under_a_grammar_is_served_and_not_trained() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        await said(client, body("7 + 8 =", response_format={"type": "json_object"}))
        return await said(client, body("7 + 8 ="))

    rollout, _ = played(asks)
    assert rollout.metrics["agent/constrained_tokens"] == len(rollout.turns[0].completion.token_ids) > 0
    assert (
        rollout.metrics["agent/sampled_tokens"] == 2 * rollout.metrics["agent/constrained_tokens"]
        and len(rollout.turns) == 1
    )


def test_a_session_is_another_key_and_may_be_answered_without_being_trained() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> None:
        for session in ("first", "judge", "again"):
            model.open_session(session, trains=session != "judge")
        shared = {"authorization": "Bearer EMPTY"}
        for session in ("first", "judge", "judge"):
            await said(client, body("7 + 8 =", session), **shared, **{"x-session-id": session})
        model.open_session("first", trains=False)  # an attempt that was given up
        await said(client, body("9"), **shared, **{"x-session-id": "again"})
        unknown = await client.post("/chat/completions", json=body("9"), headers={**shared, "x-session-id": "other"})
        assert unknown.status_code == 401

    rollout, session = played(asks)
    assert rollout.reward == 4 and len(rollout.turns) == 1
    assert rollout.turns[0].prompt_token_ids == session.submitted[3].prompt_token_ids


@pytest.mark.parametrize("status", [RolloutStatus.ENVIRONMENT_TIMEOUT, RolloutStatus.UNFINISHED])
def test_an_agent_may_name_the_status(status: RolloutStatus) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> None:
        await said(client, body("7 + 8 ="))
        raise Failed(status, "it took a day")

    rollout, _ = played(asks)
    assert (rollout.status, rollout.detail) == (status, "it took a day")
    assert rollout.reward == (1 if status is RolloutStatus.UNFINISHED else None)


@pytest.mark.parametrize("kind", ["context", "calls"])
def test_what_a_program_has_used_up_is_its_apis_error_and_the_rollout_is_scored(kind: str) -> None:
    codes = []

    async def asks(client: httpx.AsyncClient, model: Model) -> None:
        await said(client, body("7 + 8 ="))
        asked = body("so " * CONTEXT if kind == "context" else "8 + 9 =")
        answer = await client.post("/chat/completions", json=asked)
        codes.append((answer.status_code, answer.json()["error"]["code"]))
        answer.raise_for_status()

    rollout, _ = played(asks, max_turns=1 if kind == "calls" else 9)
    assert codes == [(400, "context_length_exceeded") if kind == "context" else (403, "calls_used_up")]
    assert rollout.status is RolloutStatus.UNFINISHED and rollout.reward == 1


def test_an_agent_whose_time_is_over_is_scored_on_what_is_left() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> None:
        await said(client, body("7 + 8 ="))
        await asyncio.sleep(60)

    rollout, _ = played(asks, agent_seconds=2.0)
    assert (rollout.status, rollout.reward) == (RolloutStatus.UNFINISHED, 1), rollout.detail


def test_a_program_that_goes_on_after_an_error_of_the_context_is_scored() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        assert (await client.post("/chat/completions", json=body("so " * CONTEXT))).status_code == 400
        return await said(client, body("7 + 8 ="))

    assert played(asks)[0].status is RolloutStatus.SCORED


def test_a_sealed_key_records_nothing_and_what_runs_is_cancelled() -> None:
    late: list[Any] = []
    arrived = threading.Event()

    def says(request: GenerationRequest, chance: random.Random) -> str:
        if request.id == "agent/0.0.0":
            return "so 15"
        arrived.set()
        return ""

    async def ask_late(model: Model) -> None:
        async with httpx.AsyncClient(base_url=model.base_url, headers={"x-api-key": model.api_key}) as client:
            late.append((await client.post("/chat/completions", json=body("never"))).status_code)
            late.append((await client.post("/chat/completions", json=body("too late"))).status_code)

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        text = await said(client, body("7 + 8 ="))
        late.append(asyncio.create_task(ask_late(model)))
        await asyncio.to_thread(arrived.wait, 60)
        return text

    async def finish(self: Program, conversation: Conversation) -> None:
        await late[0]

    Program.finish = finish  # type: ignore[attr-defined]
    try:
        rollout, session = played(asks, says)
    finally:
        del Program.finish  # type: ignore[attr-defined]
    assert rollout.status is RolloutStatus.SCORED and rollout.reward == 1 and len(rollout.turns) == 1
    assert (late[1:], session.cancelled) == ([409, 401], ["agent/0.0.1"])
    assert rollout.metrics["agent/stragglers"] == 1
    assert rollout.metrics["agent/sampled_tokens"] == len(rollout.turns[0].completion.token_ids)


def test_an_unknown_key_is_refused_and_a_path_may_have_the_key() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        answer = await client.post("/chat/completions", json=body("x"), headers={"authorization": "Bearer octetrl-x"})
        assert answer.status_code == 401
        in_path = model.base_url.replace("/v1", f"/r/{model.api_key}/v1/chat/completions")
        return str((await client.post(in_path, json=body("7 + 8 ="), headers={"authorization": ""})).status_code)

    rollout, _ = played(asks)
    assert rollout.status is RolloutStatus.SCORED and rollout.reward == 1


def test_broken_bodies_are_errors_of_one_line_and_nothing_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        for nested in (b"[" * 10**5, b'{"metadata":' + b"[" * 10**5):
            assert (await client.post("/chat/completions", content=nested)).status_code == 400
        head = f"POST /r/{model.api_key}/v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\nabc"
        with socket.create_connection(("127.0.0.1", client.base_url.port)) as connection:
            connection.sendall(head.encode())
        await asyncio.sleep(0.1)
        return await said(client, body("7 + 8 ="))

    assert played(asks)[0].status is RolloutStatus.SCORED and capsys.readouterr().err == ""


def test_answers_of_one_request_count_as_calls() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> list[int]:
        asked = (body("7 + 8 =", n=number) for number in (10**9, 3, 2))
        return [(await client.post("/chat/completions", json=one)).status_code for one in asked]

    rollout, session = played(asks, max_turns=4)
    assert [request.num_siblings for request in session.submitted] == [3]
    assert rollout.status is RolloutStatus.SCORED and rollout.reward == 3


@pytest.mark.parametrize("path", ["chat/completions", "messages"])
def test_a_limit_beyond_the_context_is_the_room_that_is_left(path: str) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        answer = await client.post(f"/{path}", json=body("7 + 8 =", max_tokens=64_000))
        return answer.raise_for_status().text

    rollout, _ = played(asks)
    assert rollout.status is RolloutStatus.SCORED and rollout.text == "so 15"


def test_a_server_of_agents_allows_more_open_files_than_shells_do() -> None:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen: list[int] = []

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return await said(client, body("7 + 8 ="))

    low = len(os.listdir("/proc/self/fd")) + 64  # of the other tests of this process, and a few
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, most))
        assert played(asks)[0].status is RolloutStatus.SCORED
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    assert seen[0] > low or seen[0] == most


def test_a_command_that_was_killed_is_no_reward_and_what_it_asked_is_not_trained() -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        await said(client, body("7 + 8 ="))
        own = CommandEnvironment([], lambda *_: 1.0, AgentConfig(command=(sys.executable, "-S", "-c", killed)))
        return await own.agent(Task("t", "7 + 8 ="), model)

    rollout, _ = played(asks)
    assert (rollout.status, rollout.reward) == (RolloutStatus.AGENT_ERROR, None)
    assert rollout.detail is not None and "exit code -9" in rollout.detail


def test_an_agent_that_made_no_call_has_no_reward() -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        return "15"

    rollout, _ = played(asks)
    assert rollout.status is RolloutStatus.AGENT_ERROR and rollout.reward is None
