"""The interface between a run and the engine that samples its completions: this project's engine, or another one.

    with backend.session() as session:          an open session is asynchronous: requests in, events out
        session.submit(request)
        for event in session.events(wait_seconds=0.5): ...

    backend.put_weights(weights)                codes, scales and tensors by name, with their policy version
    backend.weights_digest()                    of the weights that the backend holds, read back from memory

`engine/engine.py` is the first implementation. A worker owns a backend; `Drive` sees a session alone. The caller never
runs a forward: a session in another process works on its own and costs no call a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from octetrl.records import Completion, GenerationRequest, OnCompletions, OnProgress, SessionEvent

if TYPE_CHECKING:
    from octetrl.records import WeightSet


class RolloutSession(Protocol):
    """Accepts requests while others are in flight, and returns their tokens as events."""

    @property
    def has_work(self) -> bool:
        """Whether a submitted request is unfinished."""

    def submit(self, request: GenerationRequest, /, *, streams: bool = False) -> None:
        """Adds a request. `streams`: its tokens are reported as they are sampled, not only as whole completions.

        Raises UserError for a request that cannot be served, or whose id belongs to an unfinished request.
        """

    def cancel(self, request_id: str, /) -> None:
        """Stops the request's siblings; no further event of theirs follows. Unknown ids are ignored."""

    def events(self, wait_seconds: float = 0.0, /) -> Sequence[SessionEvent]:
        """New events since the last call. Waits for the first event, at most `wait_seconds`, if others compute."""


class RolloutBackend(Protocol):
    """An engine that generates. One policy version serves a call of `generate` or a session."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_progress: OnProgress | None = None,
        on_completions: OnCompletions | None = None,
        /,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests."""

    def session(self, on_progress: OnProgress | None = None, /) -> AbstractContextManager[RolloutSession]:
        """An open session. One at a time; new weights are refused while it is open."""

    def put_weights(self, weights: WeightSet, /) -> None:
        """Loads the weights of a new policy version, and drops the prefixes of the old one."""

    def weights_digest(self, *, covers_all: bool = False) -> str:
        """Digest of the weights and scales that the backend holds, read back from where its kernels read them.

        `covers_all`: the digest covers every tensor, not only FP8 weights and adapters. Raises RuntimeError naming the
        first tensor that is not the one last put in.
        """

    def forget_prefixes(self) -> None:
        """Drops all cached prefixes: the next request prefills its whole prompt."""

    def sleep(self) -> None:
        """Frees the memory of the KV cache until the next request or `wake`."""

    def wake(self) -> None:
        """Allocates the KV cache now. `generate` and `session` do so too."""

    def rollout_metrics(self) -> dict[str, float]:
        """Metrics of the last `generate` or session, by the names of the step's metrics; empty before the first."""
