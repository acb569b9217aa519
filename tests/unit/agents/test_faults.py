"""Requests that no API allows, and faults of the server itself: never a hang, a traceback, or a reward."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import httpx
import pytest
import uvicorn

from octetrl.agents.capture import OpenRollout
from octetrl.environments.programs import Model
from octetrl.records import RolloutStatus
from octetrl.system.errors import RunFailed
from tests.unit.agents.programs import played
from tests.unit.agents.test_capture import body, said
from tests.unit.rollout.talking import TalkingSession

USER = {"role": "user", "content": "7 + 8 ="}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", body("x", stop="x" * 10**6)),
    ("chat/completions", body("x", max_tokens=0)),
    ("messages", {"messages": [USER], "max_tokens": 9, "stop_sequences": ["x" * 10**6]}),
    ("messages", {"messages": [USER], "max_tokens": 9, "tools": [{"name": "", "input_schema": {}}]}),
    ("messages", {"messages": [USER], "max_tokens": -1}),
    ("messages/count_tokens", {"messages": [USER], "tools": [{"name": "", "input_schema": {}}]}),
    ("responses", {"input": [{"type": "reasoning"}]}),
    ("responses", {"input": "x", "previous_response_id": "of another rollout"}),
]


def test_what_an_api_does_not_allow_is_an_error_in_its_form(capsys: pytest.CaptureFixture[str]) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        for path, fields in REFUSED:
            answer = await client.post(f"/{path}", json=fields)
            assert answer.status_code == 400, (path, answer.text)
            assert ("param" in answer.json()["error"]) != path.startswith("messages")
        for path in ("messages", "messages/count_tokens", "chat/completions"):
            answer = await client.post(f"/{path}", json={}, headers={"authorization": "Bearer none"})
            assert (answer.status_code, answer.json().get("type")) == (401, "error" if "messages" in path else None)
        return await said(client, body("7 + 8 ="))

    rollout, session = played(asks)
    assert rollout.status is RolloutStatus.SCORED, rollout.detail
    assert len(session.submitted) == len(rollout.turns) == 1 and capsys.readouterr().err == ""


def test_a_fault_of_the_server_is_no_reward_whatever_the_program_makes_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: Any) -> None:
        raise KeyError("a fault of ours")

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        await said(client, body("7 + 8 ="))
        answer = await client.post("/responses", json={"input": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
        return "15"

    monkeypatch.setattr("octetrl.agents.server.responses", broken)
    rollout, _ = played(asks)
    assert (rollout.status, rollout.reward) == (RolloutStatus.GENERATION_ERROR, None)
    assert rollout.detail is not None and "a fault of ours" in rollout.detail and capsys.readouterr().err == ""


def test_a_server_that_ends_in_a_run_ends_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    is_hit = asyncio.Event()

    async def tick(server: uvicorn.Server, _: int) -> bool:
        if is_hit.is_set():
            raise MemoryError("no room")
        return server.should_exit

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        await said(client, body("7 + 8 ="))
        is_hit.set()
        with contextlib.suppress(httpx.HTTPError):
            await client.post("/chat/completions", json=body("8 + 9 ="))
        await asyncio.Event().wait()  # nothing that this agent does ends the run
        raise AssertionError

    monkeypatch.setattr(uvicorn.Server, "on_tick", tick)
    with pytest.raises(RunFailed, match="MemoryError: no room"):
        played(asks)
    assert capsys.readouterr().err == ""


def test_an_answer_whose_stream_was_cut_is_discarded_unless_a_marked_retry_fetches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_answer, has_left = threading.Event(), threading.Event()
    events, leave = TalkingSession.events, OpenRollout.leave

    def left(rollout: OpenRollout, answer: Any) -> None:
        leave(rollout, answer)
        has_left.set()

    monkeypatch.setattr(OpenRollout, "leave", left)
    monkeypatch.setattr(TalkingSession, "events", lambda *given: events(*given) if may_answer.is_set() else [])

    async def cut(client: httpx.AsyncClient, text: str) -> None:
        may_answer.clear()
        has_left.clear()
        async with client.stream("POST", "/chat/completions", json=body(text, stream=True)) as stream:
            assert stream.status_code == 200  # the engine has it, and no part of the answer was sent
        await asyncio.to_thread(has_left.wait, 20)
        may_answer.set()

    async def asks(client: httpx.AsyncClient, model: Model) -> None:
        await cut(client, "7 + 8 =")
        await cut(client, "8 + 9 =")
        retry = {"x-stainless-retry-count": "1"}
        answer = await client.post("/chat/completions", json=body("8 + 9 =", stream=True), headers=retry)
        assert answer.text.count("so 15") and answer.text.rstrip().endswith("[DONE]")
        await said(client, body("9 + 1 ="))

    rollout, session = played(asks)
    assert len(session.submitted) == 3 == rollout.reward and rollout.metrics["agent/joined_retries"] == 1
    lengths = [len(turn.completion.token_ids) for turn in rollout.turns]
    counts = [rollout.metrics[f"agent/{name}_tokens"] for name in ("sampled", "discarded", "constrained")]
    assert len(lengths) == 2 and counts == [sum(lengths) + lengths[0], lengths[0], 0.0]
    assert [turn.prompt_token_ids for turn in rollout.turns] == [one.prompt_token_ids for one in session.submitted[1:]]
    assert 1 > rollout.metrics["agent/engine_share"] > 0 < rollout.metrics["time/agent"]


def test_requests_that_arrive_while_their_key_is_sealed_are_answered_or_refused() -> None:
    statuses: list[int] = []
    late: list[threading.Thread] = []
    own: list[int] = []

    def ask(model: Model) -> None:
        key = {"x-api-key": model.api_key}
        has_ended = contextlib.suppress(httpx.TransportError)  # the server of this test
        with has_ended, httpx.Client(base_url=model.base_url, headers=key, timeout=20, verify=False) as client:
            while not statuses or statuses[-1] == 200:
                statuses.append(client.post("/chat/completions", json=body("7 + 8 =")).status_code)

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        late.extend(threading.Thread(target=ask, args=(model,)) for _ in range(8))
        for thread in late:
            thread.start()
        while len(statuses) < 20:
            await said(client, body("7 + 8 ="))
            own.append(200)
        return "15"

    rollout, _ = played(asks, max_turns=1000)
    for thread in late:
        thread.join(20)
    refused = [status for status in statuses if status != 200]
    assert rollout.status is RolloutStatus.SCORED and len(refused) <= 8 and set(refused) <= {401, 409}
    answered = sum(status == 200 for status in [*own, *statuses])
    assert answered <= len(rollout.turns) <= answered + len(late) and rollout.reward == len(rollout.turns)
