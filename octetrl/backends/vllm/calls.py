"""The part of vLLM that this room calls, as protocols: names and arguments are those of vLLM 0.25.1.

`start.py` returns a real `LLMEngine` with its `SamplingParams`. `tests/unit/backends/vllm_double.py` has a double.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class FlatLogprobs(Protocol):
    """Log-probs of an output with `flat_logprobs` and `logprobs=0`: those of the sampled tokens."""

    @property
    def logprobs(self) -> Sequence[float]: ...


class CompletionOutput(Protocol):
    """New tokens of a request since its last output (`RequestOutputKind.DELTA`)."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> FlatLogprobs | None: ...


class RequestOutput(Protocol):
    @property
    def request_id(self) -> str: ...

    @property
    def outputs(self) -> Sequence[CompletionOutput]: ...

    @property
    def finished(self) -> bool: ...


class BlockPool(Protocol):
    """The pages of the KV cache. One of them is never used."""

    @property
    def num_gpu_blocks(self) -> int: ...

    def get_num_free_blocks(self) -> int: ...


class Scheduler(Protocol):
    def get_request_counts(self) -> tuple[int, int]:
        """Running and waiting requests."""

    @property
    def kv_cache_manager(self) -> Any:
        """Its `block_pool` is a `BlockPool`."""


class LLMEngine(Protocol):
    """`vllm.v1.engine.llm_engine.LLMEngine`, with its core in this process."""

    def add_request(self, request_id: str, prompt: Any, params: Any) -> str: ...

    def abort_request(self, request_ids: list[str]) -> None: ...

    def step(self) -> Sequence[RequestOutput]: ...

    def reset_prefix_cache(self) -> bool: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]: ...

    def collective_rpc(self, method: Callable[[Any], Any]) -> list[Any]: ...

    @property
    def engine_core(self) -> Any:
        """The client; `engine_core.engine_core.scheduler` is a `Scheduler`."""


class Started(Protocol):
    """An engine, and vLLM's constructors for its requests."""

    @property
    def engine(self) -> LLMEngine: ...

    def sampling(self, **settings: Any) -> Any:
        """`SamplingParams` of one sibling."""

    def prompt(self, token_ids: list[int]) -> Any:
        """Tokens as a prompt."""


def scheduler_of(engine: LLMEngine) -> Scheduler:
    scheduler: Scheduler = engine.engine_core.engine_core.scheduler
    return scheduler


def block_pool_of(engine: LLMEngine) -> BlockPool:
    pool: BlockPool = scheduler_of(engine).kv_cache_manager.block_pool
    return pool
