"""Reads, writes and merges adapters in PEFT's form, which has one adapter for each unfused projection.

    adapter_config.json           rank, alpha, targets, and the base's folder
    adapter_model.safetensors     base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight  [rank, in]
                                  ...                                              lora_B.weight  [out, rank]
                                  base_model.model.score.weight                                   [1, hidden]

                  ...mlp.experts.7.down_proj.lora_A.weight                                        with lora.experts

`score` is the float32 head of a reward model (task_type SEQ_CLS), which is trained whole. PEFT lists it in
`modules_to_save`, together with a `classifier` that these models do not have.

Values are saved in the model's dtype, as the policy ran with them. A merged weight is round(W + alpha / rank * B A),
summed in float32 from the unquantised W. If the run's weights were FP8, the merged model equals the trained one up to
FP8's rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from octetrl.config.lora import adaptable, targets_of, unknown_target
from octetrl.config.schema import LoraConfig
from octetrl.layers.tensor_group import join_rows
from octetrl.layers.weight_memory import Loading
from octetrl.models.decoder import Decoder
from octetrl.models.hf_weights import hf_files, load_weights
from octetrl.models.weight_files import SCORE, model_prefix
from octetrl.shapes.blocks import PLACES
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError, dangling
from octetrl.system.json_file import JsonObject, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model"
EXPERTS = "octetrl_experts"  # in the config: whether each expert has adapters
NAMES_SHOWN = 3
MOST_RANK = 1024  # as a recipe allows
CUT_SUFFIX = ".lora_B.weight"  # of tensors of which each tensor-parallel worker has some rows
UNSUPPORTED = {  # fields that would change the formula, with the value that does not
    "bias": "none",
    "fan_in_fan_out": False,
    "use_rslora": False,
    "use_dora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "layer_replication": None,
    "target_parameters": None,
}
READ = {"peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "target_modules", "modules_to_save"}
READ |= {"init_lora_weights", EXPERTS, *UNSUPPORTED}
WITHOUT_EFFECT = {  # other fields of PEFT that change no weight of a trained adapter
    "auto_mapping", "peft_version", "revision", "inference_mode", "runtime_config", "lora_dropout", "exclude_modules",
    "layers_pattern", "megatron_core", "ensure_weight_tying", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config",
}  # fmt: skip
PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")  # the others subtract A and B's first product from W
TASKS = {False: "CAUSAL_LM", True: "SEQ_CLS"}  # by whether the head is a scalar
HEADS = {"score", "classifier"}  # PEFT's names of them


class AdapterConfig(NamedTuple):
    """The content of an adapter's config."""

    lora: LoraConfig  # `path` is the folder
    base: str | None  # the folder of the base model
    is_scalar: bool  # a reward model's, with its head


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


# ---------------------------------------------------------------- out


def _adapter_tensors(model: Decoder) -> dict[str, Tensor]:
    """Live tensors by PEFT's names. Tensor-parallel workers call it together, and have copies of all rows of B."""
    tensors = {name: tensor.detach() for name, tensor in _named(model)}
    return {name: join_rows(model.group, one) if name.endswith(CUT_SUFFIX) else one for name, one in tensors.items()}


def _adapter_config(model: Decoder, base: str | None) -> bytes:
    assert model.lora is not None, "a model without adapters"
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[model.is_scalar],
        "modules_to_save": ["score"] if model.is_scalar else None,
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "target_modules": list(targets_of(model.lora, model.spec)),
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
        **UNSUPPORTED,
        **({EXPERTS: True} if model.lora.experts else {}),
    }
    return (json.dumps(config, indent=2) + "\n").encode()


def _named(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """PEFT's name and our view of every A and B, and of a scalar head."""
    layouts, prefix = dict(adaptable(model.spec)), model_prefix(model.spec)
    for name, adapter in model.adapters():
        _, layer, module, _ = name.split(".", 3)  # layers.3.attention.qkv_proj, or as in a checkpoint
        in_layer = f"{_their_module(model.spec, int(layer), module)}." if model.spec.hf_config is None else ""
        submodule = f"{in_layer}{layouts[name].submodule}"
        for expert, part, a_RK, b_nR in adapter.matrices():
            theirs = f"{PREFIX}.{prefix}.layers.{layer}.{submodule}{expert}{part.name}"
            yield f"{theirs}.lora_A.weight", a_RK
            yield f"{theirs}.lora_B.weight", b_nR
    if model.is_scalar:
        yield f"{PREFIX}.{SCORE}", model.get_parameter(SCORE)


def _their_module(spec: ModelSpec, layer: int, place: str) -> str:
    """The name of a layer's module in transformers, where every mixture is `mlp`, also Mixtral's. `place`: ours."""
    attention, mlp = PLACES
    return mlp.hf_name if place == mlp.name else spec.blocks_of(layer).attention.hf_name or attention.hf_name


# ---------------------------------------------------------------- in


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Reads the config of a LoRA adapter. UserError: none, or one of another kind."""
    file = folder / CONFIG
    if not file.exists():
        raise UserError(f"'{folder}' has no {CONFIG}; give the folder of a PEFT adapter{dangling(file)}")
    config = read_json(file, "fetch the adapter again")
    kind = config.text("peft_type")
    if kind != "LORA":
        raise UserError(f"{file}: peft_type {kind} is not LORA; only LoRA adapters are known here")
    rank, alpha = config.integer("r", most=MOST_RANK), config.number("lora_alpha")
    targets = config.texts("target_modules")
    for field, plain in UNSUPPORTED.items():
        if config.get(field) not in (plain, None):
            raise UserError(f"{file}: {field} {config[field]} is not supported; the adapter needs {field} {plain}")
    _refuse_other_weights(config, file)
    is_scalar = config.get("task_type") == TASKS[True]
    whole = config.texts("modules_to_save")
    if not set(whole) <= (HEADS if is_scalar else set()):
        raise UserError(f"{file}: modules_to_save {whole} is not supported; only the head of a reward model is")
    if not targets:
        raise UserError(f"{file}: target_modules is empty; fetch the adapter again")
    experts = config.get(EXPERTS) is True
    lora = LoraConfig(rank=rank, alpha=alpha, targets=tuple(targets), experts=experts, path=str(folder))
    return AdapterConfig(lora, config.text("base_model_name_or_path"), is_scalar)


def _refuse_other_weights(config: JsonObject, file: Path) -> None:
    """Raises UserError for an initialisation that changed the base, and for a field that is not known and is set."""
    init = config.get("init_lora_weights")
    if init not in PLAIN_INITS:
        raise UserError(
            f"{file}: init_lora_weights {init!r} also changed the base's weights, which the adapter does not contain;"
            " save it with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
        )
    for field in sorted(config.keys() - READ - WITHOUT_EFFECT):
        if config[field]:
            raise UserError(
                f"{file}: {field} {config[field]!r} is not supported and may change weights; give an adapter of plain"
                " LoRA, or remove the field if it has no effect"
            )


def check_adapter(lora: LoraConfig, folder: Path, spec: ModelSpec, *, is_scalar: bool) -> None:
    """UserError unless the adapter in `folder` has `lora`'s rank, alpha and targets, and a scalar head or none."""
    theirs, _, has_head = read_adapter_config(folder)
    unknown = unknown_target(targets_of(theirs, spec), spec)
    if unknown is not None:
        raise UserError(f"{folder / CONFIG}: target_modules: {unknown}")
    if has_head != is_scalar:
        raise UserError(
            f"the adapter in '{folder}' has task_type {TASKS[has_head]}, one of {TASKS[is_scalar]} is needed here;"
            f" a reward model's adapter goes with algorithm reward_model, and any other with a policy"
        )
    pairs = {
        "rank": (theirs.rank, lora.rank),
        "alpha": (theirs.alpha, lora.alpha),
        "experts": (theirs.experts, lora.experts),
        "targets": (sorted(targets_of(theirs, spec)), sorted(targets_of(lora, spec))),
    }
    for field, (saved, wanted) in pairs.items():
        if saved != wanted:
            raise UserError(f"model.lora.{field}: {wanted}, but the adapter in '{folder}' has {saved}; give it that")


@torch.no_grad()
def load_adapter(model: Decoder, folder: Path) -> None:
    """Fills the adapters of `model`, and its scalar head. UserError: another rank, alpha, targets or kind; tensors that
    are missing, extra, misshapen or not finite."""
    assert model.lora is not None, "a model without adapters"
    check_adapter(model.lora, folder, model.spec, is_scalar=model.is_scalar)
    tensors = {name: _own_rows(model, name, tensor) for name, tensor in _read(folder / WEIGHTS).items()}
    own = dict(_named(model))
    problems = [f"'{name}' is missing" for name in own if name not in tensors]
    problems += [f"'{name}' is extra" for name in tensors if name not in own]
    for name in own.keys() & tensors.keys():
        shape, wanted_shape = list(tensors[name].shape), list(own[name].shape)
        if shape != wanted_shape:
            problems.append(f"'{name}' is {shape} instead of {wanted_shape}")
        elif not tensors[name].to(own[name].dtype).isfinite().all():
            problems.append(f"'{name}' is not finite everywhere in the model's dtype")
    if problems:
        shown = "; ".join(sorted(problems)[:NAMES_SHOWN])
        raise UserError(f"{folder / WEIGHTS} is not an adapter of this model: {shown} ({len(problems)} problems)")
    for name, view in own.items():
        view.copy_(tensors[name])


def _own_rows(model: Decoder, name: str, tensor: Tensor) -> Tensor:
    """The rows of a B that `model` has."""
    rank, size = model.group.rank, model.group.size
    if not name.endswith(CUT_SUFFIX) or tensor.shape[0] % size:
        return tensor
    return tensor.unflatten(0, (size, -1))[rank]


def _read(file: Path) -> Mapping[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} can't be read as safetensors ({error}); fetch it again") from None
    return tensors


def begin_adapters(model: Decoder, seed: int) -> None:
    """Loads adapters from the folder of `model.lora`, or creates new ones. Does nothing without `model.lora`."""
    if model.lora is not None and model.lora.path is not None:
        load_adapter(model, Path(model.lora.path))
    else:
        model.draw_adapters(seed)


# ---------------------------------------------------------------- what a run trains: an adapter, or whole weights


def trained_files(model: Decoder, base: str | None) -> dict[str, bytes | dict[str, Tensor]]:
    """The trained part as live tensors and bytes, by file name: a PEFT adapter of `base`, or a Hugging Face model."""
    if model.lora is None:
        return hf_files(model)
    return {WEIGHTS: _adapter_tensors(model), CONFIG: _adapter_config(model, base)}


def load_trained(model: Decoder, folder: Path, loading: Loading | None = None) -> None:
    """The inverse of `trained_files`. `loading`: which rows of whole weights are read."""
    if model.lora is not None:
        load_adapter(model, folder)
    else:
        load_weights(model, folder, loading=loading)


# ---------------------------------------------------------------- merged


@torch.no_grad()
def merge_adapters(model: Decoder) -> None:
    """Adds every branch to its weight, in place, and sets the branches to zero."""
    for name, adapter in model.adapters():
        weight_NK: Any = model.get_submodule(name).weight
        assert weight_NK is not None, f"{name}: the weight was dropped; merge into a freshly loaded model"
        adapter.add_to(weight_NK)
        adapter.b.zero_()
    model.requantize()
