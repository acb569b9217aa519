"""A double of vLLM: the calls of backends/vllm/calls.py, and parameters with vLLM's names and shapes.

It is no model. A sibling's next token is a hash of its seed and position, and its log-prob a function of the token. Its
memory behaves as vLLM's does: a sleep fills weights with NaN and scales with 1, and a step without memory is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from octetrl.backends.vllm.names import attention_name, vllm_name
from octetrl.config.spec import ModelSpec
from octetrl.fp8.policy import PrecisionPolicy

VOCABULARY_PAD = 64  # vLLM pads the rows of embedding and lm_head to a multiple of it


def tensors_of(spec: ModelSpec, policy: PrecisionPolicy, ours: dict[str, torch.Tensor]) -> nn.Module:
    """A module with vLLM's parameters and attention's scale buffers, all undefined. `ours`: parameters by our name."""
    root = nn.Module()
    fp8 = {f"{one.name}.weight": one.name for one in policy.linears if one.rollout == "fp8"}
    for name, tensor in ours.items():
        rows = tensor.shape[0]
        if name in ("embedding.weight", "lm_head.weight"):
            rows = -(-rows // VOCABULARY_PAD) * VOCABULARY_PAD
        is_fp8 = name in fp8
        shape = (rows, *tensor.shape[1:])
        _put(root, vllm_name(name), torch.empty(shape, dtype=torch.float8_e4m3fn if is_fp8 else tensor.dtype))
        if is_fp8:
            blocks = [-(-size // 128) for size in tensor.shape]
            _put(root, f"{vllm_name(fp8[name])}.weight_scale_inv", torch.empty(blocks))
    for layer in range(spec.num_layers):
        for letter in "qkv":
            _module(root, attention_name(layer)).register_buffer(f"_{letter}_scale", torch.tensor(1.0))
    return root


def _module(root: nn.Module, name: str) -> nn.Module:
    for part in name.split("."):
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root


def _put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    place, _, last = name.rpartition(".")
    _module(root, place).register_parameter(last, nn.Parameter(tensor, requires_grad=False))


class VllmDouble:
    """`LLMEngine` and what `start_vllm` returns with it."""

    def __init__(self, model: nn.Module, *, vocab_size: int, num_pages: int = 64, page_size: int = 16) -> None:
        self.model, self.vocab_size, self.page_size = model, vocab_size, page_size
        self.engine: Any = self
        self.awake = {"weights", "kv_cache"}
        self.cached: list[torch.Tensor] = [torch.full((4,), 0x7F, dtype=torch.uint8)]
        self.requests: dict[str, tuple[list[int], dict[str, Any], list[int]]] = {}
        self.prefix_resets = 0
        self.num_pages = num_pages
        pool = SimpleNamespace(num_gpu_blocks=num_pages + 1, get_num_free_blocks=self._free)
        manager = SimpleNamespace(block_pool=pool)
        counts = lambda: (len(self.requests), 0)  # noqa: E731
        scheduler = SimpleNamespace(get_request_counts=counts, kv_cache_manager=manager)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self._lose("weights")

    def _free(self) -> int:
        used = sum(-(-(len(prompt) + len(out)) // self.page_size) for prompt, _, out in self.requests.values())
        return self.num_pages - used

    def sampling(self, **settings: Any) -> dict[str, Any]:
        return settings

    def prompt(self, token_ids: list[int]) -> list[int]:
        return token_ids

    def add_request(self, request_id: str, prompt: list[int], params: dict[str, Any]) -> str:
        self.requests[request_id] = (prompt, params, [])
        return f"{request_id}-0f3a"

    def abort_request(self, request_ids: list[str]) -> None:
        for name in request_ids:
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}, "a step without memory"
        assert not any(bool(one.isnan().any()) for one in self.model.parameters() if one.dtype == torch.float32)
        outputs = []
        for name, (_, params, out) in list(self.requests.items()):
            token = int.from_bytes(hashlib.sha256(f"{params['seed']} {len(out)}".encode()).digest()[:4], "big")
            token %= self.vocab_size
            out.append(token)
            finished = token in params["stop_token_ids"] or len(out) == params["max_tokens"]
            if finished:
                del self.requests[name]
            logprobs = SimpleNamespace(logprobs=[-0.25 * (token % 16) - 0.125])
            part = SimpleNamespace(token_ids=[token], logprobs=logprobs)
            outputs.append(SimpleNamespace(request_id=name, outputs=[part], finished=finished))
        return outputs

    def reset_prefix_cache(self) -> bool:
        self.prefix_resets += 1
        return not self.requests

    def sleep(self, level: int = 1) -> None:
        assert level == 2 and self.awake == {"weights", "kv_cache"}
        self.awake.clear()
        self._lose("weights")

    def wake_up(self, tags: list[str] | None = None) -> None:
        assert tags is not None and not self.awake & set(tags), "memory is mapped twice"
        self.awake |= set(tags)
        for tag in tags:
            self._lose(tag)

    def _lose(self, tag: str) -> None:
        if tag == "weights":
            for parameter in self.model.parameters():
                parameter.data.view(torch.uint8).fill_(0x7F)  # NaN in E4M3 and BF16
        for buffer in self.model.buffers():
            buffer.fill_(1.0)

    def apply_model(self, func: Callable[[nn.Module], Any]) -> list[Any]:
        assert "weights" in self.awake, "weights are read or written while they are asleep"
        return [func(self.model)]

    def collective_rpc(self, method: Callable[[Any], Any]) -> list[Any]:
        return [method(SimpleNamespace(model_runner=SimpleNamespace(kv_caches=self.cached)))]
