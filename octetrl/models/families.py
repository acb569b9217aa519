"""Translates Hugging Face `config.json` to ModelSpec and back. No torch, so that `octetrl check` starts fast.

These architectures are one decoder: LlamaForCausalLM (3.x), MistralForCausalLM, Phi3ForCausalLM, Qwen2ForCausalLM (2
and 2.5), Qwen3ForCausalLM, MixtralForCausalLM, Qwen2MoeForCausalLM, Qwen3MoeForCausalLM, Dots1ForCausalLM,
Glm4MoeForCausalLM (GLM-4.5), DeepseekV3ForCausalLM (Moonlight) and Glm4MoeLiteForCausalLM (GLM-4.7-Flash). The last
seven have a mixture of experts (models/mixture_config.py), the last two latent attention (models/latent_config.py).
models/rope_config.py reads RoPE and its scaling, models/window_config.py sliding windows. A setting that this decoder
does not support (another activation, another kind of RoPE scaling) is refused by name.

The decoder with a scalar head (models/scalar_decoder.py) is *ForSequenceClassification with one label. It is read only
with `scalar`. Commands that generate do not pass it, so they refuse a reward model.

Both spellings are read: transformers 4 (`rope_theta` and `rope_scaling` at the top) and 5 (both in
`rope_parameters`). The older one is written, because every version reads it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octetrl.config.made_first import way_to_make
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.latent_config import LATENT_FAMILIES, latent_fields, latent_layout
from octetrl.models.mixture_config import DENSE_LAYER, MIXTURES, mixture_blocks, mixture_fields
from octetrl.models.rope_config import (
    ROTATED_SHARES,
    SHARE,
    rope_parameters,
    rope_scaling,
    rotated_size,
    scaled_positions,
    scaling_field,
)
from octetrl.models.window_config import window_fields, windows, with_windows
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES
from octetrl.shapes.spec import MOST_HEADS, MOST_LAYERS, MOST_TOKENS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError, dangling
from octetrl.system.json_file import JsonObject, read_json

DENSE = (DENSE_LAYER,)  # every layer of a model without experts
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Phi3ForCausalLM": "phi3",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Dots1ForCausalLM": "dots1",
    "Glm4MoeForCausalLM": "glm4_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
}
CAUSAL, SCALAR = "ForCausalLM", "ForSequenceClassification"  # what an architecture's name ends with
ARCHITECTURES = {family: architecture for architecture, family in FAMILIES.items()}
OWNERS = {  # on the hub, by how the names of their models begin
    "qwen": "Qwen", "llama": "meta-llama", "moonlight": "moonshotai", "deepseek": "deepseek-ai",
    "mistral": "mistralai", "mixtral": "mistralai", "smollm": "HuggingFaceTB", "phi": "microsoft", "glm": "zai-org",
}  # fmt: skip
DEFAULT_ROPE_THETA = 10_000.0  # of the other families
ROPE_THETAS = {"mixtral": 1_000_000.0}
DEFAULT_MAX_POSITIONS = {
    "llama": 2_048,
    "mistral": 131_072,
    "mixtral": 131_072,
    "phi3": 4_096,
    "qwen2": 32_768,
    "qwen3": 32_768,
    "qwen2_moe": 32_768,
    "qwen3_moe": 32_768,
    "dots1": 2_048,
    "glm4_moe": 131_072,
    "deepseek_v3": 4_096,
    "glm4_moe_lite": 202_752,
}
DEFAULT_KV_HEADS = {  # of a config without the key, as in transformers; null and other families: one for each head
    **dict.fromkeys(("mistral", "mixtral", "glm4_moe"), 8),
    **dict.fromkeys(("qwen2", "qwen3", "dots1"), 32),
    "qwen2_moe": 16,
    "qwen3_moe": 4,
}
QK_NORM = ("qwen3", "qwen3_moe", "dots1")
ATTENTION_BIAS = ("llama", "qwen3", "qwen3_moe", "dots1", "glm4_moe")  # where `attention_bias` adds a bias to q, k, v
WITHOUT_O_BIAS = ("glm4_moe",)  # of these; the others have one of o too
SMALL_EPS = ("phi3", "mixtral", "glm4_moe", "glm4_moe_lite")  # 1e-5 if the key is missing, as in transformers


def load_spec(folder: str | Path, *, scalar: bool = False) -> ModelSpec:
    """The spec of a model folder: config.json, with the end-of-text tokens of generation_config.json if any.

    `scalar`: a *ForSequenceClassification is accepted too. UserError: no folder, no config.json, not JSON, or a model
    that is not supported.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is not a folder" if folder.exists() else "does not exist"
        raise UserError(f"model folder '{folder}' {what}; {_way_to(folder)}{dangling(folder)}")
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            f"model folder '{folder}' has no config.json; give a Hugging Face folder, as export writes it"
            f"{dangling(path)}"
        )
    config = read_json(path)
    try:
        spec = spec_from_config(config.values_by_key, scalar=scalar)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    generation = folder / "generation_config.json"
    if os.path.lexists(generation):  # a link that leads nowhere is refused
        eos = read_json(generation).token_ids("eos_token_id", spec.vocab_size)
        spec = replace(spec, eos_token_ids=eos) if eos else spec
    return spec


def _way_to(folder: Path) -> str:
    """What to do about a folder that does not exist."""
    known = way_to_make(folder)
    if known is not None:
        return known
    way = "give a Hugging Face folder with config.json"
    in_models = folder.parent == Path("models")  # as the other shipped recipes and the README name it
    owner = next((owner for name, owner in OWNERS.items() if folder.name.lower().startswith(name)), "OWNER")
    return f"{way}; `hf download {owner}/{folder.name} --local-dir {folder}` fetches one" if in_models else way


def scale_format(folder: str | Path) -> str | None:
    """The format of FP8 scales in config.json: "ue8m0", "float", or None if it has none."""
    path = Path(folder) / "config.json"
    return read_json(path).object("quantization_config").text("scale_fmt") if path.is_file() else None


def prediction_layers(folder: str | Path) -> int:
    """Number of layers after the decoder's that predict further tokens; a checkpoint may hold them, unused here."""
    path = Path(folder) / "config.json"
    key = "num_nextn_predict_layers"
    return read_json(path).integer(key, 0, most=MOST_LAYERS, least=0) if path.is_file() else 0


def load_reward_spec(folder: str | Path) -> ModelSpec:
    """The spec of a trained reward model. UserError: a model of another kind."""
    try:
        spec = load_spec(folder, scalar=True)
        named = read_json(Path(folder) / "config.json").texts("architectures") or [""]
        if not named[0].endswith(SCALAR):
            raise UserError(f"'{folder}' holds a {named[0]}, no reward model; give the export of a reward_model run")
    except UserError as error:
        raise UserError(f"environment.reward_model: {error}") from None
    return spec


def load_critic_spec(folder: str | Path, policy: ModelSpec, context_length: int) -> ModelSpec:
    """The spec of a critic for `policy`. UserError: another vocabulary, or fewer positions."""
    try:
        spec = load_spec(folder, scalar=True)
    except UserError as error:
        raise UserError(f"critic.path: {error}") from None
    if spec.vocab_size != policy.vocab_size:
        raise UserError(
            f"critic.path: '{folder}' has a vocabulary of {spec.vocab_size}, the policy's is {policy.vocab_size};"
            f" give a model of the same tokenizer"
        )
    if spec.max_positions < context_length:
        raise UserError(
            f"critic.path: '{folder}' has {spec.max_positions} positions, model.context_length is {context_length};"
            f" give a model that reads as far"
        )
    return spec


def spec_from_config(content: Mapping[str, Any], *, scalar: bool = False) -> ModelSpec:
    """The spec of a config.json's content. UserError, one line, when this decoder can't run the model."""
    config = JsonObject(content)
    family = _family(config, scalar)
    _refuse_what_we_lack(config, family)
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    hidden_size = config.integer("hidden_size", most=MOST_WIDTH)
    vocab_size = config.integer("vocab_size", most=MOST_TOKENS)
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    max_positions = config.integer("max_position_embeddings", DEFAULT_MAX_POSITIONS[family], most=MOST_TOKENS)
    rope = rope_parameters(config)
    scaling = rope_scaling(rope, config, max_positions)
    latent = latent_layout(config, family) if family in LATENT_FAMILIES else None
    given_size = config.integer("head_dim", 128 if family == "qwen3" else hidden_size // heads, most=MOST_WIDTH)
    rotated = None if latent and family != "glm4_moe_lite" else rotated_size(rope, family, given_size)
    attention = latent or AttentionLayout(rotated=rotated)
    if scaling is not None and family == "phi3":
        raise UserError("RoPE scaling is not supported for phi3; use another model")
    has_bias = config.flag("attention_bias")
    qkv_bias = family == "qwen2" or has_bias or (family == "qwen2_moe" and config.flag("qkv_bias", True))
    positions = scaled_positions(scaling, max_positions)
    blocks = mixture_blocks(config, family, num_layers, attention) if family in MIXTURES else DENSE
    kv_heads = heads if "num_key_value_heads" in config else DEFAULT_KV_HEADS.get(family, heads)
    spec = ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", most=MOST_WIDTH),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", kv_heads, most=MOST_HEADS),
        head_size=given_size if latent is None else latent.nope_size + latent.rope_size,
        vocab_size=vocab_size,
        max_positions=positions,
        rms_norm_eps=config.number("rms_norm_eps", 1e-5 if family in SMALL_EPS else 1e-6, least=1e-12, most=1.0),
        rope_theta=rope.number("rope_theta", ROPE_THETAS.get(family, DEFAULT_ROPE_THETA), least=1e-3, most=1e30),
        rope_scaling=scaling,
        qkv_bias=qkv_bias,
        qk_norm=family in QK_NORM or (family == "glm4_moe" and config.flag("use_qk_norm")),
        tied_embeddings=config.flag("tie_word_embeddings"),
        blocks=with_windows(blocks, windows(config, family, num_layers, positions), num_layers),
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
        bos_token_id=next(iter(config.token_ids("bos_token_id", vocab_size)), None),
        pad_token_id=_pad_token_id(content, family, vocab_size),
        o_bias=has_bias and family not in WITHOUT_O_BIAS,
        fused_files=family == "phi3",
    )
    if spec.num_heads % spec.num_kv_heads:
        raise UserError(
            f"num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads {spec.num_kv_heads};"
            f" correct the config"
        )
    if latent is None and spec.head_size not in SUPPORTED_HEAD_SIZES:
        sizes = ", ".join(map(str, SUPPORTED_HEAD_SIZES))
        raise UserError(
            f"head size {spec.head_size} (head_dim, or hidden_size / num_attention_heads) is not supported,"
            f" only {sizes} are; use another model"
        )
    return spec


def hf_config(spec: ModelSpec, dtype: str = "bfloat16", *, scalar: bool = False) -> dict[str, Any]:
    """The config.json of an export, for transformers 4 and 5. `spec_from_config` inverts it."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[spec.family]],
        "model_type": spec.family,
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_size,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.rms_norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": scaling_field(spec.rope_scaling),
        "hidden_act": "silu",
        "attention_bias": spec.qkv_bias if spec.family in WITHOUT_O_BIAS else spec.o_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": _eos_field(spec),
        "pad_token_id": spec.pad_token_id,
        "torch_dtype": dtype,
    }
    if spec.family in MIXTURES:
        config |= mixture_fields(spec)
    if spec.family in LATENT_FAMILIES:
        config |= latent_fields(spec, spec.blocks_of(0).attention)
    if spec.family in ROTATED_SHARES:
        config |= {SHARE: spec.rotary_size / spec.head_size, "use_qk_norm": spec.qk_norm}
        config["num_nextn_predict_layers"] = 0
    config |= window_fields(spec)
    if scalar:
        config["architectures"] = [ARCHITECTURES[spec.family].replace(CAUSAL, SCALAR)]
        config |= {"id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return config


def hf_generation_config(spec: ModelSpec) -> dict[str, Any]:
    """The generation_config.json of an export: its first and last tokens."""
    return {"bos_token_id": spec.bos_token_id, "eos_token_id": _eos_field(spec), "do_sample": True}


def _pad_token_id(content: Mapping[str, Any], family: str, vocab_size: int) -> int | None:
    """As transformers has it. Some configs have -1 for none."""
    given = content.get("pad_token_id", 32_000 if family == "phi3" else None)
    return given if type(given) is int and 0 <= given < vocab_size else None


def _eos_field(spec: ModelSpec) -> int | list[int] | None:
    if not spec.eos_token_ids:
        return None
    return spec.eos_token_ids[0] if len(spec.eos_token_ids) == 1 else list(spec.eos_token_ids)


def _family(config: JsonObject, scalar: bool) -> str:
    architectures, model_type = config.texts("architectures"), config.text("model_type")
    for architecture in architectures:
        architecture = architecture.replace(SCALAR, CAUSAL) if scalar else architecture
        if architecture in FAMILIES:
            return FAMILIES[architecture]
    if not architectures and model_type is not None and model_type in ARCHITECTURES:
        return model_type
    given = architectures[0] if architectures else f"model_type {model_type!r}"
    raise UserError(
        f"unsupported architecture {given}; supported are {', '.join(FAMILIES)}; docs/models.md says why others are not"
    )


def _refuse_what_we_lack(config: JsonObject, family: str) -> None:
    if "hidden_act" in config and config["hidden_act"] is None:
        raise config.wrong("hidden_act", "'silu' is needed")
    for key in ("dtype", "torch_dtype"):
        if config.text(key) not in (None, "auto", "float32", "bfloat16", "float16"):
            raise config.wrong(key, "float32, bfloat16 or float16 is needed")
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"hidden_act '{activation}' is not supported, only 'silu' is; use another model")
    for key, able in (("attention_bias", ATTENTION_BIAS), ("mlp_bias", ())):
        if config.flag(key) and family not in able:
            raise UserError(f"{key} true is not supported for {family}; use a model without it")
    quantization = config.object("quantization_config")
    if quantization and (
        quantization.get("quant_method") != "fp8" or quantization.get("weight_block_size") != [128, 128]
    ):
        raise UserError(
            f"quantization '{quantization.get('quant_method')}' with blocks {quantization.get('weight_block_size')} is"
            f" not supported, only 'fp8' with [128, 128] is; use the BF16 weights of the model"
        )
