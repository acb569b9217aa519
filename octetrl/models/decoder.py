"""The decoder: the one model of all families, for trainer and engine. A `ModelSpec` holds its sizes and blocks.

    hidden = embedding[token]
    hidden = hidden + attention(norm(hidden));  hidden = hidden + mlp(norm(hidden))      each layer
    hidden = norm(hidden);  logits = hidden @ lm_head^T                    float32, only for requested rows

The spec lists the blocks of each layer (models/blocks/). The policy lists the linears that are FP8 on this side
(fp8/policy.py). Everything else is in `dtype`, including the residual stream. Projections with the same input are
fused, in the order q, k, v and gate, up; models/hf_weights.py splits them for checkpoints. A 128 x 128 block of a
weight may therefore contain rows of q and of k. It does so on both sides.

T tokens, N requested rows, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octetrl.config.schema import LoraConfig
from octetrl.fp8.backends import BackendName
from octetrl.fp8.policy import PrecisionPolicy, Side
from octetrl.kernels.gemm.linear_logprobs import linear_logprobs, lm_head_logits
from octetrl.layers import many_linears
from octetrl.layers.context import Context
from octetrl.layers.cut_rows import VocabularyRows, build_embedding
from octetrl.layers.embedding import LmHead
from octetrl.layers.linear import Float8Linear
from octetrl.layers.lora import LoraAdapter
from octetrl.layers.norm import RMSNorm
from octetrl.layers.offset_norm import OffsetRMSNorm
from octetrl.layers.rotary import Rotary, RotaryTable
from octetrl.layers.tensor_group import ONE_WORKER, TensorGroup
from octetrl.layers.top_logprobs import logprobs_at, top_logprobs
from octetrl.models.blocks.block import Block, Probe
from octetrl.models.blocks.products import Operand
from octetrl.models.build_blocks import LayerBuilder
from octetrl.models.random_weights import draw_weights
from octetrl.shapes.blocks import PLACES, Place
from octetrl.shapes.spec import ModelSpec

EMBEDDING_SITE, FINAL_NORM_SITE = "embedding", "final norm"  # their names for the probe


class Half(NamedTuple):
    """A place of a layer, with its norm and block."""

    place: Place
    norm: RMSNorm
    block: Block


class DecoderLayer(nn.Module):
    """One layer: two halves, each a norm, a block and a residual."""

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


RunLayer = Callable[[nn.Module, Tensor, Any, Context], Tensor]  # what is between the two: `Rotary`, for our layers


class Decoder(nn.Module):
    """A decoder of `spec`, with the formats of `policy` for this `side`. `lora`: every target has an adapter.

    Weights are undefined until `random_init` or `hf_weights.load_weights`. Call `requantize()` after a change of an FP8
    weight; the forward refuses stale codes.
    """

    probe: Probe | None = None  # for sites outside of the layers, and the residual stream between them
    is_scalar = False  # whether the head is `score.weight` (models/scalar_decoder.py)
    has_fused_forms = True  # whether its layers have forms for a GPU besides the modules

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
        group: TensorGroup = ONE_WORKER,  # the workers that share the model, of which `spec` is this one's part
        fp8_weights: bool = True,  # false: the weights of FP8 linears have no memory (layers/weight_memory.py)
    ) -> None:
        super().__init__()
        self.spec, self.policy, self.side, self.dtype, self.backend = spec, policy, side, dtype, backend
        self.lora, self.group = lora, group
        self._without_gradient = frozenset(spec.without_gradient())
        self.cut = None if group.size == 1 else VocabularyRows(spec.vocab_size, group)
        self.embedding = build_embedding(spec.vocab_size, spec.hidden_size, self.cut, dtype=dtype, device=device)
        self.add_layers(LayerBuilder(spec, policy, side, dtype, device, backend, lora, group, fp8_weights))
        head = partial(LmHead, spec.vocab_rows, spec.hidden_size, dtype=dtype, device=device)
        self.lm_head: LmHead | None = None if spec.tied_embeddings else head()

    def add_layers(self, builder: LayerBuilder) -> None:
        """What is between embedding and head: RoPE's table, layers and the last norm."""
        spec, dtype, device = builder.spec, builder.dtype, builder.device
        self.rotary = RotaryTable(
            spec.rotary_size, spec.rope_theta, spec.rope_scaling, spec.max_positions, device=device
        )
        kind = OffsetRMSNorm if spec.offset_norms else RMSNorm
        norm = partial(kind, spec.hidden_size, spec.rms_norm_eps, dtype=dtype, device=device)
        numbers = range(spec.num_layers)
        self.layers = nn.ModuleList(DecoderLayer(one, *builder.blocks(one), norm(), norm()) for one in numbers)
        self.norm = norm()

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, context: Context, run_layer: RunLayer | None = None
    ) -> Tensor:
        """Hidden states [T, E] after the final norm. token_ids_T and positions_T: int64.

        `run_layer(layer, hidden_TE, rotary, context)` runs each layer, if given (activation checkpointing).
        """
        hidden_TE = self.embedding(token_ids_T)
        if self.probe is not None:
            self.probe(None, EMBEDDING_SITE, hidden_TE)
        rotary = self.rotary(positions_T)
        for index, layer in enumerate(self.layers):
            run = layer if run_layer is None else partial(run_layer, layer)
            hidden_TE = run(hidden_TE, rotary, context)
            if self.probe is not None:
                self.probe(index, PLACES[-1].residual_site, hidden_TE)
        normed_TE: Tensor = self.norm(hidden_TE)
        if self.probe is not None:
            self.probe(None, FINAL_NORM_SITE, normed_TE)
        return normed_TE

    @property
    def lm_head_weight(self) -> nn.Parameter:
        """[V, E], or this worker's rows (`cut`). With tied embeddings it is the embedding's weight."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """float32 [N, V], not differentiable: for sampling."""
        return lm_head_logits(hidden_NE.detach(), self.lm_head_weight.detach(), self.cut)

    def logprobs(
        self, hidden_NE: Tensor, targets_N: Tensor, temperature: float | Tensor = 1.0, chunk: int = 1024
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of each target and entropy, float32 [N], differentiable (kernels/gemm/linear_logprobs.py).
        temperature: one number, or one for each target."""
        return linear_logprobs(hidden_NE, self.lm_head_weight, targets_N, temperature, chunk, self.cut)

    def logprobs_at(self, hidden_NE: Tensor, ids_NK: Tensor, temperature: float, chunk: int) -> Tensor:
        """Log-probs of K given tokens a row and of all others, float32 [N, K + 1], differentiable."""
        head_VE = self.lm_head_weight
        return logprobs_at(hidden_NE, head_VE, ids_NK, temperature=temperature, chunk=chunk, cut=self.cut)

    def top_logprobs(
        self, hidden_NE: Tensor, k: int, below: int, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """Ids [N, K] of the likeliest tokens below `below`; log-probs of these and of all others [N, K + 1]."""
        head = self.lm_head_weight.detach()
        return top_logprobs(hidden_NE, head, k, below=below, temperature=temperature, chunk=chunk, cut=self.cut)

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
        """Whether the optimizer updates the parameter `name`. With LoRA it updates only the adapters."""
        return ".lora." in name if self.lora is not None else name not in self._without_gradient

    def trained_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, parameter) for name, parameter in self.named_parameters() if self.trains(name))

    def draw_adapters(self, seed: int) -> None:
        """Initialises the adapters. Each branch adds zero."""
        for name, adapter in self.adapters():
            adapter.draw(seed, name)

    def train_adapters_alone(self) -> None:
        """Freezes the loaded weights. Drops those that are FP8 on this side and keeps their codes."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(self.trains(name))
        self.drop_fp8_weights()

    def drop_fp8_weights(self) -> None:
        """Keep only the codes of weights that are FP8 on this side: they can no longer change."""
        for _, module in self.float8_linears():
            module.drop_weight()

    def release_codes(self) -> None:
        """Frees the codes of all trained weights until `requantize` (layers/linear.py)."""
        for _, module in self.float8_linears():
            module.release_codes()

    @contextmanager
    def codes_released(self) -> Iterator[None]:
        """Frees the codes for an update, which ends with `requantize`. If the update raises, the codes are restored."""
        self.release_codes()
        try:
            yield
        except BaseException:
            self.requantize()
            raise

    def requantize(self) -> None:
        """Quantises every FP8 weight that may have changed, in place. ValueError names one that is not finite."""
        linears = {f"{name}.weight": one for name, one in self.float8_linears() if not one.skips_requantize}
        try:
            many_linears.requantize(linears)
        except ValueError:
            for _, module in self.float8_linears():
                module.mark_codes_stale()
            raise

    def random_init(self, seed: int) -> None:
        """Draws the weights (models/random_weights.py), then `requantize`. Adapters do not change."""
        draw_weights(self, seed, self.spec)
        self.requantize()
