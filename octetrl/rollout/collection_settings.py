"""Settings for the collection of groups, and what it needs from others: tasks, scores and completions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from octetrl.config.schema import RolloutConfig
from octetrl.records import Completion, GenerationRequest, OnCompletions, SamplingParams, Task
from octetrl.rollout.backend import OnSession, RolloutSession, not_asked
from octetrl.rollout.chat_tokens import ChatTokens


class Tasks(Protocol):
    """A source of tasks: `Taskset` (environments/base.py)."""

    def next_batch(self, n: int, /) -> list[Task]: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...


class Generates(Protocol):
    """The generating part of a worker: a backend's first verbs (rollout/backend.py), with progress shown."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
        /,
    ) -> list[list[Completion]]: ...

    def session(self, on_end: OnSession = not_asked, /) -> AbstractContextManager[RolloutSession]: ...


class LengthPenalty(Protocol):
    """Penalty for an answer's length, 0 or less: `soft_overlong_penalty` (algorithms/dapo.py)."""

    def __call__(self, length: int, *, was_cut: bool) -> float: ...


@dataclass(frozen=True, slots=True)
class CollectionSettings:
    """Settings for the collection of groups, without the tasks."""

    chat: ChatTokens
    sampling: SamplingParams
    group_size: int
    max_prompt_tokens: int
    seed: int = 0
    step: int = 0  # new for every collection: seeds follow from it
    prompts: int = 1  # groups that a step wants (`collect_batch`)
    max_refills: int = 0  # further draws to get them
    penalty: LengthPenalty | None = None  # added to the reward for its length; None: none
    context_length: int = 1 << 30  # tokens that a conversation may have
    answer_limits: Callable[[Task], tuple[int, ...]] | None = (
        None  # of each sibling, for a bench; None: `sampling` has it
    )

    @classmethod
    def from_config(cls, chat: ChatTokens, config: RolloutConfig, *, seed: int) -> CollectionSettings:
        """Settings from the recipe's `rollout` section."""
        sampling = SamplingParams(
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=config.top_p,
            min_p=config.min_p,
            stop=config.stop,
        )
        return cls(
            chat,
            sampling,
            config.group_size,
            config.max_prompt_tokens,
            seed,
            prompts=config.prompts_per_step,
        )

    def at_step(self, step: int) -> CollectionSettings:
        return replace(self, step=step)
