"""Reads and writes the mixture of experts in a config.json: its layers, routing and sizes. No torch.

    qwen3_moe   softmax over all experts; dense layers by `mlp_only_layers` and `decoder_sparse_step`; no shared expert
    dots1       DeepSeek-V3's: sigmoid, chosen from groups with a correction bias, a scale, shared experts, the first
                layers dense

Other routing functions are refused by name.
"""

from __future__ import annotations

from typing import Any

from octetrl.config.blocks import LayerBlocks
from octetrl.config.errors import UserError
from octetrl.config.json_file import JsonObject
from octetrl.config.spec import MOST_HEADS, MOST_LAYERS, MOST_WIDTH, ModelSpec
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing, Scoring

MIXTURES = ("qwen3_moe", "dots1")
DENSE_LAYER = LayerBlocks(AttentionLayout(), MLPLayout())
ROUTING_WORDS: dict[
    str, dict[str, tuple[str, ...]]
] = {  # what a config may say of its routing function; a key that is left out says the same
    "qwen3_moe": {"scoring_func": ("softmax",), "topk_method": ("greedy",)},
    "dots1": {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
}
SCORING: dict[str, Scoring] = {"qwen3_moe": "softmax", "dots1": "sigmoid"}
COUNT_KEYS = {"qwen3_moe": "num_experts", "dots1": "n_routed_experts"}
OTHER_COUNT_KEY = "num_local_experts"  # as transformers 5 writes it


def mixture_blocks(config: JsonObject, family: str, num_layers: int) -> tuple[LayerBlocks, ...]:
    """The layers for `ModelSpec.blocks`. UserError: an unknown routing function, or sizes that do not fit."""
    for key, known in ROUTING_WORDS[family].items():
        given = config.text(key)
        if given is not None and given not in known:
            raise UserError(
                f"routing function '{given}' ({key}) is not supported for {family}, only {' and '.join(known)};"
                f" use another model"
            )
    expert_size = config.integer("moe_intermediate_size", most=MOST_WIDTH)
    shared = config.integer("n_shared_experts", 0, most=MOST_HEADS, least=0) if family == "dots1" else 0
    mixture = MixtureLayout(_routing(config, family), expert_size, shared * expert_size)
    sparse_layer = LayerBlocks(AttentionLayout(), mixture)
    dense = _dense_layers(config, family, num_layers)
    layers = [DENSE_LAYER if layer in dense else sparse_layer for layer in range(num_layers)]
    if sparse_layer not in layers:
        raise UserError(f"none of the {num_layers} layers of this {family} has experts; correct the config")
    while len(layers) > 1 and layers[-1] == layers[-2]:
        layers.pop()
    return tuple(layers)


def _routing(config: JsonObject, family: str) -> Routing:
    key = COUNT_KEYS[family] if COUNT_KEYS[family] in config else OTHER_COUNT_KEY
    experts = config.integer(key if key in config else COUNT_KEYS[family], most=MOST_HEADS)
    top_k = config.integer("num_experts_per_tok", most=MOST_HEADS)
    groups, kept = 1, 1
    if family == "dots1":
        groups, kept = (config.integer(name, 1, most=MOST_HEADS) for name in ("n_group", "topk_group"))
        if experts % groups or kept > groups:
            raise UserError(
                f"{experts} experts in n_group {groups}, of which topk_group {kept} are kept, do not divide; correct"
                f" the config"
            )
        if groups > 1 and experts // groups < 2:
            raise UserError(f"n_group {groups} of {experts} experts leaves groups of one; correct the config")
    candidates = experts // groups * kept
    if top_k > candidates:
        of_groups = f" in the {kept} kept groups" if candidates < experts else ""
        raise UserError(f"num_experts_per_tok {top_k} exceeds the {candidates} experts{of_groups}; correct the config")
    return Routing(
        num_experts=experts,
        top_k=top_k,
        scoring=SCORING[family],
        renormalise=config.flag("norm_topk_prob"),
        corrected=family == "dots1",
        num_groups=groups,
        kept_groups=kept,
        scale=config.number("routed_scaling_factor", 1.0) if family == "dots1" else 1.0,
    )


def _dense_layers(config: JsonObject, family: str, num_layers: int) -> set[int]:
    if family == "dots1":
        return set(range(config.integer("first_k_dense_replace", 0, most=MOST_LAYERS, least=0)))
    step = config.integer("decoder_sparse_step", 1, most=MOST_LAYERS)
    return {*config.integers("mlp_only_layers"), *(layer for layer in range(num_layers) if (layer + 1) % step)}


def mixture_fields(spec: ModelSpec) -> dict[str, Any]:
    """The mixture's fields in the config.json of an export."""
    layers = [spec.blocks_of(layer).mlp for layer in range(spec.num_layers)]
    dense = [layer for layer, block in enumerate(layers) if not isinstance(block, MixtureLayout)]
    mixture = next((block for block in layers if isinstance(block, MixtureLayout)), None)
    assert mixture is not None, f"a model of {spec.family} has experts in some layer"
    routing = mixture.routing
    fields = {
        COUNT_KEYS[spec.family]: routing.num_experts,
        "num_experts_per_tok": routing.top_k,
        "moe_intermediate_size": mixture.expert_size,
        "norm_topk_prob": routing.renormalise,
        "sliding_window": None,
    }
    if spec.family == "qwen3_moe":
        return fields | {"mlp_only_layers": dense, "decoder_sparse_step": 1, "output_router_logits": False}
    return fields | {
        "n_shared_experts": mixture.shared_size // mixture.expert_size,
        "n_group": routing.num_groups,
        "topk_group": routing.kept_groups,
        "routed_scaling_factor": routing.scale,
        "first_k_dense_replace": len(dense),
        "scoring_func": routing.scoring,
    }
