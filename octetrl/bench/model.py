"""The model that a bench measures: a preset with random weights that the device draws, or a folder's.

All precisions of a preset have the same weights: they follow from the seed and the kind of device.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import torch

from octetrl.data.tokenizer import VOCABULARIES, load_tokenizer
from octetrl.engine.stopping import Tokenizer
from octetrl.layers.weight_memory import Loading, filling
from octetrl.models.decoder import Decoder
from octetrl.models.families import load_spec, spec_from_config
from octetrl.models.hf_weights import load_weights
from octetrl.models.random_weights import EMBEDDING_STD
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.run.trained_model import weights_folder
from octetrl.shapes.presets import PRESETS, preset_config, refuse_unknown_model
from octetrl.shapes.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class BenchModel:
    """The model's shape, and where its weights are."""

    name: str  # of the result's file
    spec: ModelSpec
    folder: Path | None  # None: a preset


def find_model(model: str) -> BenchModel:
    """A preset, or a Hugging Face folder, run or checkpoint. Raises UserError."""
    if model in PRESETS:
        return BenchModel(model, spec_from_config(preset_config(model)), None)
    refuse_unknown_model(model)
    folder = weights_folder(Path(model))
    return BenchModel(Path(model).resolve().name, load_spec(folder), folder)


def fill_weights(model: Decoder, source: BenchModel, seed: int, loading: Loading | None = None) -> None:
    """The weights of the folder, or random ones of the preset, not quantised. `loading`: which rows are read from the
    files, all of them by default."""
    if source.folder is None:
        draw_on_device(model, seed)
    else:
        load_weights(model, source.folder, loading=loading)


@torch.no_grad()
def draw_on_device(model: Decoder, seed: int) -> None:
    """Like `Decoder.random_init`, but on the device, which creates billions of numbers a second. A part of a model gets
    its rows of the whole weights."""
    generator = torch.Generator(model.lm_head_weight.device).manual_seed(seed)
    fill, cut = filling(model), cut_rows_of(model.spec, model.lora)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            std = parameter.shape[1] ** -0.5 if name.startswith("layers.") else EMBEDDING_STD
            rows = cut.get(name)
            with fill(name):
                drawn = parameter if rows is None else parameter.new_empty(rows.whole_rows, *parameter.shape[1:])
                drawn.normal_(std=std, generator=generator)
                if rows is not None:
                    parameter.copy_(torch.cat([drawn[one.whole : one.whole + one.rows] for one in rows.pieces]))


class NoText:
    """The tokenizer of a model without one: tokens have no text, and none of them ends an answer."""

    eos_token_id = None

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        return ""


def tokenizer_of(model: BenchModel) -> Tokenizer:
    """The folder's tokenizer, or `NoText`."""
    folder = model.folder
    if folder is None or not any((folder / name).is_file() for name in VOCABULARIES):
        return NoText()
    tokenizer: Tokenizer = load_tokenizer(folder)
    return tokenizer


def give_memory_back(device: torch.device) -> None:
    """Free the memory of an arm that has no references left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
