"""Requests that no API allows, and faults of the server itself: never a hang, a traceback, or a reward."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
import uvicorn

from octetrl.environments.programs import Model
from octetrl.records import RolloutStatus
from octetrl.system.errors import RunFailed
from tests.unit.agents.programs import played
from tests.unit.agents.test_capture import body, said

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
    is_hit: list[float] = []

    async def tick(server: uvicorn.Server, _: int) -> bool:
        if is_hit:
            raise MemoryError("no room")
        return server.should_exit

    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        await said(client, body("7 + 8 ="))
        is_hit.append(time.monotonic())
        await asyncio.sleep(0.3)
        await client.post("/chat/completions", json=body("8 + 9 ="))
        return "15"

    monkeypatch.setattr(uvicorn.Server, "on_tick", tick)
    with pytest.raises(RunFailed, match="MemoryError: no room"):
        played(asks)
    assert time.monotonic() - is_hit[0] < 5 and capsys.readouterr().err == ""
