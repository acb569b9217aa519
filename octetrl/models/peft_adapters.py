"""Adapters in PEFT's form, in and out, and the merge: the border where our fused branches become PEFT's single ones.

    adapter_config.json           rank, alpha, targets, and the base's folder
    adapter_model.safetensors     base_model.model.model.layers.3.self_attn.q_proj.lora_A.weight  [rank, in]
                                  ...                                              lora_B.weight  [out, rank]
                                  base_model.model.score.weight                                   [1, hidden]

The last is a reward model's (task_type SEQ_CLS): its head, float32, trained whole beside the adapters. PEFT lists it in
`modules_to_save`, together with a `classifier` that these models don't have.

The values are those that the policy ran with, in the model's dtype, so that what is saved, merged and served is one.
Merged, a weight is round(W + alpha / rank * B A), summed in float32 from the unquantised W: over FP8 weights the merged
model is the adapter beside the weights that the codes were made from, equal to what was trained up to FP8's rounding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from octetrl.config.blocks import PLACES
from octetrl.config.errors import UserError
from octetrl.config.json_file import read_json
from octetrl.config.schema import LORA_TARGETS, LoraConfig
from octetrl.models.decoder import Decoder
from octetrl.models.hf_weights import load_weights, save_weights
from octetrl.models.weight_files import SCORE

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model"
THEIR_MODULES = {place.name: place.hf_name for place in PLACES}
NAMES_SHOWN = 3
MOST_RANK = 1024  # as a recipe allows
UNSUPPORTED = {  # what would change the formula, with the value that doesn't
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
TASKS = {False: "CAUSAL_LM", True: "SEQ_CLS"}  # by whether the head is a scalar
HEADS = {"score", "classifier"}  # PEFT's names of them


class AdapterConfig(NamedTuple):
    """What an adapter's folder says of itself."""

    lora: LoraConfig  # `path` is the folder
    base: str | None  # the folder of the weights that it stands beside
    is_scalar: bool  # a reward model's, with its head


def is_adapter(folder: Path) -> bool:
    return (folder / CONFIG).is_file()


# ---------------------------------------------------------------- out


def save_adapter(model: Decoder, folder: Path, base: str | None) -> None:
    """Writes the adapters of `model`. `base`: the model folder they were trained beside; None: it has none."""
    assert model.lora is not None, "a model without adapters"
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _named(model)}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": TASKS[model.is_scalar],
        "modules_to_save": ["score"] if model.is_scalar else None,
        "base_model_name_or_path": base,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "target_modules": list(model.lora.targets),
        "lora_dropout": 0.0,
        "init_lora_weights": True,
        "inference_mode": True,
        **UNSUPPORTED,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _named(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """PEFT's name and our view of every A and B, and of a scalar head."""
    for name, adapter in model.adapters():
        _, layer, module, _ = name.split(".", 3)  # layers.3.attention.qkv_proj
        for part in adapter.parts:
            theirs = f"{PREFIX}.model.layers.{layer}.{THEIR_MODULES[module]}.{part.name}"
            a_RK, b_nR = adapter.part_tensors(part)
            yield f"{theirs}.lora_A.weight", a_RK
            yield f"{theirs}.lora_B.weight", b_nR
    if model.is_scalar:
        yield f"{PREFIX}.{SCORE}", model.get_parameter(SCORE)


# ---------------------------------------------------------------- in


def read_adapter_config(folder: Path) -> AdapterConfig:
    """UserError, one line, for a folder that holds no adapter of this kind."""
    file = folder / CONFIG
    if not file.exists():
        raise UserError(f"'{folder}' has no {CONFIG}; give the folder of a PEFT adapter")
    config = read_json(file, "fetch the adapter again")
    kind = config.text("peft_type")
    if kind != "LORA":
        raise UserError(f"{file}: peft_type {kind} is not LORA; only LoRA adapters are known here")
    rank, alpha = config.integer("r", most=MOST_RANK), config.number("lora_alpha")
    targets = config.texts("target_modules")
    for field, plain in UNSUPPORTED.items():
        if config.get(field) not in (plain, None):
            raise UserError(f"{file}: {field} {config[field]} is not supported; the adapter needs {field} {plain}")
    is_scalar = config.get("task_type") == TASKS[True]
    whole = config.texts("modules_to_save")
    if not set(whole) <= (HEADS if is_scalar else set()):
        raise UserError(f"{file}: modules_to_save {whole} is not supported; only the head of a reward model is")
    if not targets or not set(targets) <= set(LORA_TARGETS):
        raise UserError(f"{file}: target_modules {targets} must be a list out of {', '.join(LORA_TARGETS)}")
    ordered = tuple(target for target in LORA_TARGETS if target in targets)
    lora = LoraConfig(rank=rank, alpha=alpha, targets=ordered, path=str(folder))
    return AdapterConfig(lora, config.text("base_model_name_or_path"), is_scalar)


def check_adapter(lora: LoraConfig, folder: Path, *, is_scalar: bool) -> None:
    """UserError unless the adapter in `folder` has `lora`'s rank, alpha and targets, and a scalar head or none."""
    theirs, _, has_head = read_adapter_config(folder)
    if has_head != is_scalar:
        raise UserError(
            f"the adapter in '{folder}' has task_type {TASKS[has_head]}, one of {TASKS[is_scalar]} is needed here;"
            f" a reward model's adapter goes with algorithm reward_model, and any other with a policy"
        )
    pairs = {
        "rank": (theirs.rank, lora.rank),
        "alpha": (theirs.alpha, lora.alpha),
        "targets": (sorted(theirs.targets), sorted(lora.targets)),
    }
    for field, (saved, wanted) in pairs.items():
        if saved != wanted:
            raise UserError(f"model.lora.{field}: {wanted}, but the adapter in '{folder}' has {saved}; give it that")


@torch.no_grad()
def load_adapter(model: Decoder, folder: Path) -> None:
    """Fills the adapters of `model`, and its scalar head. UserError: another rank, alpha, targets or kind; tensors that
    are missing, extra, misshapen or not finite."""
    assert model.lora is not None, "a model without adapters"
    check_adapter(model.lora, folder, is_scalar=model.is_scalar)
    tensors = _read(folder / WEIGHTS)
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


def save_trained(model: Decoder, folder: Path, base: str | None) -> None:
    """In PEFT's form beside `base`, or in Hugging Face's."""
    if model.lora is not None:
        save_adapter(model, folder, base)
    else:
        save_weights(model, folder)


def load_trained(model: Decoder, folder: Path) -> None:
    """The inverse of `save_trained`."""
    if model.lora is not None:
        load_adapter(model, folder)
    else:
        load_weights(model, folder)


# ---------------------------------------------------------------- merged


@torch.no_grad()
def merge_adapters(model: Decoder) -> None:
    """Adds every branch to its weight, in place, and leaves the branches at zero: the same model in fewer products."""
    for name, adapter in model.adapters():
        weight_NK: Any = model.get_submodule(name).weight
        assert weight_NK is not None, f"{name}: the weight was dropped; merge into a freshly loaded model"
        for part in adapter.parts:
            a_RK, b_nR = adapter.part_tensors(part)
            rows_nK = weight_NK[part.start : part.stop]
            rows_nK.copy_(rows_nK.float() + adapter.scale * (b_nR.float() @ a_RK.float()))
        adapter.b.zero_()
    model.requantize()
