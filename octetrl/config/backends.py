"""What plans and estimates must know of each rollout backend: whose weights it uses, what it needs, what it holds.

A new backend gets a line in `TRAITS`. What it refuses is in `rules_running.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from octetrl.config.vllm import RESERVE, vllm_weight_bytes
from octetrl.shapes.spec import ModelSpec


@dataclass(frozen=True)
class BackendTraits:
    """title: its name in messages. held_bytes: what an engine with weights of its own holds beside the trainer while it
    generates, without its KV cache, from the model and the names of its FP8 linears; None: it uses the trainer's.
    holds: what that is. needs_gpu: it runs on no CPU. needs_context: its KV cache has room for `model.context_length`,
    even if all requests are shorter."""

    title: str
    held_bytes: Callable[[ModelSpec, Collection[str]], int] | None = None
    holds: str = ""
    needs_gpu: bool = False
    needs_context: bool = False

    @property
    def has_weights(self) -> bool:
        """Whether it has weights of its own, beside the trainer's."""
        return self.held_bytes is not None

    def held(self, spec: ModelSpec, fp8_rollout: Collection[str]) -> list[tuple[str, int, str]]:
        """Name, bytes and description of what it holds, for the table of memory; empty if that is the trainer's."""
        return [] if self.held_bytes is None else [(self.title, self.held_bytes(spec, fp8_rollout), self.holds)]


def _vllm_bytes(spec: ModelSpec, fp8_rollout: Collection[str]) -> int:
    return vllm_weight_bytes(spec, fp8_rollout) + RESERVE


TRAITS: Mapping[str, BackendTraits] = {
    "octetrl": BackendTraits("octetrl"),
    "vllm": BackendTraits(
        "vLLM",
        held_bytes=_vllm_bytes,
        holds="weights of its own, its activations and graphs",
        needs_gpu=True,
        needs_context=True,
    ),
    "openai": BackendTraits("the server"),
}
