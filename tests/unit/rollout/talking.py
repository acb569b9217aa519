"""A session of an engine that says what a function of the prompt says, one token of each sibling a step.

Tokens follow from (prompt, seed, sibling) alone, as the engine's do. Each log-prob is a number made of its token, so a
test sees whether both stayed together.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octetrl.records import Completion, FinishReason, GenerationRequest, SessionEvent

Says = Callable[[GenerationRequest, random.Random], Sequence[int]]  # tokens, EOS included where it is to stop


def logprob_of(token: int) -> float:
    return -(token + 1) / 1024


class TalkingSession:
    """Draws `says(request, chance)`; `decode` gives its text."""

    def __init__(self, says: Says, decode: Callable[[Sequence[int]], str], max_batch: int = 1000) -> None:
        self._says, self._decode, self._max_batch = says, decode, max_batch
        self._running: dict[tuple[str, int], tuple[GenerationRequest, list[int], int]] = {}
        self._progress: dict[tuple[str, int], int] = {}
        self.submitted: list[GenerationRequest] = []
        self.batches: list[int] = []
        self.cancelled: list[str] = []

    @property
    def has_work(self) -> bool:
        return bool(self._running)

    def submit(self, request: GenerationRequest, *, streams: bool = False) -> None:
        assert all(request.id != one.id for one in self.submitted), f"two requests '{request.id}'"
        self.submitted.append(request)
        for sibling in range(request.num_siblings):
            tokens = list(self._says(request, random.Random(f"{request.seed}/{sibling}")))
            self._running[request.id, sibling] = (request, tokens[: request.sampling.max_new_tokens], len(tokens))

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)
        self._running = {key: one for key, one in self._running.items() if key[0] != request_id}

    def events(self, wait_seconds: float = 0.0) -> list[SessionEvent]:
        drawn = []
        self.batches.append(min(len(self._running), self._max_batch))
        for key in list(self._running)[: self._max_batch]:
            _, tokens, wanted = self._running[key]
            self._progress[key] = self._progress.get(key, 0) + 1
            if not tokens or self._progress[key] < len(tokens):  # without tokens it never ends
                continue
            del self._running[key], self._progress[key]
            logprobs = tuple(map(logprob_of, tokens))
            completion = Completion(
                token_ids=tuple(tokens),
                logprobs=logprobs,
                text=self._decode(tokens),
                finish_reason=FinishReason.STOP if wanted == len(tokens) else FinishReason.LENGTH,
                policy_version=0,
                precision_digest="none",
            )
            drawn.append(SessionEvent(*key, completion.token_ids, logprobs, completion))
        return drawn


class TalkingWorkers:
    """Workers whose sessions talk; all of them are kept."""

    def __init__(self, tokenizer: Any, says: Says, max_batch: int = 1000) -> None:
        self._tokenizer, self._says, self._max_batch = tokenizer, says, max_batch
        self.sessions: list[TalkingSession] = []

    def generate(self, requests: Sequence[GenerationRequest], *_: object) -> list[list[Completion]]:
        raise AssertionError("a conversation takes a session")

    @contextmanager
    def session(self, _: object = None) -> Iterator[TalkingSession]:
        def decode(token_ids: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

        self.sessions.append(TalkingSession(self._says, decode, self._max_batch))
        yield self.sessions[-1]
        assert not self.sessions[-1].has_work
