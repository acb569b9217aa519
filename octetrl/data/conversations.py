"""Conversations to learn from by SFT, in a seeded order that can be resumed.

A line of the JSONL file is {"prompt": ..., "answer": ...}. The prompt is put into tokens exactly as a
rollout's is, and the answer as if the policy had generated it, EOS included; the loss is on the answer alone.

The order is endless and seeded (`environments/order.py`): a place in it is one number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from octetrl.config.errors import UserError
from octetrl.data.tasks import read_jsonl, required_text
from octetrl.environments.order import EndlessOrder
from octetrl.records import Sample


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and the answer to learn."""

    prompt: str
    answer: str


class TurnTokens(Protocol):
    """What puts turns into tokens: `ChatTokens` (rollout/chat_tokens.py)."""

    def prompt_tokens(self, prompt: str, /) -> tuple[int, ...]: ...

    def answer_tokens(self, answer: str, /) -> tuple[int, ...]: ...


def read_conversations(path: str | Path) -> list[Conversation]:
    """The conversations of a JSONL file. Raises UserError naming file and line."""
    return [
        Conversation(
            required_text(record, "prompt", f"{path}:{number}"),
            required_text(record, "answer", f"{path}:{number}"),
        )
        for number, record in read_jsonl(path)
    ]


def to_sample(conversation: Conversation, chat: TurnTokens) -> Sample:
    """The sample of one conversation; its loss is on the answer and the EOS."""
    prompt, answer = chat.prompt_tokens(conversation.prompt), chat.answer_tokens(conversation.answer)
    return Sample(
        token_ids=prompt + answer,
        loss_mask=(False,) * len(prompt) + (True,) * len(answer),
        generator_logprobs=None,
        advantage=1.0,
        policy_version=None,
    )


class ConversationOrder:
    """Samples of `conversations` in a seeded order without end.

    context_length: the longest sample allowed, in tokens; None allows any.
    Raises UserError when there are none, or when one is too long.
    """

    def __init__(
        self,
        conversations: Sequence[Conversation],
        chat: TurnTokens,
        *,
        seed: int,
        context_length: int | None = None,
    ) -> None:
        if not conversations:
            raise UserError("algorithm.conversations: there are none to learn from")
        self._samples = [to_sample(conversation, chat) for conversation in conversations]
        self._seed = seed
        longest = max(range(len(self._samples)), key=lambda index: len(self._samples[index].token_ids))
        length = len(self._samples[longest].token_ids)
        if context_length is not None and length > context_length:
            raise UserError(
                f"algorithm.conversations: conversation {longest + 1} has {length} tokens, model.context_length is"
                f" {context_length}; raise it or shorten the conversation"
            )
        self._order = EndlessOrder(len(self._samples), seed)
        self._position = 0

    def next_batch(self, n: int) -> list[Sample]:
        """The next `n` samples; a new epoch begins wherever the last one ends."""
        batch = [self._samples[self._order[self._position + offset]] for offset in range(n)]
        self._position += n
        return batch

    def state(self) -> dict[str, Any]:
        """Where the order stands, as JSON."""
        return {"position": self._position, "fingerprint": self._fingerprint}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`. Raises UserError when it was taken from other conversations or another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise UserError(
                "algorithm.conversations: they, the tokenizer or the seed are not those the checkpoint was made with;"
                " resume with the same, or start a new run from its weights"
            )
        self._position = state["position"]

    @cached_property
    def _fingerprint(self) -> str:
        digest = hashlib.sha256(str(self._seed).encode())
        for sample in self._samples:
            digest.update(repr((sample.token_ids, sample.loss_mask.index(True))).encode())
        return digest.hexdigest()
