"""A double of vLLM: the calls of backends/vllm/calls.py, and parameters with vLLM's names and shapes.

It is no model. A sibling's next token is a hash of its seed and position, and its log-prob a function of the token.
What vLLM 0.25.1 does and an adapter could get wrong, it does too:

    parameters   refused as `SamplingParams` refuses them; what was not asked for (log-probs) is not there
    requests     known by the caller's name outside and by a name of its own inside; at most `max_num_seqs` run
    steps        one forward is launched ahead: a step returns the tokens of the forward before, the first one none.
                 Tokens of requests that were cancelled meanwhile, or that ended, are dropped
    memory       a sleep fills weights with NaN and scales with 1, and a step without memory is an error

It is stricter where vLLM only logs a line: a temperature that would be raised, memory that is woken twice. It never
preempts a request, and prefills any prompt in the forward that samples its first token.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from octetrl.backends.vllm.backend import VllmBackend
from octetrl.backends.vllm.names import attention_name, vllm_name
from octetrl.backends.vllm.ranks import Ranks
from octetrl.config.backends import VLLM_VERSION
from octetrl.config.schema import Recipe
from octetrl.fp8.policy import PrecisionPolicy
from octetrl.models.decoder import Decoder
from octetrl.shapes.spec import ModelSpec
from octetrl.workers import build_engine
from octetrl.workers.build import BuiltWorker, build_worker

VOCABULARY_PAD = 64  # vLLM pads the rows of embedding and lm_head to a multiple of it


class FlashAttention:
    """vLLM's attention backend, as a layer names it."""

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"


def tensors_of(spec: ModelSpec, policy: PrecisionPolicy, ours: dict[str, torch.Tensor], ranks: int = 1) -> nn.Module:
    """A module with vLLM's parameters and attention's scale buffers, all undefined. `ours`: parameters by our name, of
    the whole model. `ranks`: of a tensor-parallel vLLM, of which the module is one's."""
    root = nn.Module()
    fp8 = {f"{one.name}.weight": one.name for one in policy.linears if one.rollout == "fp8"}
    for name, tensor in ours.items():
        rows = tensor.shape[0]
        if name in ("embedding.weight", "lm_head.weight"):
            rows = -(-rows // VOCABULARY_PAD) * VOCABULARY_PAD
        is_fp8 = name in fp8
        shape = shape_on_rank(vllm_name(name), (rows, *tensor.shape[1:]), ranks)
        _put(root, vllm_name(name), torch.empty(shape, dtype=torch.float8_e4m3fn if is_fp8 else tensor.dtype))
        if is_fp8:
            blocks = [-(-size // 128) for size in shape]
            _put(root, f"{vllm_name(fp8[name])}.weight_scale_inv", torch.empty(blocks))
    for layer in range(spec.num_layers):
        for letter in "qkv":
            attention = _module(root, attention_name(layer))
            attention.register_buffer(f"_{letter}_scale", torch.tensor(1.0))
            setattr(attention, f"_{letter}_scale_float", 1.0)
            attention.attn_backend = FlashAttention  # type: ignore[assignment]
    return root


def shape_on_rank(name: str, shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """`ColumnParallelLinear` and the vocabulary are cut by rows, `RowParallelLinear` by columns; its bias is whole."""
    rows, *columns = shape
    if any(part in name for part in ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head")):
        return (rows // ranks, *columns)
    if any(part in name for part in ("o_proj", "down_proj")):
        return (rows, *(width // ranks for width in columns))
    return shape


def _module(root: nn.Module, name: str) -> nn.Module:
    for part in name.split("."):
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root


def _put(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    place, _, last = name.rpartition(".")
    _module(root, place).register_parameter(last, nn.Parameter(tensor, requires_grad=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """`SamplingParams` as the adapter makes it: of one sibling, with deltas, flat log-probs and no tokenizer."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop_token_ids: list[int]
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or 0.01 <= self.temperature <= 2.0):
            raise ValueError(f"temperature must be in [0, 2], got {self.temperature}.")
        if self.max_tokens < 1 or not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1 or self.top_k < -1:
            raise ValueError(f"a parameter is out of range: {self}")
        assert 0 <= self.seed < 2**63 and all(type(token) is int for token in self.stop_token_ids)


@dataclass(slots=True, eq=False)
class Request:
    name: str  # the caller's
    prompt: list[int]
    params: Sampling
    out: list[int] = field(default_factory=list)
    has_ended: bool = False


class VllmDouble:
    """`LLMEngine` and what `start_vllm` returns with it. `eos_token_id`: of the model's config.json."""

    def __init__(
        self,
        model: nn.Module,
        *,
        vocab_size: int,
        num_pages: int = 64,
        page_size: int = 16,
        max_num_seqs: int = 4,
        max_model_len: int = 1 << 20,
        eos_token_id: int = 3,
    ) -> None:
        self.model, self.vocab_size, self.page_size = model, vocab_size, page_size
        self.max_num_seqs, self.max_model_len, self.eos_token_id = max_num_seqs, max_model_len, eos_token_id
        self.engine: Any = self
        self.awake = {"weights", "kv_cache"}
        self.cached: list[torch.Tensor] = [torch.full((4,), 0x7F, dtype=torch.uint8)]
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.launched: list[Request] | None = None  # the forward whose tokens the next step returns
        self.prefix_resets = 0
        self.num_pages = num_pages
        pool = SimpleNamespace(num_gpu_blocks=num_pages + 1, get_num_free_blocks=self._free)
        manager = SimpleNamespace(block_pool=pool)
        counts = lambda: (len(self.running), len(self.waiting))  # noqa: E731
        scheduler = SimpleNamespace(get_request_counts=counts, kv_cache_manager=manager)
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
        self._lose("weights")

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def _free(self) -> int:
        used = sum(-(-(len(one.prompt) + len(one.out)) // self.page_size) for one in self.running)
        return self.num_pages - used

    def sampling(self, **settings: Any) -> Sampling:
        return Sampling(**settings)

    def prompt(self, token_ids: list[int]) -> list[int]:
        return token_ids

    def add_request(self, request_id: str, prompt: list[int], params: Sampling) -> str:
        if not prompt or len(prompt) >= self.max_model_len or max(prompt) >= self.vocab_size:
            raise ValueError(f"the prompt of {request_id} cannot be served")
        self.waiting.append(Request(request_id, prompt, params))
        return f"{request_id}-{len(self.requests):08x}"

    def abort_request(self, request_ids: list[str]) -> None:
        """Of unknown names nothing. A name stands for all its requests."""
        for one in [one for one in self.requests if one.name in request_ids]:
            self._end(one)

    def _end(self, one: Request) -> None:
        one.has_ended = True
        (self.running if one in self.running else self.waiting).remove(one)

    def step(self) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}, "a step without memory"
        assert not any(bool(one.isnan().any()) for one in self.model.parameters() if one.dtype == torch.float32)
        while self.waiting and len(self.running) < self.max_num_seqs:
            self.running.append(self.waiting.popleft())
        before, self.launched = self.launched, list(self.running)
        return [self._token(one) for one in before or () if not one.has_ended]

    def _token(self, one: Request) -> Any:
        params, place = one.params, len(one.out)
        drawn = hashlib.sha256(f"{params.seed} {place}".encode()).digest()
        token = int.from_bytes(drawn[:4], "big") % self.vocab_size
        one.out.append(token)
        is_full = place + 1 == params.max_tokens or len(one.prompt) + place + 1 == self.max_model_len
        stops = token in params.stop_token_ids or (token == self.eos_token_id and not params.ignore_eos)
        if stops or is_full:
            self._end(one)
        logprobs = None
        if params.logprobs is not None:  # the sampled token's, then those of the `logprobs` likeliest
            logprobs = SimpleNamespace(logprobs=[self.logprob(one, token), *([-0.5] * params.logprobs)])
        part = SimpleNamespace(token_ids=[token], logprobs=logprobs)
        return SimpleNamespace(request_id=one.name, outputs=[part], finished=one.has_ended)

    def logprob(self, one: Request, token: int) -> float:
        """Of the token that `one` has just sampled."""
        return -0.25 * (token % 16) - 0.125

    def reset_prefix_cache(self) -> bool:
        """Whether it was dropped: never while a page is in use."""
        self.prefix_resets += 1
        return self._free() == self.num_pages

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


class CountingDouble(VllmDouble):
    """Counts how often it slept. On ranks its forwards meet: all must run the same requests."""

    sleeps = 0
    ranks: Ranks | None = None

    def step(self) -> list[Any]:
        outputs = super().step()
        if self.ranks is not None:
            met = self.ranks.commands.gather_records([one.name for one in self.launched or ()], "forward")
            assert all(names == met[0] for names in met), f"the ranks run different forwards: {met}"
        return outputs

    def sleep(self, level: int = 1) -> None:
        self.sleeps += 1
        super().sleep(level)


def build_double(
    recipe: Recipe, spec: ModelSpec, *, policy: PrecisionPolicy, tokenizer: Any, ranks: Ranks | None = None, **_: Any
) -> VllmBackend:
    """In place of `build_vllm` of workers/build_engine.py."""
    shapes = Decoder(spec.whole, policy, "train", device="meta", backend="emulated")
    ours = {name: one.detach() for name, one in shapes.named_parameters()}
    context = recipe.model.context_length
    how = {"vocab_size": spec.vocab_size, "num_pages": 256, "max_model_len": context}
    double = CountingDouble(tensors_of(spec, policy, ours, spec.tensor.size), **how)
    double.ranks = ranks
    settings: dict[str, Any] = {"config": recipe.engine, "context_length": context, "tokenizer": tokenizer}
    return VllmBackend(double, spec=spec, policy=policy, ranks=ranks, **settings)


def build_worker_with_double(*arguments: Any, **settings: Any) -> BuiltWorker:
    """In place of `build_worker`, in a process of its own."""
    build_engine.build_vllm = build_double  # type: ignore[assignment]
    return build_worker(*arguments, **settings)


@contextmanager
def installed_vllm(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """`contents`: the names of each module. Environment variables that are set within are gone afterwards."""
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("octetrl.config.backends.version", lambda _: VLLM_VERSION)
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
