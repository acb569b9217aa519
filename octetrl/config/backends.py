"""What plans and estimates must know of each rollout backend: whose weights it uses, what it needs, what it holds.

A new backend gets a line in `TRAITS`. What it refuses is in `rules_running.py`. For vLLM: the version that was tried,
whether it is installed, and its memory. Imports neither torch nor vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from octetrl.shapes.spec import ModelSpec

VLLM_VERSION = "0.25.1"  # the one whose calls and layouts were read
VLLM_TEMPERATURES = 0.01, 2.0  # it raises smaller ones with nothing but a log line, and refuses larger ones later
VOCABULARY_PAD = 64  # it pads the rows of embedding and lm_head to a multiple of it
RESERVE = 3 << 30  # bytes for vLLM's activations, captured graphs and cuBLAS


def why_no_vllm() -> str | None:
    """Why vLLM cannot be used here; None: it can. Imports nothing."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        return f"engine.backend: vllm {VLLM_VERSION} is not installed; pip install 'octetrl[vllm]', or use octetrl"
    if installed.partition("+")[0] != VLLM_VERSION:  # a local version, as 0.25.1+cu129, is the same source
        return (
            f"engine.backend: vllm {installed} is installed, and only {VLLM_VERSION} was tried; pip install"
            f" vllm=={VLLM_VERSION}, or use octetrl"
        )
    return None


def padded_vocabulary(vocab_size: int) -> int:
    """Rows of embedding and lm_head in vLLM, on all ranks together."""
    return -(-vocab_size // VOCABULARY_PAD) * VOCABULARY_PAD


def vllm_weight_bytes(spec: ModelSpec, fp8_rollout: Collection[str]) -> int:
    """Bytes of the weights in vLLM: BF16, or E4M3 with a float32 scale for each 128 x 128 block."""
    names = set(fp8_rollout)
    fp8 = sum(linear.num_weights for name, linear in spec.linears() if name in names)
    return 2 * (spec.num_parameters - fp8) + fp8 + 4 * (fp8 // 128**2)


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
