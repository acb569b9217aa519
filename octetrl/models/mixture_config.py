"""Reads and writes the mixture of experts in a config.json: its layers, routing and sizes. No torch.

    qwen3_moe   softmax over all experts; dense layers by `mlp_only_layers` and `decoder_sparse_step`; no shared expert
    qwen2_moe   the same with a shared expert, whose output is multiplied by a gate
    mixtral     softmax over all experts, always renormalised, in every layer; `intermediate_size` is an expert's
    dots1       DeepSeek-V3's: sigmoid, chosen from groups with a correction bias, a scale, shared experts, the first
                layers dense; `deepseek_v3`, `glm4_moe` and `glm4_moe_lite` have the same mixture

Other routing functions are refused by name.
"""

from __future__ import annotations

from typing import Any

from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.blocks.moe.layout import (
    GatedMixtureLayout,
    MixtralLayout,
    MixtureLayout,
    Routing,
    Scoring,
)
from octetrl.models.latent_config import LATENT_FAMILIES
from octetrl.shapes.blocks import BlockLayout, LayerBlocks
from octetrl.shapes.spec import MOST_HEADS, MOST_LAYERS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError
from octetrl.system.json_file import JsonObject

CORRECTED = ("dots1", "deepseek_v3", "glm4_moe", "glm4_moe_lite")  # with DeepSeek-V3's routing
SOFTMAX = ("qwen2_moe", "qwen3_moe", "mixtral")
MIXTURES = (*SOFTMAX, *CORRECTED)
LAYOUTS: dict[str, type[MixtureLayout]] = {"mixtral": MixtralLayout, "qwen2_moe": GatedMixtureLayout}
DENSE_LAYER = LayerBlocks(AttentionLayout(), MLPLayout())
ROUTING_WORDS: dict[
    str, dict[str, tuple[str, ...]]
] = {  # what a config may say of its routing function; a key that is left out says the same
    **{family: {"scoring_func": ("softmax",), "topk_method": ("greedy",)} for family in SOFTMAX},
    **{family: {"scoring_func": ("sigmoid", "noaux_tc"), "topk_method": ("noaux_tc",)} for family in CORRECTED},
}
SCORING: dict[str, Scoring] = {**dict.fromkeys(SOFTMAX, "softmax"), **dict.fromkeys(CORRECTED, "sigmoid")}
COUNT_KEYS = {
    "qwen2_moe": "num_experts",
    "qwen3_moe": "num_experts",
    "mixtral": "num_local_experts",
    **dict.fromkeys(CORRECTED, "n_routed_experts"),
}
GROUPS = {"deepseek_v3": (8, 4)}  # n_group and topk_group of a config without them
SCALES = {"deepseek_v3": 2.5, "glm4_moe_lite": 1.8}  # routed_scaling_factor of a config without it
ONE_BY_DEFAULT = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")  # shared experts; and weights are renormalised
FIRST_DENSE = {"dots1": 0, "deepseek_v3": 3, "glm4_moe": 1, "glm4_moe_lite": 1}  # layers of a config without the key
SHARED_SIZE = 5_632  # of a Qwen2-MoE without the key
LAYER_KINDS = ("dense", "sparse")  # in `mlp_layer_types`
OTHER_COUNT_KEY = "num_local_experts"  # as transformers 5 writes it


def mixture_blocks(config: JsonObject, family: str, num_layers: int, attention: BlockLayout) -> tuple[LayerBlocks, ...]:
    """The layers for `ModelSpec.blocks`. UserError: an unknown routing function, or sizes that do not fit."""
    for key, known in ROUTING_WORDS[family].items():
        given = config.text(key)
        if given is not None and given not in known:
            raise UserError(
                f"routing function '{given}' ({key}) is not supported for {family}, only {' and '.join(known)};"
                f" use another model"
            )
    if family == "mixtral" and config.get("router_jitter_noise") not in (None, 0):
        raise config.wrong("router_jitter_noise", "0 is needed, because noise would change the routes")
    size_key = "intermediate_size" if family == "mixtral" else "moe_intermediate_size"
    expert_size = config.integer(size_key, most=MOST_WIDTH)
    kind = LAYOUTS.get(family, MixtureLayout)
    mixture = kind(_routing(config, family), expert_size, _shared_size(config, family, expert_size))
    dense_layer, sparse_layer = LayerBlocks(attention, MLPLayout()), LayerBlocks(attention, mixture)
    dense = _dense_layers(config, family, num_layers)
    layers = [dense_layer if layer in dense else sparse_layer for layer in range(num_layers)]
    if sparse_layer not in layers:
        raise UserError(f"none of the {num_layers} layers of this {family} has experts; correct the config")
    while len(layers) > 1 and layers[-1] == layers[-2]:
        layers.pop()
    return tuple(layers)


def _shared_size(config: JsonObject, family: str, expert_size: int) -> int:
    if family == "qwen2_moe":
        return config.integer("shared_expert_intermediate_size", SHARED_SIZE, most=MOST_WIDTH)
    if family not in CORRECTED:
        return 0
    left_out = 1 if family in ONE_BY_DEFAULT else 0
    return expert_size * config.integer("n_shared_experts", left_out, most=MOST_HEADS, least=0)


def _routing(config: JsonObject, family: str) -> Routing:
    key = COUNT_KEYS[family] if COUNT_KEYS[family] in config else OTHER_COUNT_KEY
    experts = config.integer(key if key in config else COUNT_KEYS[family], most=MOST_HEADS)
    top_k = config.integer("num_experts_per_tok", most=MOST_HEADS)
    groups, kept = 1, 1
    if family in CORRECTED:
        defaults = zip(("n_group", "topk_group"), GROUPS.get(family, (1, 1)), strict=True)
        groups, kept = (config.integer(name, default, most=MOST_HEADS) for name, default in defaults)
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
    return Routing(
        num_experts=experts,
        top_k=top_k,
        scoring=SCORING[family],
        renormalise=config.flag("norm_topk_prob", family in ONE_BY_DEFAULT) or family == "mixtral",
        corrected=family in CORRECTED,
        num_groups=groups,
        kept_groups=kept,
        scale=_scale(config, family) if family in CORRECTED else 1.0,
    )


def _scale(config: JsonObject, family: str) -> float:
    return config.number("routed_scaling_factor", SCALES.get(family, 1.0), least=1e-3, most=1e3)


def _dense_layers(config: JsonObject, family: str, num_layers: int) -> set[int]:
    if family in LATENT_FAMILIES and config.integer("moe_layer_freq", 1, most=MOST_LAYERS) != 1:
        raise config.wrong("moe_layer_freq", "1 is needed")
    if family == "glm4_moe_lite" and (kinds := config.texts("mlp_layer_types")):
        if len(kinds) != num_layers or not set(kinds) <= set(LAYER_KINDS):
            raise config.wrong("mlp_layer_types", f"'dense' or 'sparse' for each of the {num_layers} layers is needed")
        return {layer for layer, kind in enumerate(kinds) if kind == "dense"}
    if family in CORRECTED:
        return set(range(config.integer("first_k_dense_replace", FIRST_DENSE[family], most=MOST_LAYERS, least=0)))
    if family == "mixtral":
        return set()
    step = config.integer("decoder_sparse_step", 1, most=MOST_LAYERS)
    return {*config.integers("mlp_only_layers"), *(layer for layer in range(num_layers) if (layer + 1) % step)}


def mixture_fields(spec: ModelSpec) -> dict[str, Any]:
    """The mixture's fields in the config.json of an export."""
    layers = [spec.blocks_of(layer).mlp for layer in range(spec.num_layers)]
    dense = [layer for layer, block in enumerate(layers) if not isinstance(block, MixtureLayout)]
    mixture = next((block for block in layers if isinstance(block, MixtureLayout)), None)
    assert mixture is not None, f"a model of {spec.family} has experts in some layer"
    routing = mixture.routing
    if spec.family == "mixtral":
        return {
            "num_local_experts": routing.num_experts,
            "num_experts_per_tok": routing.top_k,
            "output_router_logits": False,
            "router_jitter_noise": 0.0,
        }
    fields: dict[str, Any] = {
        COUNT_KEYS[spec.family]: routing.num_experts,
        "num_experts_per_tok": routing.top_k,
        "moe_intermediate_size": mixture.expert_size,
        "norm_topk_prob": routing.renormalise,
        "sliding_window": None,
    }
    if spec.family == "qwen2_moe":
        fields |= {"shared_expert_intermediate_size": mixture.shared_size, "qkv_bias": spec.qkv_bias}
    if spec.family in SOFTMAX:
        return fields | {"mlp_only_layers": dense, "decoder_sparse_step": 1, "output_router_logits": False}
    if spec.family == "glm4_moe_lite":
        fields["mlp_layer_types"] = [LAYER_KINDS[layer not in dense] for layer in range(spec.num_layers)]
    return fields | {
        "n_shared_experts": mixture.shared_size // mixture.expert_size,
        "n_group": routing.num_groups,
        "topk_group": routing.kept_groups,
        "routed_scaling_factor": routing.scale,
        "first_k_dense_replace": len(dense),
        "scoring_func": routing.scoring,
    }
