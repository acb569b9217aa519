"""Hugging Face safetensors in and out: the border where names, fused projections and FP8 checkpoints are translated.

In: one `model.safetensors` or shards with their index, BF16, float16 or float32; or block-FP8 (E4M3 codes with a
`weight_scale_inv` of 128 x 128 blocks), dequantised to BF16 here, once: inside, there is one quantiser. A scale is a
float, or a power of two in E8M0: that dtype, or bytes where config.json has `scale_fmt` "ue8m0". Every tensor's name,
shape and dtype is checked against the model before the first is read (models/weight_files.py), so a wrong folder costs
one line and no minutes; a value that is not finite in the model's dtype is an error that names its tensor.

Out: the same names, BF16 (`save_weights`) or block-FP8 (`save_weights_fp8`), split into shards by size, with
config.json and generation_config.json. Block-FP8 only at widths that are multiples of 128: transformers takes a block's
size from the number of scales, and would read a ragged last block wrongly.

q, k, v and gate, up are separate there and fused here, in that order; tied models have no lm_head.weight (where a
checkpoint brings one anyway it must equal the embedding). A buffer that old checkpoints carry, `rotary_emb.inv_freq`,
follows from the config and is ignored. A model with a scalar head has `score.weight` in the place of lm_head, as
*ForSequenceClassification has there.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octetrl.config.errors import UserError
from octetrl.config.spec import ModelSpec
from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, dequantize_weight, quantize_weight_reference
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, hf_generation_config
from octetrl.models.weight_files import INDEX, LM_HEAD, SCALE_SUFFIX, SINGLE, TensorHeader, checked_headers, pieces

# ---------------------------------------------------------------- in


@torch.no_grad()
def load_weights(model: Decoder, folder: str | Path, *, new_head: bool = False) -> None:
    """Fill `model` from a Hugging Face folder, then `requantize`. `new_head`: a scalar head that the folder, of a
    causal model, lacks is zero.

    UserError, one line: what `checked_headers` refuses; a value that is not finite in the model's dtype (its tensor).
    """
    headers = checked_headers(folder, model.spec, scalar=model.is_scalar, new_head=new_head)
    parameters = dict(model.named_parameters())
    with _Reader(headers) as reader:
        for piece in pieces(model.spec, scalar=model.is_scalar):
            rows = parameters[piece.parameter][piece.start : piece.start + piece.shape[0]]
            if piece.name in headers:
                name = f"{headers[piece.name].file}: '{piece.name}'"
                rows.copy_(_finite(reader.weight(piece.name), rows.dtype, name))
            else:  # the new head
                rows.zero_()
        if model.spec.tied_embeddings and LM_HEAD in headers:
            _check_tied(reader, headers[LM_HEAD].file)
    model.requantize()


def _finite(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """`value` in this dtype. UserError: it has values that are not finite there."""
    cast = value.to(dtype)
    if not cast.isfinite().all():
        if value.isfinite().all():
            raise UserError(
                f"{name} reaches {float(value.abs().max()):.3g}, which {str(dtype).removeprefix('torch.')} cannot hold;"
                f" use the model's BF16 weights, or set model.dtype=float32"
            )
        raise UserError(f"{name} is not finite everywhere; fetch it again")
    return cast


class _Reader:
    """Reads tensors by name from whichever file has them; block-FP8 comes out as BF16."""

    def __init__(self, headers: Mapping[str, TensorHeader]) -> None:
        self._headers = headers
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)

    def _read(self, name: str) -> Tensor:
        file = self._headers[name].file
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt").__enter__()
        tensor: Tensor = self._handles[file].get_tensor(name)
        return tensor

    def weight(self, name: str) -> Tensor:
        value = self._read(name)
        if value.dtype != E4M3:
            return value
        scale = self._read(name + SCALE_SUFFIX)
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        scale = scale.float()
        weight = dequantize_weight(Quantized(value, scale)).to(torch.bfloat16)
        _check_multipliers(value, scale, weight, name)
        return weight


def _check_multipliers(codes: Tensor, scale: Tensor, weight: Tensor, name: str) -> None:
    """UserError for a multiplier that is not above 0, or too large for its codes. Blocks of zeros may have 0."""
    is_zero = scale == 0
    erased = bool(is_zero.any()) and bool((dequantize_weight(Quantized(codes, is_zero.float())) != 0).any())
    too_large = not weight.isfinite().all() and bool(scale.isfinite().all()) and bool(codes.float().isfinite().all())
    if erased or too_large or bool((scale < 0).any()):
        given = float(scale.max() if too_large else scale.min())
        raise UserError(
            f"'{name}{SCALE_SUFFIX}' has a multiplier of {given:.3g}; one is above 0, and small enough for its codes to"
            f" stay finite in BF16: fetch it again"
        )


def _check_tied(reader: _Reader, file: Path) -> None:
    if not torch.equal(reader.weight(LM_HEAD), reader.weight("model.embed_tokens.weight")):
        raise UserError(
            f"{file}: {LM_HEAD} differs from the embedding though config.json says tie_word_embeddings; set it false"
        )


# ---------------------------------------------------------------- out


def save_weights(model: Decoder, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write `model` as a Hugging Face folder in its own dtype: shards, config.json, generation_config.json."""
    config = hf_config(model.spec, str(model.dtype).removeprefix("torch."), scalar=model.is_scalar)
    _write(_split(model), config, model.spec, Path(folder), max_shard_bytes)


def save_weights_fp8(model: Decoder, folder: str | Path, max_shard_bytes: int = 5_000_000_000) -> None:
    """Write `model` as block-FP8, DeepSeek's layout, which vLLM, SGLang and transformers read.

    The linears of the layers become E4M3 codes with a float32 `weight_scale_inv` (our `scale`) for each 128 x 128
    block of the tensors as they are named there, so blocks start again at k, v and up; the rest does not change.
    UserError: a width that is no multiple of 128.
    """
    if ragged := {name: size for name, size in model.spec.linear_sizes().items() if size % BLOCK}:
        given = ", ".join(f"{name} {size}" for name, size in ragged.items())
        raise UserError(f"FP8 weights are exported in whole blocks of {BLOCK}, and this model has {given}; export BF16")
    config = hf_config(model.spec, str(model.dtype).removeprefix("torch."), scalar=model.is_scalar)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    linears = {piece.name for piece in pieces(model.spec, scalar=model.is_scalar) if piece.is_linear}
    _write(_quantized(_split(model), linears), config, model.spec, Path(folder), max_shard_bytes)


def _split(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for piece in pieces(model.spec, scalar=model.is_scalar):
        fused = parameters[piece.parameter].detach()
        yield piece.name, fused[piece.start : piece.start + piece.shape[0]]


def _quantized(tensors: Iterator[tuple[str, Tensor]], linears: Container[str]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if name not in linears:
            yield name, tensor
            continue
        codes, scale = quantize_weight_reference(tensor.cpu(), name=name)
        yield name, codes
        yield name + SCALE_SUFFIX, scale


def _write(
    tensors: Iterator[tuple[str, Tensor]], config: dict[str, Any], spec: ModelSpec, folder: Path, max_shard_bytes: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[Path] = []
    weight_map: dict[str, Path] = {}
    total_bytes = 0
    for number, shard in enumerate(_shards(tensors, max_shard_bytes), start=1):
        shards.append(folder / f"model-{number:05d}.part")
        save_file(shard, shards[-1], metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, shards[-1])
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    final = {
        part: SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number, part in enumerate(shards, start=1)
    }
    for part, name in final.items():
        part.replace(folder / name)
    (folder / (INDEX if len(shards) == 1 else SINGLE)).unlink(missing_ok=True)  # of an earlier export: two sets
    if len(shards) > 1:
        names = {name: final[part] for name, part in weight_map.items()}
        _write_json(folder / INDEX, {"metadata": {"total_size": total_bytes}, "weight_map": names})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", hf_generation_config(spec))


def _shards(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Groups of at most `max_bytes` in order; a larger tensor has a shard to itself. One group is held at a time."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.cpu().contiguous()
    yield shard


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
