"""vLLM as rollout backend: the version that was tried, whether it is installed, and its memory. No torch, no vllm."""

from __future__ import annotations

from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, version

from octetrl.shapes.spec import ModelSpec

VLLM_VERSION = "0.25.1"  # the one whose calls and layouts were read
LEAST_TEMPERATURE = 0.01  # it raises smaller ones to it, with nothing but a log line
MOST_TEMPERATURE = 2.0  # it refuses larger ones, when a request arrives
VOCABULARY_PAD = 64  # it pads the rows of embedding and lm_head to a multiple of it
RESERVE = 3 << 30  # bytes for vLLM's activations, captured graphs and cuBLAS


def why_no_vllm() -> str | None:
    """Why vLLM cannot be used here; None: it can. Imports nothing."""
    try:
        found = version("vllm")
    except PackageNotFoundError:
        return f"engine.backend: vllm {VLLM_VERSION} is not installed; pip install 'octetrl[vllm]', or use octetrl"
    if found.partition("+")[0] != VLLM_VERSION:  # a local version, as 0.25.1+cu129, is the same source
        return (
            f"engine.backend: vllm {found} is installed, and only {VLLM_VERSION} was tried; pip install"
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
