"""The decoder: Llama 3, Qwen2.5 and Qwen3 are this one model with a spec, for the trainer and for the engine.

    hidden = embedding[token]
    hidden = hidden + attention(norm(hidden));  hidden = hidden + mlp(norm(hidden))      each layer
    hidden = norm(hidden);  logits = hidden @ lm_head^T                    float32, only for rows asked for

The spec says which kinds of block a layer has (`blocks`; models/blocks/), the policy which linears are FP8 on this side
(fp8/policy.py). Everything else is `dtype`, the residual stream included. Projections that share an input are fused, in
the order q, k, v and gate, up; models/hf_weights.py splits them at the border. A 128 x 128 weight block may therefore
span the border of q and k: both sides have the same.

T tokens, N rows asked for, E hidden size, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from octetrl.config.blocks import PLACES, LinearLayout, Place
from octetrl.config.lora import lora_parts
from octetrl.config.schema import LoraConfig
from octetrl.config.spec import ModelSpec
from octetrl.fp8.gemm import BackendName
from octetrl.fp8.policy import PrecisionPolicy, Side
from octetrl.kernels.gemm.linear_logprobs import linear_logprobs, lm_head_logits
from octetrl.kernels.quantize.quantize_weight import check_scales
from octetrl.layers.context import Context
from octetrl.layers.embedding import Embedding
from octetrl.layers.linear import Float8Linear, Linear, Projection
from octetrl.layers.lm_head import LmHead
from octetrl.layers.lora import LoraAdapter
from octetrl.layers.norm import RMSNorm
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.layers.top_logprobs import logprobs_at, top_logprobs
from octetrl.models.blocks.block import Block, BlockBuilder, Probe
from octetrl.models.blocks.products import Operand

EMBEDDING_STD = 0.02
EMBEDDING_SITE, FINAL_NORM_SITE = "embedding", "final norm"  # as the probe calls them


class Half(NamedTuple):
    """A place of a layer with what stands there."""

    place: Place
    norm: RMSNorm
    block: Block


class DecoderLayer(nn.Module):
    """One layer, pre-norm, residual around each half."""

    probe: Probe | None = None  # for the norms and the residual stream (models/blocks/block.py)

    def __init__(self, index: int, attention: Block, mlp: Block, attention_norm: RMSNorm, mlp_norm: RMSNorm) -> None:
        super().__init__()
        self.index = index
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    @property
    def halves(self) -> tuple[Half, Half]:
        first, second = PLACES
        return Half(first, self.attention_norm, self.attention), Half(second, self.mlp_norm, self.mlp)

    def forward(self, hidden_TE: Tensor, rotary: Rotary, context: Context) -> Tensor:
        normed_TE = self.attention_norm(hidden_TE)
        between_TE: Tensor = hidden_TE + self.attention(normed_TE, rotary, context)
        mlp_normed_TE = self.mlp_norm(between_TE)
        if self.probe is not None:
            self.probe_stream(normed_TE, between_TE, mlp_normed_TE)
        behind_TE: Tensor = between_TE + self.mlp(mlp_normed_TE, rotary, context)
        return behind_TE

    def probe_stream(self, normed: Operand, between_TE: Tensor, mlp_normed: Operand) -> None:
        """Passes the results of both norms and the residual stream between the blocks to the probe."""
        assert self.probe is not None
        first, second = PLACES
        self.probe(self.index, first.norm_site, normed)
        self.probe(self.index, first.residual_site, between_TE)
        self.probe(self.index, second.norm_site, mlp_normed)


RunLayer = Callable[[nn.Module, Tensor, Rotary, Context], Tensor]


class Decoder(nn.Module):
    """A dense decoder of `spec`, with the formats that `policy` gives this `side`.

    Weights are undefined until `random_init` or `hf_weights.load_weights`. After any change of a weight
    that is FP8 here, call `requantize()`; forward refuses stale codes. `lora`: every target has an adapter.
    """

    probe: Probe | None = None  # for what lies outside of the layers, and the stream between them
    is_scalar = False  # whether the head is `score.weight` (models/scalar_decoder.py)

    def __init__(
        self,
        spec: ModelSpec,
        policy: PrecisionPolicy,
        side: Side,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
        backend: BackendName = "emulated",
        lora: LoraConfig | None = None,
    ) -> None:
        super().__init__()
        self.spec, self.policy, self.side, self.dtype, self.backend = spec, policy, side, dtype, backend
        self.lora = lora
        self.fast = policy.numerics == "fast"
        self.embedding = Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryTable(spec.head_size, spec.rope_theta, spec.rope_scaling, spec.max_positions, device=device)
        self.layers = nn.ModuleList(self._layer(index, device) for index in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head: LmHead | None = None
        if not spec.tied_embeddings:
            self.lm_head = LmHead(spec.vocab_size, spec.hidden_size, dtype=dtype, device=device)

    def _layer(self, index: int, device: torch.device | str) -> DecoderLayer:
        spec = self.spec
        blocks: list[Block] = []
        for place, layout in zip(PLACES, spec.blocks_of(index), strict=True):
            linears = {linear.name: linear for linear in layout.linears(spec)}
            make = partial(self._linear, f"layers.{index}.{place.name}", linears, device)
            block = layout.build(BlockBuilder(spec, index, self.policy, self.dtype, device, make))
            assert isinstance(block, Block)
            blocks.append(block)
        attention, mlp = blocks
        norms = [RMSNorm(spec.hidden_size, spec.rms_norm_eps, dtype=self.dtype, device=device) for _ in blocks]
        return DecoderLayer(index, attention, mlp, *norms)

    def _linear(
        self, block: str, linears: Mapping[str, LinearLayout], device: torch.device | str, name: str
    ) -> Projection:
        layout = linears[name]
        shape = layout.in_features, layout.out_features, layout.bias
        made: Projection
        if self.policy.format_of(f"{block}.{name}", self.side) == "bf16":
            made = Linear(*shape, dtype=self.dtype, device=device, fast=self.fast)
        else:
            made = Float8Linear(
                *shape,
                dtype=self.dtype,
                device=device,
                backend=self.backend,
                power_of_two=self.policy.power_of_two,
                square_wgrad=self.policy.square_wgrad,
            )
        parts = lora_parts(layout, self.lora.targets) if self.lora is not None else ()
        if self.lora is not None and parts:
            rank, alpha = self.lora.rank, self.lora.alpha
            made.lora = LoraAdapter(layout.in_features, parts, rank, alpha, dtype=self.dtype, device=device)
        return made

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, context: Context, run_layer: RunLayer | None = None
    ) -> Tensor:
        """Hidden states [T, E] after the final norm. token_ids_T and positions_T: int64.

        `run_layer(layer, hidden_TE, rotary, context)`, where given, calls each layer in the caller's way
        (activation checkpointing).
        """
        hidden_TE = self.embedding(token_ids_T)
        if self.probe is not None:
            self.probe(None, EMBEDDING_SITE, hidden_TE)
        rotary = self.rotary(positions_T)
        for index, layer in enumerate(self.layers):
            if run_layer is None:
                hidden_TE = layer(hidden_TE, rotary, context)
            else:
                hidden_TE = run_layer(layer, hidden_TE, rotary, context)
            if self.probe is not None:
                self.probe(index, PLACES[-1].residual_site, hidden_TE)
        normed_TE: Tensor = self.norm(hidden_TE)
        if self.probe is not None:
            self.probe(None, FINAL_NORM_SITE, normed_TE)
        return normed_TE

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """[V, E]; the embedding's own when tied."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N, V], not differentiable: for sampling."""
        return lm_head_logits(hidden_NE.detach(), self.lm_head_weight.detach(), self.fast)

    def logprobs(
        self, hidden_NE: Tensor, targets_N: Tensor, temperature: float = 1.0, chunk: int = 1024
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each target and entropy, float32 [N], differentiable (kernels/gemm/linear_logprobs.py)."""
        return linear_logprobs(hidden_NE, self.lm_head_weight, targets_N, temperature, chunk, self.fast)

    def logprobs_at(self, hidden_NE: Tensor, ids_NK: Tensor, temperature: float, chunk: int) -> Tensor:
        """Log-probs of K given tokens a row, float32 [N, K], differentiable (layers/top_logprobs.py)."""
        return logprobs_at(hidden_NE, self.lm_head_weight, ids_NK, temperature=temperature, chunk=chunk, fast=self.fast)

    def top_logprobs(
        self, hidden_NE: Tensor, k: int, below: int, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """The K likeliest tokens with ids smaller than `below`, int64 [N, K], and their log-probs."""
        weight_VE, fast = self.lm_head_weight.detach(), self.fast
        return top_logprobs(hidden_NE, weight_VE, k, below=below, temperature=temperature, chunk=chunk, fast=fast)

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            yield layer

    def float8_linears(self) -> Iterator[tuple[str, Float8Linear]]:
        """Every FP8 linear of this side with its name, in the order of the layers."""
        for name, module in self.named_modules():
            if isinstance(module, Float8Linear):
                yield name, module

    def adapters(self) -> Iterator[tuple[str, LoraAdapter]]:
        """Every adapter with its projection's name, in the order of the layers."""
        for name, module in self.named_modules():
            if isinstance(module, LoraAdapter):
                yield name.removesuffix(".lora"), module

    def trains(self, name: str) -> bool:
        """Whether the parameter `name` is trained: each one, or of a model with adapters the adapters' alone."""
        return self.lora is None or ".lora." in name

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.named_parameters() if self.trains(name))

    def draw_adapters(self, seed: int) -> None:
        """The branches as they begin: they add nothing yet."""
        for name, adapter in self.adapters():
            adapter.draw(seed, name)

    def train_adapters_alone(self) -> None:
        """Freezes the loaded weights; those that are FP8 on this side are dropped, their codes stay."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.trains(name))
        for _, module in self.float8_linears():
            module.drop_weight()

    def release_codes(self) -> None:
        """Frees the codes of all trained weights until `requantize` (layers/linear.py)."""
        for _, module in self.float8_linears():
            module.release_codes()

    @contextmanager
    def codes_released(self) -> Iterator[None]:
        """An update within ends with `requantize`; whatever breaks it off, the codes are there again."""
        self.release_codes()
        try:
            yield
        except BaseException:
            self.requantize()
            raise

    def requantize(self) -> None:
        """Quantises every FP8 weight that may have changed, in place. ValueError names one that is not finite."""
        made: dict[str, tuple[Tensor, Tensor]] = {}
        for name, module in self.float8_linears():
            if module.codes_are_settled:
                continue
            module.requantize(f"{name}.weight", check=False)
            assert module.weight is not None
            made[f"{name}.weight"] = (module.weight.detach(), module.scale)
        try:
            check_scales(made)
        except ValueError:
            for _, module in self.float8_linears():
                module.disown_codes()
            raise

    @torch.no_grad()
    def random_init(self, seed: int) -> None:
        """Normal weights (embedding and lm_head std 0.02, linears 1/sqrt(in_features)), norms one, biases zero, then
        `requantize`.

        Each tensor is drawn on the CPU from (seed, its name), so neither device, dtype's rounding aside,
        nor the order or presence of other tensors matters. Adapters are left alone.
        """
        for name, parameter in self.named_parameters():
            if ".lora." in name:
                continue
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            std = parameter.shape[1] ** -0.5 if name.startswith("layers.") else EMBEDDING_STD
            parameter.copy_(torch.empty(parameter.shape).normal_(std=std, generator=generator))
        self.requantize()
