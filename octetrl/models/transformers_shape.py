"""The spec of a model that transformers' own modules compute, read from these modules without their weights.

The modules are built on the meta device and run once on a few tokens. Attention is called through
`AttentionInterface["octetrl"]`, so what a layer asks for is seen and not guessed from names in a config: heads, head
size, window. What follows lm_head is seen in the causal model's own forward. What our attention and cache don't compute
is refused by name: layers without attention (Mamba, linear attention, convolutions), sinks, soft caps, values of
another size, experts in one tensor, positions that change with the length of the text.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from octetrl.models.transformers_layout import TransformersLayout
from octetrl.shapes.blocks import LayerBlocks, LinearLayout, MatrixLayout, Part, TensorLayout, VectorLayout
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES
from octetrl.shapes.spec import MOST_LAYERS, MOST_TOKENS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError, error_line
from octetrl.system.json_file import JsonObject

ATTEND = "octetrl_attend"  # the attribute of a layer's modules that computes its attention
CHILDREN = {"embed_tokens", "layers", "norm"}  # of `model`, besides modules without parameters
SPREAD = 1e4  # of the hidden states that show what a head does: a soft cap changes logits of this size
LENGTH_DEPENDENT = ("dynamic", "longrope")
TOKENS = 4


def _attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Attention as transformers calls it: query [1, H, T, D] to [1, T, H, D]. No mask is registered, so it is None."""
    return getattr(module, ATTEND)(module, query, key, value, options), None


AttentionInterface.register("octetrl", _attention)


def build_modules(content: Mapping[str, Any]) -> Any:
    """transformers' causal model of a config.json, with parameters on the meta device and its buffers filled.

    UserError: transformers has no such model, or can't build it."""
    kind = content.get("model_type")
    if kind not in CONFIG_MAPPING:
        raise UserError(f"transformers has no model_type {kind!r} either; docs/models.md lists what runs")
    try:
        config = CONFIG_MAPPING[kind].from_dict(dict(content))
        config._attn_implementation = "octetrl"
        with _parameters_on_meta():
            return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # a config's own checks raise what they like
        raise UserError(f"transformers can't build a causal model of this {kind} ({error_line(error)})") from None


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules that are made here keep no memory for parameters; their initial values are never drawn."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # tied weights are one parameter
            parameter = nn.Parameter(parameter.to("meta"))
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@dataclass
class _Seen:
    """What the layers ask attention for, in the order of the calls."""

    layer: int
    calls: list[tuple[int, ...]] = field(default_factory=list)  # query heads, KV heads, size of a key and of a value
    window: int | None = None

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, options: Any) -> Tensor:
        given = [name for name in ("softcap", "s_aux", "head_mask") if options.get(name) is not None]
        if given or not getattr(module, "is_causal", True):
            raise UserError(f"attention with {', '.join(given) or 'tokens that follow'} is not computed here")
        if query.shape[2] != TOKENS or key.shape[2] != TOKENS:
            raise UserError("its attention reads other tokens than those of the text")
        self.calls.append((query.shape[1], key.shape[1], key.shape[3], value.shape[3]))
        self.window = options.get("sliding_window")
        return query.new_empty(1, TOKENS, query.shape[1], value.shape[3])


def transformers_spec(content: Mapping[str, Any]) -> ModelSpec:
    """The spec of a config.json's content. UserError, one line, when the model can't run here."""
    return _spec(json.dumps(content, sort_keys=True))


@lru_cache(maxsize=8)
def _spec(text: str) -> ModelSpec:
    content = json.loads(text)
    config = JsonObject(content)
    if "num_hidden_layers" in content:
        config.integer("num_hidden_layers", most=MOST_LAYERS)  # before they are all built
    try:
        with torch.device("meta"):  # buffers too: nothing is computed
            model = build_modules(content)
        return _read(text, config, model)
    except UserError as error:
        named = (config.texts("architectures") or [f"model_type {config.text('model_type')!r}"])[0]
        raise UserError(f"unsupported architecture {named}: {error}") from None


def _read(text: str, config: JsonObject, model: Any) -> ModelSpec:
    base = model.base_model
    _refuse_config(config)
    named_in_config = config.texts("architectures")
    if named_in_config and type(model).__name__ not in named_in_config:
        raise UserError(f"transformers computes its model_type {config['model_type']!r} as {type(model).__name__}")
    if not getattr(model.config, "is_causal", True):
        raise UserError("its tokens attend to tokens that follow (is_causal)")
    with_parameters = {name for name, child in base.named_children() if next(child.parameters(), None) is not None}
    head = getattr(model, "lm_head", None)
    named = {name for name, _ in model.named_children()} == {"model", "lm_head"} and with_parameters == CHILDREN
    if not named or not isinstance(head, nn.Linear) or head.bias is not None:
        raise UserError(
            f"its modules are {', '.join(sorted(with_parameters))}; a decoder of model.embed_tokens, model.layers,"
            " model.norm and lm_head is needed"
        )
    if [name for name, _ in base.norm.named_parameters()] != ["weight"]:
        raise UserError("its last norm has a bias or no weight")
    vocab_size, hidden_size = base.embed_tokens.weight.shape
    if head.weight.shape != base.embed_tokens.weight.shape:
        raise UserError(f"its embedding has {vocab_size} rows and its lm_head {head.out_features}")
    logit_scale = _logit_scale(model)
    own = [_tensors(layer) for layer in base.layers]
    seen = _attention_of(base)
    (heads, kv_heads, head_size, _), *others = {call for one in seen for call in one.calls}
    if others:
        raise UserError("its layers have heads of different numbers or sizes")
    if head_size not in SUPPORTED_HEAD_SIZES:
        raise UserError(f"its head size is {head_size}, of {', '.join(map(str, SUPPORTED_HEAD_SIZES))}")
    layers = [TransformersLayout(tensors, one.window) for tensors, one in zip(own, seen, strict=True)]
    names = {tensor.name.rpartition(".")[2]: tensor for layer in layers for tensor in layer.own}
    norms = {part for layer in layers for tensor in layer.own for part in tensor.name.split(".")[:-1]}
    key = names.get("k_proj", names.get("qkv_proj"))
    return ModelSpec(
        family=str(config["model_type"]),
        num_layers=len(layers),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", hidden_size, most=MOST_WIDTH),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        vocab_size=vocab_size,
        max_positions=config.integer("max_position_embeddings", MOST_TOKENS, most=MOST_TOKENS),
        rms_norm_eps=1e-6,
        rope_theta=1.0,
        rope_scaling=None,
        qkv_bias=isinstance(key, LinearLayout) and key.bias,
        qk_norm="k_norm" in norms or "k_layernorm" in norms,
        tied_embeddings=bool(model.config.tie_word_embeddings),
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
        bos_token_id=next(iter(config.token_ids("bos_token_id", vocab_size)), None),
        pad_token_id=next(iter(config.token_ids("pad_token_id", vocab_size)), None),
        blocks=tuple(LayerBlocks(layer, TransformersLayout()) for layer in layers),
        hf_config=text,
        logit_scale=logit_scale,
    )


def _attention_of(base: Any) -> list[_Seen]:
    """Runs the layers on the meta device, and returns what each asks attention for."""
    if len(base.layers) > MOST_LAYERS:
        raise UserError(f"it has {len(base.layers):,} layers, more than {MOST_LAYERS:,}")
    seen = [_Seen(index) for index in range(len(base.layers))]
    for layer, one in zip(base.layers, seen, strict=True):
        for module in layer.modules():
            module.__dict__[ATTEND] = one
    place_T = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        base(inputs_embeds=base.embed_tokens(place_T), position_ids=place_T, use_cache=False)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"it can't be run without weights ({error_line(error)})") from None
    without = [one.layer for one in seen if len(one.calls) != 1]
    if without:
        raise UserError(f"layer {without[0]} has no attention, or several; every layer needs one")
    wrong = [one.calls[0] for one in seen if one.calls[0][2] != one.calls[0][3]]
    if wrong:
        raise UserError(f"its keys have {wrong[0][2]} values a head and its values {wrong[0][3]}")
    return seen


def _tensors(layer: nn.Module) -> tuple[TensorLayout, ...]:
    """The parameters of a layer, in the order of its modules."""
    found: dict[str, TensorLayout] = {}
    saved = layer.state_dict().keys() - {name for name, _ in layer.named_parameters()}
    if saved:
        raise UserError(f"its files have {min(saved)}, which is no parameter")
    for name, parameter in layer.named_parameters():
        module_name, _, own = name.rpartition(".")
        module = layer.get_submodule(module_name)
        if type(module) is nn.Linear:
            part = Part(module_name.rpartition(".")[2], module.out_features)
            found[module_name] = LinearLayout(module_name, module.in_features, (part,), module.bias is not None)
        elif parameter.dim() == 1:
            starts_at = _start(module, parameter.numel()) if own == "weight" else None
            found[name] = VectorLayout(name, parameter.numel(), starts_at=starts_at)
        elif parameter.dim() == 2 and own == "weight":
            found[name] = MatrixLayout(name, *parameter.shape)
        else:
            raise UserError(
                f"its parameter {name} has the shape {list(parameter.shape)}; experts and convolutions are not run here"
            )
    return tuple(found.values())


@torch.no_grad()
def _start(norm: nn.Module, size: int) -> float:
    """The weight with which a norm changes nothing: 0 where it multiplies by 1 + weight."""
    tried = copy.deepcopy(norm).to_empty(device="cpu")
    for parameter in tried.parameters():
        parameter.zero_()
    return 0.0 if bool(tried(torch.arange(1.0, size + 1)[None]).any()) else 1.0


def _refuse_config(config: JsonObject) -> None:
    """What the layers do not show."""
    if config.get("quantization_config"):
        raise UserError("its weights are quantised; use the BF16 weights of the model")
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key) or {}
        for rope in (given, *(one for one in given.values() if isinstance(one, Mapping))):
            kind = rope.get("rope_type", rope.get("type"))
            if kind in LENGTH_DEPENDENT:
                raise UserError(f"{key} of type {kind} turns a token by the length of its text, which changes")


class _Given(nn.Module):
    """Stands for a model without a head, and returns what it is given."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **options: Any) -> Any:
        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


@torch.no_grad()
def _logit_scale(model: Any) -> float:
    """The factor on lm_head's products, as the causal model's own forward computes it; its parts are replaced.

    UserError: logits are no multiple of these products (soft caps), or the factor is no power of two, and scaled hidden
    states would be rounded."""
    hidden = torch.linspace(-SPREAD, SPREAD, TOKENS * model.lm_head.in_features).view(1, TOKENS, -1)
    model.lm_head = nn.Linear(model.lm_head.in_features, TOKENS, bias=False)
    nn.init.constant_(model.lm_head.weight, 1 / model.lm_head.in_features)
    products, model.model = model.lm_head(hidden), _Given(hidden)
    try:
        logits = model(input_ids=torch.zeros(1, TOKENS, dtype=torch.int64), use_cache=False).logits
    except Exception as error:
        raise UserError(f"its head can't be run alone ({error_line(error)})") from None
    scale = float((logits / products)[0, 0, 0])
    if not torch.allclose(logits, products * scale, rtol=1e-4, atol=0):
        raise UserError("its logits are no multiple of the products with lm_head (a softcap?)")
    if scale <= 0 or math.frexp(scale)[0] != 0.5:
        raise UserError(f"its logits are multiplied by {scale:g}; only powers of two are exact")
    return scale
