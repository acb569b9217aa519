"""A decoder whose layers are transformers' own modules, with our linears, attention, KV cache and heads.

For dense models that have no blocks here (models/families.py). The modules are transformers', built without weights
(models/transformers_shape.py); then

    nn.Linear         becomes a Linear or a Float8Linear of the policy, with its adapter
    nn.Embedding      becomes ours, whose gradient has one order of sums; one that scales stays
    attention         is ours, packed for the trainer and on pages for the engine, with the cache's formats
    activations       in float64 on a CPU, rounded once: torch's vectors and the rest of a loop differ in the last bit
    norms             in one order of sums on a GPU (models/transformers_norms.py)
    the rest          RoPE, residuals: as transformers has them, in eager mode

So both sides of a run compute the same ops. A token's bits do not depend on the other tokens of a forward for the
families that tests/parity/test_transformers.py lists, on a CPU. On a GPU the modules run one by one, without fused
forms and captured graphs. Dropout is off.

T tokens, E hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from octetrl.layers.context import Context
from octetrl.models.blocks.block import BlockBuilder
from octetrl.models.build_blocks import FusedAttention, LayerBuilder
from octetrl.models.decoder import EMBEDDING_SITE, FINAL_NORM_SITE, Decoder, DecoderLayer, RunLayer
from octetrl.models.transformers_norms import fix_order
from octetrl.models.transformers_shape import ATTEND, CHILDREN, build_modules
from octetrl.shapes.blocks import PLACES

ACTIVATIONS = tuple({one[0] if isinstance(one, tuple) else one for one in ACT2CLS.values()})  # classes of modules


class TransformersDecoder(Decoder):
    """As `Decoder`, for a spec with `hf_config`. Parameters have a checkpoint's names: `layers.3.mlp.up_proj.bias`."""

    has_fused_forms = False
    base: Any  # transformers' model without a head, whose parts are registered here
    running: tuple[Context, RunLayer | None] | None  # of the forward that runs now

    def add_layers(self, builder: LayerBuilder) -> None:
        spec, dtype, device = builder.spec, builder.dtype, builder.device
        assert spec.hf_config is not None and self.cut is None, "validated: a whole model of transformers"
        base = build_modules(json.loads(spec.hf_config)).base_model
        if type(base.embed_tokens) is not nn.Embedding:  # it scales
            self.embedding = base.embed_tokens
        layers = [_build_layer(index, layer, builder) for index, layer in enumerate(base.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = base.norm
        fix_order(self.norm)
        for name, child in base.named_children():  # without parameters, such as RoPE's table
            if name not in CHILDREN:
                self.add_module(name, child)
        _materialise(self, dtype, device)
        for module in self.modules():
            own = {name: buffer for name, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update({name: buffer.to(device) for name, buffer in own.items()})
        base.layers = nn.ModuleList(_Caller(self, layer) for layer in layers)
        self.__dict__.update(base=base, running=None)

    def forward(
        self, token_ids_T: Tensor, positions_T: Tensor, context: Context, run_layer: RunLayer | None = None
    ) -> Tensor:
        hidden_TE: Tensor = self.embedding(token_ids_T)
        if self.probe is not None:
            self.probe(None, EMBEDDING_SITE, hidden_TE)
        self.running = context, run_layer
        try:
            found = self.base(inputs_embeds=hidden_TE[None], position_ids=positions_T[None], use_cache=False)
        finally:
            self.running = None
        normed_TE: Tensor = found.last_hidden_state[0]
        if self.probe is not None:
            self.probe(None, FINAL_NORM_SITE, normed_TE)
        return normed_TE if self.spec.logit_scale == 1 else normed_TE * self.spec.logit_scale

    def decoder_layers(self) -> Iterator[DecoderLayer]:
        """None: the layers have no halves."""
        return iter(())


class _Call(NamedTuple):
    """What transformers' model passes to a layer besides the hidden states."""

    args: tuple[Any, ...]
    options: Mapping[str, Any]


class TransformersLayer(nn.Module):
    """A layer of transformers under the name and with the arguments of ours. Its parameters are the layer's own."""

    index: int
    layer: Any
    attention: TransformersAttention
    returns_tuple: bool

    def __init__(self, index: int, layer: nn.Module, attention: TransformersAttention) -> None:
        super().__init__()
        shared = {name: layer.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}
        self.__dict__.update(shared, index=index, attention=attention, layer=layer, returns_tuple=False)

    def forward(self, hidden_TE: Tensor, call: _Call, context: Context) -> Tensor:
        with self.attention.in_context(context):
            found = self.layer(hidden_TE[None], *call.args, **call.options)
        self.returns_tuple = isinstance(found, tuple)
        behind_TE: Tensor = (found[0] if isinstance(found, tuple) else found)[0]
        return behind_TE

    def train(self, mode: bool = True) -> TransformersLayer:
        """Stays in evaluation: rollout and training compute the same, so there is no dropout."""
        return self


class _Caller(nn.Module):
    """Stands where transformers' model has a layer, and runs ours as the trainer asks (activation checkpointing)."""

    def __init__(self, model: TransformersDecoder, layer: TransformersLayer) -> None:
        super().__init__()
        self.__dict__.update(model=model, layer=layer)

    def __getattr__(self, name: str) -> Any:
        """What the model reads of a layer, such as its `attention_type`."""
        return getattr(self.__dict__["layer"].layer, name)

    def forward(self, hidden: Tensor, *args: Any, **options: Any) -> Any:
        model: TransformersDecoder = self.__dict__["model"]
        layer: TransformersLayer = self.__dict__["layer"]
        assert model.running is not None, "a layer outside of a forward"
        context, run_layer = model.running
        run = layer if run_layer is None else partial(run_layer, layer)
        behind_TE: Tensor = run(hidden[0], _Call(args, options), context)
        if model.probe is not None:
            model.probe(layer.index, PLACES[-1].residual_site, behind_TE)
        return (behind_TE[None],) if layer.returns_tuple else behind_TE[None]


class TransformersAttention(FusedAttention):
    """Our attention on the Q, K and V that transformers' module made. It has no parameters."""

    context: Context | None = None

    def add_projections(self, builder: BlockBuilder) -> None:
        """None: they are the module's."""

    @contextmanager
    def in_context(self, context: Context) -> Iterator[None]:
        self.context = context
        try:
            yield
        finally:
            self.context = None

    def for_transformers(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Mapping[str, Any]
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, K, T, D], as transformers has them. Returns [1, T, H, D]."""
        assert self.context is not None, "attention outside of a forward"
        given = options.get("scaling")
        self.softmax_scale = getattr(module, "scaling") if given is None else given  # noqa: B009 (a Tensor for mypy)
        self.window = options.get("sliding_window")
        q_THD, k_TKD, v_TKD = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
        return self.attend(q_THD, k_TKD, v_TKD, self.context)[None]


class _Activation(nn.Module):
    """An activation whose bits do not depend on an element's place in the tensor."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.activation(x) if x.is_cuda else _InFloat64.apply(x, self.activation)
        return y


class _InFloat64(torch.autograd.Function):
    """Keeps its input as it is given, not in float64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: nn.Module) -> Tensor:
        ctx.save_for_backward(x)
        ctx.activation = activation
        y: Tensor = activation(x.double())
        return y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            exact = x.double().requires_grad_()
            (dx,) = torch.autograd.grad(ctx.activation(exact), exact, grads[0].double())
        return dx.to(x.dtype), None


def _build_layer(index: int, layer: nn.Module, builder: LayerBuilder) -> TransformersLayer:
    """Our linears and attention in a layer of transformers."""
    linears = {one.name: one for one in builder.spec.blocks_of(index).attention.adaptable(builder.spec)}
    for name in linears:
        parent, _, own = name.rpartition(".")
        setattr(layer.get_submodule(parent), own, builder.linear(f"layers.{index}", linears, name))
    attention = TransformersAttention(builder.block_builder(index, partial(builder.linear, "", linears)))
    for name, module in [*layer.named_modules()]:
        module.__dict__[ATTEND] = attention.for_transformers
        fix_order(module)
        if isinstance(module, ACTIVATIONS) and next(module.parameters(), None) is None:
            layer.set_submodule(name, _Activation(module))
    layer.add_module("octetrl_attention", attention)
    return TransformersLayer(index, layer, attention)


def _materialise(model: nn.Module, dtype: torch.dtype, device: torch.device | str) -> None:
    """Memory for the parameters that are still on the meta device."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device))
