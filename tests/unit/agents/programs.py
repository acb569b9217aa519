"""Plays the rollout of one program against an engine that answers with given texts."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from octetrl.agents.server import AgentServer
from octetrl.boxes.boxes import Boxes
from octetrl.environments.dialogue import ConversationLimits, Dialogue
from octetrl.environments.programs import Model
from octetrl.environments.turns import Conversation, reward
from octetrl.records import GenerationRequest, Rollout, SamplingParams, Task
from octetrl.rollout.chat_tokens import ChatTokens
from octetrl.rollout.collect import Collecting, CollectionSettings, collect_groups
from octetrl.rollout.history import History
from tests.unit.rollout.talking import TalkingSession, TalkingWorkers
from tests.unit.rollout.templates import stop_tokens, tokenizer_of

FAMILY = "qwen3"
CONTEXT = 1500
Asks = Callable[[httpx.AsyncClient, Model], Awaitable[Any]]


class Program:
    def __init__(self, asks: Asks) -> None:
        self.tasks, self._asks = [Task("t", "7 + 8 =")], asks

    async def agent(self, task: Task, model: Model) -> Any:
        headers = {"authorization": f"Bearer {model.api_key}"}
        async with httpx.AsyncClient(base_url=model.base_url, headers=headers, timeout=20) as client:
            return await self._asks(client, model)

    @reward
    def calls(self, conversation: Conversation) -> float:
        return conversation.turns


def played(
    asks: Asks,
    says: Callable[[GenerationRequest, random.Random], str] = lambda *_: "so 15",
    history: History = "recorded",
    **limits: Any,
) -> tuple[Rollout, TalkingSession]:
    """The rollout of one program, and the session that answered it. says: by the request and its random numbers; an
    answer without text never ends."""
    return played_task(Program(asks), 0, says, history, **limits)


def played_task(
    environment: Any,
    task: int,
    says: Callable[[GenerationRequest, random.Random], str] = lambda *_: "so 15",
    history: History = "recorded",
    context: int = CONTEXT,
    boxes: Boxes | None = None,
    **limits: Any,
) -> tuple[Rollout, TalkingSession]:
    """The rollout of task number `task` of an environment with an agent."""
    tokenizer = tokenizer_of(FAMILY)

    def tokens(request: GenerationRequest, chance: random.Random) -> list[int]:
        text = says(request, chance)
        return [*tokenizer.encode(text), tokenizer.eos_token_id] if text else []

    dialogue = Dialogue(environment, ConversationLimits(**{"agent_seconds": 15.0, **limits}), boxes=boxes)
    server = AgentServer(
        tokenizer,
        vocab_size=len(tokenizer),
        context_length=context,
        variables={},
        tool_format="auto",
        ends=stop_tokens(FAMILY),
        wake=dialogue.calls.wake,
    )
    dialogue.capture, dialogue.closes = server.policy, server.close
    workers = TalkingWorkers(tokenizer, tokens)
    chat = ChatTokens(tokenizer, ends=stop_tokens(FAMILY))
    collection = CollectionSettings(chat, SamplingParams(200), 1, 400, seed=3, history=history)
    try:
        (group,) = collect_groups([environment.tasks[task]], dialogue, workers, collection, Collecting())
        assert server.policy.num_open == 0 and not server.policy.sessions, "a key that is left"
        return group.rollouts[0], workers.sessions[0]
    finally:
        dialogue.close()
