"""Translates Hugging Face `config.json` to ModelSpec and back. No torch, so that `octetrl check` starts fast.

family.py lists the families of models. mixture_config.py reads experts, attention_config.py latent attention and
sliding windows, rope_config.py RoPE and its scaling. A setting that this decoder does not support (another activation,
another kind of RoPE scaling) is refused by name.

The decoder with a scalar head (models/scalar_decoder.py) is *ForSequenceClassification with one label. It is read only
with `scalar`. Commands that generate do not pass it, so they refuse a reward model.

Both spellings are read: transformers 4 (`rope_theta` and `rope_scaling` at the top) and 5 (both in
`rope_parameters`). The older one is written, because every version reads it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from octetrl.config.shipped import way_to_make
from octetrl.models.attention_config import latent_fields, latent_layout, window_fields, windows, with_windows
from octetrl.models.blocks.attention.layout import AttentionLayout
from octetrl.models.blocks.gated_attention.layout import GatedAttentionLayout
from octetrl.models.blocks.mlp.layout import MLPLayout
from octetrl.models.delta_config import delta_fields, delta_layers
from octetrl.models.family import CAUSAL, FAMILIES, SCALAR, Family, Flag
from octetrl.models.mixture_config import mixture_blocks, mixture_fields
from octetrl.models.rope_config import (
    SHARE,
    rope_parameters,
    rope_scaling,
    rotated_size,
    scaled_positions,
    scaling_field,
)
from octetrl.models.text_part import outer_config, outer_family, text_of, with_outer
from octetrl.shapes.blocks import BlockLayout, LayerBlocks
from octetrl.shapes.sizes import SUPPORTED_HEAD_SIZES
from octetrl.shapes.spec import MOST_HEADS, MOST_LAYERS, MOST_TOKENS, MOST_WIDTH, ModelSpec
from octetrl.system.errors import UserError, dangling
from octetrl.system.json_file import JsonObject, read_json

Implementation = Literal["auto", "octetrl", "transformers"]  # as `model.implementation`
DENSE: tuple[LayerBlocks, ...] = (
    LayerBlocks(AttentionLayout(), MLPLayout()),
)  # every layer of a model without experts
BY_ARCHITECTURE = {family.architecture: family for family in FAMILIES.values()}
OWNERS = {  # on the hub, by how the names of their models begin
    "qwen": "Qwen", "llama": "meta-llama", "moonlight": "moonshotai", "deepseek": "deepseek-ai",
    "mistral": "mistralai", "mixtral": "mistralai", "smollm": "HuggingFaceTB", "phi": "microsoft", "glm": "zai-org",
    "gpt-oss": "openai",
}  # fmt: skip


def load_spec(folder: str | Path, *, scalar: bool = False, implementation: Implementation = "auto") -> ModelSpec:
    """The spec of a model folder: config.json, with the end-of-text tokens of generation_config.json if any.

    `scalar`: a *ForSequenceClassification is accepted too. `implementation`: as model.implementation. UserError: no
    folder, no config.json, not JSON, or a model that is not supported.
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
        spec = spec_from_config(config.values_by_key, scalar=scalar, implementation=implementation)
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


def is_mxfp8(folder: str | Path) -> bool:
    """Whether config.json says that the folder's codes are MXFP8, as ModelOpt writes it (`quant_algo`) or by the method
    "mxfp8"."""
    path = Path(folder) / "config.json"
    return path.is_file() and _says_mxfp8(read_json(path).object("quantization_config"))


def _says_mxfp8(quantization: JsonObject) -> bool:
    inner = quantization.object("quantization")
    words = quantization.text("quant_algo"), quantization.text("quant_method"), inner.text("quant_algo")
    return any("mxfp8" in (word or "").lower() for word in words)


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


def spec_from_config(
    content: Mapping[str, Any], *, scalar: bool = False, implementation: Implementation = "auto"
) -> ModelSpec:
    """The spec of a config.json's content. UserError, one line, when this decoder can't run the model."""
    outer = config = JsonObject(content)
    family = outer_family(config, scalar=scalar)
    if family is not None:
        config = text_of(config, family)
    family = family or _family(config, scalar)
    if family is None or implementation == "transformers":
        return _of_transformers(config, implementation, scalar=scalar)
    _refuse_what_we_lack(config, family)
    heads = config.integer("num_attention_heads", most=MOST_HEADS)
    hidden_size = config.integer("hidden_size", most=MOST_WIDTH)
    vocab_size = config.integer("vocab_size", most=MOST_TOKENS)
    num_layers = config.integer("num_hidden_layers", most=MOST_LAYERS)
    max_positions = config.integer("max_position_embeddings", family.max_positions, most=MOST_TOKENS)
    rope = rope_parameters(config, family.rope)
    scaling = rope_scaling(rope, config, max_positions)
    if scaling is not None and not family.scales_rope:
        raise UserError(f"RoPE scaling is not supported for {family.name}; use another model")
    latent = None if family.query_latent is None else latent_layout(config, family.query_latent)
    head_size = config.integer("head_dim", family.head_size or hidden_size // heads, most=MOST_WIDTH)
    rotated = rotated_size(rope, family, head_size)
    attention = latent or (AttentionLayout if family.delta is None else GatedAttentionLayout)(
        rotated=rotated, sinks=family.sinks
    )
    positions = scaled_positions(scaling, max_positions)
    inner = "moe_intermediate_size" if family.experts and family.experts.everywhere else "intermediate_size"
    has_bias = config.flag("attention_bias", family.has_bias)
    kv_heads = heads if "num_key_value_heads" in config else family.kv_heads or heads
    spec = ModelSpec(
        family=family.name,
        num_layers=num_layers,
        hidden_size=hidden_size,
        intermediate_size=config.integer(inner, most=MOST_WIDTH),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", kv_heads, most=MOST_HEADS),
        head_size=head_size if latent is None else latent.nope_size + latent.rope_size,
        vocab_size=vocab_size,
        max_positions=positions,
        rms_norm_eps=config.number("rms_norm_eps", family.rms_norm_eps, least=1e-12, most=1.0),
        rope_theta=rope.number("rope_theta", family.rope_theta, least=1e-3, most=1e30),
        rope_scaling=scaling,
        qkv_bias=has_bias or _flag(config, family.qkv_bias),
        qk_norm=_flag(config, family.qk_norm),
        tied_embeddings=config.flag("tie_word_embeddings"),
        blocks=_layers(config, family, num_layers, positions, attention),
        eos_token_ids=config.token_ids("eos_token_id", vocab_size),
        bos_token_id=next(iter(config.token_ids("bos_token_id", vocab_size)), None),
        pad_token_id=_pad_token_id(config, family, vocab_size),
        o_bias=has_bias and family.takes_o_bias,
        fused_files=family.fused_files,
        offset_norms=family.delta is not None,
        outer_config=None if outer is config else outer_config(outer),
    )
    _refuse_heads(spec, has_latents=latent is not None)
    return spec


def _layers(
    config: JsonObject, family: Family, num_layers: int, max_positions: int, attention: BlockLayout
) -> tuple[LayerBlocks, ...]:
    """`ModelSpec.blocks`. `attention`: that of a layer with full attention."""
    blocks: tuple[LayerBlocks, ...] = (LayerBlocks(attention, MLPLayout()),)
    if family.experts is not None:
        blocks = mixture_blocks(config, family, family.experts, num_layers, attention)
    if family.delta is not None:
        return delta_layers(config, family.delta, blocks, num_layers)
    return with_windows(blocks, windows(config, family, num_layers, max_positions), num_layers)


def _refuse_heads(spec: ModelSpec, *, has_latents: bool) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise UserError(
            f"num_attention_heads {spec.num_heads} is not a multiple of num_key_value_heads {spec.num_kv_heads};"
            f" correct the config"
        )
    if not has_latents and spec.head_size not in SUPPORTED_HEAD_SIZES:
        sizes = ", ".join(map(str, SUPPORTED_HEAD_SIZES))
        raise UserError(
            f"head size {spec.head_size} (head_dim, or hidden_size / num_attention_heads) is not supported,"
            f" only {sizes} are; use another model"
        )


def _of_transformers(config: JsonObject, implementation: Implementation, *, scalar: bool) -> ModelSpec:
    """The spec of a causal model that transformers' modules compute. UserError: they don't, or may not."""
    named = (config.texts("architectures") or [f"model_type {config.text('model_type')!r}"])[0]
    if scalar or implementation == "octetrl" or named.endswith(SCALAR):
        raise UserError(
            f"unsupported architecture {named}; supported are {', '.join(BY_ARCHITECTURE)}; docs/models.md says why"
            " others are not"
        )
    from octetrl.models.transformers_shape import transformers_spec  # imports torch and transformers' models

    return transformers_spec(config.values_by_key)


def hf_config(spec: ModelSpec, dtype: str = "bfloat16", *, scalar: bool = False) -> dict[str, Any]:
    """The config.json of an export, for transformers 4 and 5. `spec_from_config` inverts it."""
    if spec.hf_config is not None:
        return {**json.loads(spec.hf_config), "eos_token_id": _eos_field(spec), "torch_dtype": dtype, "dtype": dtype}
    family = FAMILIES[spec.family]
    config: dict[str, Any] = {
        "architectures": [family.architecture.replace(CAUSAL, SCALAR) if scalar else family.architecture],
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
        "attention_bias": spec.o_bias if family.takes_o_bias else spec.qkv_bias,
        "attention_dropout": 0.0,
        "tie_word_embeddings": spec.tied_embeddings,
        "bos_token_id": spec.bos_token_id,
        "eos_token_id": _eos_field(spec),
        "pad_token_id": spec.pad_token_id,
        "torch_dtype": dtype,
    }
    if family.experts is not None:
        config |= mixture_fields(spec, family.experts)
    for flag, value in ((family.qkv_bias, spec.qkv_bias), (family.qk_norm, spec.qk_norm)):
        config |= {flag.key: value} if isinstance(flag, Flag) else {}
    if family.rotated_share not in (None, 1):
        config |= {SHARE: spec.rotary_size / spec.head_size, "num_nextn_predict_layers": 0}
    if family.delta is not None:
        config |= delta_fields(spec)
    if spec.outer_config is not None and not scalar:
        return with_outer(config, spec.outer_config)
    config |= latent_fields(spec.blocks_of(0).attention) | window_fields(spec, family)
    return config | ({"id2label": {"0": "reward"}, "label2id": {"reward": 0}} if scalar else {})


def hf_generation_config(spec: ModelSpec) -> dict[str, Any]:
    """The generation_config.json of an export: its first and last tokens."""
    return {"bos_token_id": spec.bos_token_id, "eos_token_id": _eos_field(spec), "do_sample": True}


def _flag(config: JsonObject, flag: bool | Flag) -> bool:
    return config.flag(*flag) if isinstance(flag, Flag) else flag


def _pad_token_id(config: JsonObject, family: Family, vocab_size: int) -> int | None:
    """As transformers has it. Some configs have -1 for none."""
    given = config.get("pad_token_id", family.pad_token_id)
    return given if type(given) is int and 0 <= given < vocab_size else None


def _eos_field(spec: ModelSpec) -> int | list[int] | None:
    if not spec.eos_token_ids:
        return None
    return spec.eos_token_ids[0] if len(spec.eos_token_ids) == 1 else list(spec.eos_token_ids)


def _family(config: JsonObject, scalar: bool) -> Family | None:
    """None: no family of ours."""
    architectures, model_type = config.texts("architectures"), config.text("model_type")
    for architecture in architectures:
        architecture = architecture.replace(SCALAR, CAUSAL) if scalar else architecture
        if architecture in BY_ARCHITECTURE:
            return BY_ARCHITECTURE[architecture]
    if not architectures and model_type in FAMILIES:
        return FAMILIES[model_type]
    return None


def _refuse_what_we_lack(config: JsonObject, family: Family) -> None:
    if "hidden_act" in config and config["hidden_act"] is None:
        raise config.wrong("hidden_act", "'silu' is needed")
    for key in ("dtype", "torch_dtype"):
        if config.text(key) not in (None, "auto", "float32", "bfloat16", "float16"):
            raise config.wrong(key, "float32, bfloat16 or float16 is needed")
    activation = config.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UserError(f"hidden_act '{activation}' is not supported, only 'silu' is; use another model")
    for key, is_able in (("attention_bias", family.takes_bias), ("mlp_bias", False)):
        if config.flag(key) and not is_able:
            raise UserError(f"{key} true is not supported for {family.name}; use a model without it")
    quantization = config.object("quantization_config")
    if (
        quantization
        and not _says_mxfp8(quantization)
        and not (family.experts and family.experts.mxfp4 and quantization.text("quant_method") == "mxfp4")
        and (quantization.get("quant_method") != "fp8" or quantization.get("weight_block_size") != [128, 128])
    ):
        raise UserError(
            f"quantization '{quantization.get('quant_method')}' with blocks {quantization.get('weight_block_size')} is"
            f" not supported, only 'fp8' with [128, 128] and ModelOpt's MXFP8 are; use the BF16 weights of the model"
        )
