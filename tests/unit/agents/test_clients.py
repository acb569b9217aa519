"""Anthropic's client and OpenAI's Agents SDK, as they are installed beside the suite."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from octetrl.environments.programs import Model
from octetrl.records import RolloutStatus
from tests.required import missing
from tests.unit.agents.programs import played
from tests.unit.agents.test_dialects import ANSWERS, ARGUMENTS, QUESTION, RESULT, SCHEMA, SYSTEM

try:
    import agents
    import anthropic
except ImportError as error:
    missing("agents", f"{error.name} is not installed", whole_module=True)


@pytest.mark.parametrize("streams", [False, True])
def test_anthropics_client_runs_a_loop_of_tools(streams: bool) -> None:
    async def asks(client: httpx.AsyncClient, model: Model) -> str:
        tools: Any = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
        said: list[Any] = [{"role": "user", "content": QUESTION}]
        address = model.variables["ANTHROPIC_BASE_URL"]
        async with anthropic.AsyncAnthropic(base_url=address, api_key=model.api_key) as own:
            given: Any = {"model": "claude", "max_tokens": 100, "system": SYSTEM, "tools": tools}
            for _ in ANSWERS:
                counted = await own.messages.count_tokens(model="claude", messages=said, system=SYSTEM, tools=tools)
                if streams:
                    async with own.messages.stream(messages=said, **given) as stream:
                        message: Any = await stream.get_final_message()
                else:
                    message = await own.messages.create(messages=said, **given)
                assert message.usage.input_tokens == counted.input_tokens
                said.append({"role": "assistant", "content": message.content})
                calls = [block for block in message.content if block.type == "tool_use"]
                assert all(call.input == ARGUMENTS for call in calls)
                said.append(
                    {
                        "role": "user",
                        "content": [
                            {"type": "tool_result", "tool_use_id": call.id, "content": RESULT} for call in calls
                        ],
                    }
                )
        return str(message.content[0].text)

    answers = iter(ANSWERS)
    rollout, _ = played(asks, lambda *_: next(answers))
    assert rollout.detail is None and rollout.status is RolloutStatus.SCORED
    assert rollout.result == ANSWERS[-1] and len(rollout.turns) == 2


@pytest.mark.parametrize("streams", [False, True])
def test_the_agents_sdk_runs_its_tools(streams: bool) -> None:
    called: list[int] = []

    @agents.function_tool
    def add(a: int) -> str:
        """Adds."""
        called.append(a)
        return RESULT

    async def asks(client: httpx.AsyncClient, model: Model) -> Any:
        agents.set_tracing_disabled(True)
        provider = agents.OpenAIProvider(openai_client=AsyncOpenAI(base_url=model.base_url, api_key=model.api_key))
        config = agents.RunConfig(model_provider=provider)
        agent = agents.Agent(name="sums", instructions=SYSTEM, tools=[add], model=model.name)
        if streams:
            run: Any = agents.Runner.run_streamed(agent, QUESTION, run_config=config)
            async for _ in run.stream_events():
                pass
        else:
            run = await agents.Runner.run(agent, QUESTION, run_config=config)
        return run.final_output

    answers = iter(ANSWERS)
    rollout, session = played(asks, lambda *_: next(answers))
    assert rollout.detail is None and rollout.status is RolloutStatus.SCORED
    assert rollout.result == ANSWERS[-1] and called == [7, 7] and len(session.submitted) == 2
