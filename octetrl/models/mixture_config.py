"""Reads and writes the mixture of experts in a config.json: its layers, routing and sizes. No torch.

    softmax over all experts    Mixtral's and Qwen's; dense layers by `mlp_only_layers` and `decoder_sparse_step`
    DeepSeek-V3's routing       sigmoid, chosen from groups with a correction bias, a scale, shared experts, the first
                                layers dense

Other routing functions are refused by name.
"""

from __future__ import annotations

from typing import Any

from octetrl.models.attention_config import without_repeats
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import MixtureLayout, Routing
from octetrl.models.family import Experts, Family
from octetrl.shapes.blocks import BlockLayout, LayerBlocks
from octetrl.shapes.spec import MOST_HEADS, MOST_LAYERS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

ROUTING_WORDS: dict[
    bool, dict[str, tuple[str, ...]]
] = {  # by `Experts.corrected`: what a config may say of its routing function, or leave out
    False: {"scoring_func": ("softmax",), "topk_method": ("greedy",)},
    True: {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)},
}
LAYER_KINDS = ("dense", "sparse")  # in `mlp_layer_types`
CLAMP = 7.0  # LIMIT of kernels/rows/clamped_glu.py, which needs torch
OTHER_COUNT_KEY = "num_local_experts"  # as transformers 5 writes it


def mixture_blocks(
    config: JsonObject, family: Family, experts: Experts, num_layers: int, attention: BlockLayout
) -> tuple[LayerBlocks, ...]:
    """The layers for `ModelSpec.blocks`. UserError: an unknown routing function, or sizes that do not fit."""
    for key, known in ROUTING_WORDS[experts.corrected].items():
        given = config.text(key)
        if given is not None and given not in known:
            raise UserError(
                f"routing function '{given}' ({key}) is not supported for {family.name}, only {' and '.join(known)};"
                f" use another model"
            )
    if experts.layout.clamped and config.number("swiglu_limit", CLAMP) != CLAMP:
        raise config.wrong("swiglu_limit", f"{CLAMP:g} is needed")
    if experts.is_mixtral and config.get("router_jitter_noise") not in (None, 0):
        raise config.wrong("router_jitter_noise", "0 is needed, because noise would change the routes")
    size = config.integer(experts.size_key, most=MOST_WIDTH)
    shared = 0
    if experts.corrected:
        shared = size * config.integer("n_shared_experts", experts.shared, most=MOST_HEADS, least=0)
    elif experts.shared_size is not None:
        shared = config.integer("shared_expert_intermediate_size", experts.shared_size, most=MOST_WIDTH)
    mixture = experts.layout(_routing(config, experts), size, shared)
    dense_layer, sparse_layer = LayerBlocks(attention, MLPLayout()), LayerBlocks(attention, mixture)
    dense = _dense_layers(config, family, experts, num_layers)
    layers = [dense_layer if layer in dense else sparse_layer for layer in range(num_layers)]
    if sparse_layer not in layers:
        raise UserError(f"none of the {num_layers} layers of this {family.name} has experts; correct the config")
    return without_repeats(layers)


def _routing(config: JsonObject, of_family: Experts) -> Routing:
    key = of_family.count_key
    experts = config.integer(
        OTHER_COUNT_KEY if key not in config and OTHER_COUNT_KEY in config else key, most=MOST_HEADS
    )
    top_k = config.integer("num_experts_per_tok", most=MOST_HEADS)
    groups, kept, scale = 1, 1, 1.0
    if of_family.corrected:
        groups = config.integer("n_group", of_family.groups[0], most=MOST_HEADS)
        kept = config.integer("topk_group", of_family.groups[1], most=MOST_HEADS)
        scale = config.number("routed_scaling_factor", of_family.scale, least=1e-3, most=1e3)
        if experts % groups:
            raise UserError(f"{experts} experts do not divide into n_group {groups}; correct the config")
        if kept > groups:
            raise UserError(f"topk_group {kept} exceeds n_group {groups}; correct the config")
        if groups > 1 and experts // groups < 2:
            raise UserError(f"n_group {groups} of {experts} experts leaves groups of one; correct the config")
    candidates = experts // groups * kept
    if top_k > candidates:
        of_groups = f" in the {kept} kept groups" if candidates < experts else ""
        raise UserError(f"num_experts_per_tok {top_k} exceeds the {candidates} experts{of_groups}; correct the config")
    scale = (
        config.number("routed_scaling_factor", of_family.scale, least=1e-3, most=1e3) if of_family.corrected else 1.0
    )
    return Routing(
        num_experts=experts,
        top_k=top_k,
        scoring="sigmoid" if of_family.corrected else "softmax",
        renormalise=of_family.everywhere
        or config.flag("norm_topk_prob", of_family.renormalises)
        or of_family.is_mixtral,
        corrected=of_family.corrected,
        num_groups=groups,
        kept_groups=kept,
        scale=scale,
    )


def _dense_layers(config: JsonObject, family: Family, experts: Experts, num_layers: int) -> set[int]:
    if family.has_latents and config.integer("moe_layer_freq", 1, most=MOST_LAYERS) != 1:
        raise config.wrong("moe_layer_freq", "1 is needed")
    if experts.lists_layers and (kinds := config.texts("mlp_layer_types")):
        if len(kinds) != num_layers or not set(kinds) <= set(LAYER_KINDS):
            raise config.wrong("mlp_layer_types", f"'dense' or 'sparse' for each of the {num_layers} layers is needed")
        return {layer for layer, kind in enumerate(kinds) if kind == "dense"}
    if experts.corrected:
        return set(range(config.integer("first_k_dense_replace", experts.first_dense, most=MOST_LAYERS, least=0)))
    if not experts.dense_by_step:
        return set()
    step = config.integer("decoder_sparse_step", 1, most=MOST_LAYERS)
    return {*config.integers("mlp_only_layers"), *(layer for layer in range(num_layers) if (layer + 1) % step)}


def mixture_fields(spec: ModelSpec, experts: Experts) -> dict[str, Any]:
    """The mixture's fields in the config.json of an export."""
    layers = [spec.blocks_of(layer).mlp for layer in range(spec.num_layers)]
    dense = [layer for layer, block in enumerate(layers) if not isinstance(block, MixtureLayout)]
    mixture = next((block for block in layers if isinstance(block, MixtureLayout)), None)
    assert mixture is not None, f"a model of {spec.family} has experts in some layer"
    routing = mixture.routing
    fields: dict[str, Any] = {experts.count_key: routing.num_experts, "num_experts_per_tok": routing.top_k}
    if experts.is_mixtral:
        noise = {} if experts.mxfp4 else {"router_jitter_noise": 0.0}
        return fields | {"output_router_logits": False, **noise}
    fields[experts.size_key] = mixture.expert_size
    if experts.shared_size is not None:
        fields["shared_expert_intermediate_size"] = mixture.shared_size
    if experts.everywhere:
        return fields
    fields |= {"norm_topk_prob": routing.renormalise, "sliding_window": None}
    if experts.dense_by_step:
        return fields | {"mlp_only_layers": dense, "decoder_sparse_step": 1, "output_router_logits": False}
    if experts.lists_layers:
        fields["mlp_layer_types"] = [LAYER_KINDS[layer not in dense] for layer in range(spec.num_layers)]
    return fields | {
        "n_shared_experts": mixture.shared_size // mixture.expert_size,
        "n_group": routing.num_groups,
        "topk_group": routing.kept_groups,
        "routed_scaling_factor": routing.scale,
        "first_k_dense_replace": len(dense),
        "scoring_func": routing.scoring,
    }
