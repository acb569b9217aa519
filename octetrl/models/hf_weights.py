"""Hugging Face safetensors in and out: the border where names, fused projections and FP8 checkpoints are translated.

In: one `model.safetensors` or shards with their index, BF16, float16 or float32; or block-FP8 (E4M3 codes with a
`weight_scale_inv` of 128 x 128 blocks), dequantised to BF16 here, once: inside, there is one quantiser. A scale is a
float, or a power of two in E8M0: that dtype, or bytes where config.json has `scale_fmt` "ue8m0". Every tensor's name,
shape and dtype is checked against the model before the first is read, so a wrong folder costs one line and no minutes;
a value that is not finite in the model's dtype is an error that names its tensor.

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
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octetrl.config.blocks import PLACES, LinearLayout, VectorLayout
from octetrl.config.errors import UserError
from octetrl.config.json_file import read_json
from octetrl.config.spec import ModelSpec
from octetrl.fp8.format import BLOCK, E4M3
from octetrl.fp8.quantize import Quantized, dequantize_weight, quantize_weight_reference
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, hf_generation_config, scale_format

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SCALE_SUFFIX = "_scale_inv"
LM_HEAD = "lm_head.weight"
SCORE = "score.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"
FLOATS = {"BF16", "F16", "F32"}
CODES = "F8_E4M3"
SCALES = FLOATS | {"F8_E8M0"}
EXPONENTS = "U8"  # scales by their exponent alone, 2^(byte - 127); only where `scale_format` says so
NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A Hugging Face tensor: rows `start ... + rows` of our parameter `parameter`."""

    name: str
    parameter: str
    start: int
    shape: tuple[int, ...]
    is_linear: bool = False  # the weight of a linear of the layers, which a block-FP8 checkpoint has as codes


def pieces(spec: ModelSpec, *, scalar: bool = False) -> Iterator[Piece]:
    """Every tensor of the checkpoint of `spec`, in the order in which they are written."""
    hidden = spec.hidden_size
    yield Piece("model.embed_tokens.weight", "embedding.weight", 0, (spec.vocab_size, hidden))
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        for place, block in zip(PLACES, spec.blocks_of(layer), strict=True):
            yield Piece(f"{theirs}.{place.hf_norm}.weight", f"{ours}.{place.norm}.weight", 0, (hidden,))
            for tensor in block.tensors(spec):
                yield from _pieces_of(tensor, f"{theirs}.{place.hf_name}", f"{ours}.{place.name}.{tensor.name}")
    yield Piece("model.norm.weight", "norm.weight", 0, (hidden,))
    if scalar:
        yield Piece(SCORE, SCORE, 0, (1, hidden))
    elif not spec.tied_embeddings:
        yield Piece(LM_HEAD, "lm_head.weight", 0, (spec.vocab_size, hidden))


def _pieces_of(tensor: LinearLayout | VectorLayout, module: str, parameter: str) -> Iterator[Piece]:
    """Of a block's tensor; `module` is the block's name in the checkpoint."""
    if isinstance(tensor, VectorLayout):
        yield Piece(f"{module}.{tensor.name}", parameter, 0, (tensor.size,))
        return
    start = 0
    for name, rows in tensor.parts:
        yield Piece(f"{module}.{name}.weight", f"{parameter}.weight", start, (rows, tensor.in_features), is_linear=True)
        if tensor.bias:
            yield Piece(f"{module}.{name}.bias", f"{parameter}.bias", start, (rows,))
        start += rows


# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor of the folder lies, and what its header says."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@torch.no_grad()
def load_weights(model: Decoder, folder: str | Path, *, new_head: bool = False) -> None:
    """Fill `model` from a Hugging Face folder, then `requantize`. `new_head`: a scalar head that the folder, of a
    causal model, lacks is zero.

    UserError, one line: no or unreadable safetensors, or two sets of them; tensors missing, extra, misshapen or of a
    foreign dtype, scales that belong to no codes (their number and the first names); a value that is not finite in the
    model's dtype (its tensor).
    """
    folder = Path(folder)
    stored = _headers(folder)
    wanted = list(pieces(model.spec, scalar=model.is_scalar))
    parameters = dict(model.named_parameters())
    if model.is_scalar and new_head and SCORE not in stored:
        stored.pop(LM_HEAD, None)
        parameters[SCORE].zero_()
        wanted.pop()
    tied = model.spec.tied_embeddings and not model.is_scalar
    _check(folder, wanted, stored, tied, SCALES | ({EXPONENTS} if scale_format(folder) == "ue8m0" else set()))
    with _Reader(stored) as reader:
        for piece in wanted:
            rows = parameters[piece.parameter][piece.start : piece.start + piece.shape[0]]
            rows.copy_(_finite(reader.weight(piece.name), rows.dtype, f"{stored[piece.name].file}: '{piece.name}'"))
        if tied and LM_HEAD in stored:
            _check_tied(reader, stored[LM_HEAD].file)
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


def _headers(folder: Path) -> dict[str, _Stored]:
    """Name, file, shape and dtype of every tensor in the folder, without reading a tensor."""
    stored: dict[str, _Stored] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    header = handle.get_slice(name)
                    stored[name] = _Stored(file, tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} can't be read as safetensors ({error}); fetch it again") from None
    return {name: entry for name, entry in stored.items() if not name.endswith(IGNORED_SUFFIX)}


def _files(folder: Path) -> list[Path]:
    """The shards that the index names, or the single file."""
    index, single = folder / INDEX, folder / SINGLE
    if not index.is_file():
        if single.is_file():
            return [single]
        raise UserError(
            f"'{folder}' has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights, or set"
            f" model.init=random"
        )
    weight_map = read_json(index, "fetch it again").object("weight_map")
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} is not a safetensors index: its weight_map names no files; fetch it again")
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if single.is_file() and SINGLE not in names:
        other = f"names {_some(absent)}, which is not there" if absent else f"names {len(names)} other files"
        raise UserError(f"'{folder}' has {SINGLE}, and a {INDEX} that {other}; remove what is not of this model")
    if absent:
        raise UserError(f"{folder} lacks {_some(absent)} named by {INDEX}; fetch the missing files")
    return [folder / name for name in names]


def _check(
    folder: Path, wanted: list[Piece], stored: Mapping[str, _Stored], tied: bool, scale_dtypes: set[str]
) -> None:
    """One UserError that tells everything wrong with the names, shapes and dtypes."""
    names = {piece.name for piece in wanted}
    known = names | ({LM_HEAD} if tied else set())
    weight_of = {name: name.removesuffix(SCALE_SUFFIX) for name in stored if name.endswith(SCALE_SUFFIX)}
    weight_of = {scale: weight for scale, weight in weight_of.items() if weight in known}
    coded = {name for name in known if name in stored and stored[name].dtype == CODES}
    found = {
        "missing": [piece.name for piece in wanted if piece.name not in stored]
        + [name + SCALE_SUFFIX for name in sorted(coded) if name + SCALE_SUFFIX not in stored],
        "extra": sorted(name for name in stored if name not in known and name not in weight_of),
        "misshapen": [
            f"{name} {list(stored[name].shape)} instead of {list(shape)}"
            for name, shape in _expected_shapes(wanted, weight_of)
            if name in stored and stored[name].shape != shape
        ],
        "foreign dtype": [
            f"{name} {entry.dtype}"
            for name, entry in stored.items()
            if (name in known and entry.dtype not in FLOATS | {CODES})
            or (name in weight_of and entry.dtype not in scale_dtypes)
        ],
        "FP8 without being a matrix": [name for name in sorted(coded) if len(stored[name].shape) != 2],
        "scale beside a weight that is not FP8": [
            f"{scale} ({stored[weight].dtype})"
            for scale, weight in weight_of.items()
            if weight in stored and weight not in coded
        ],
    }
    if problems := [f"{len(those)} {kind}: {_some(those)}" for kind, those in found.items() if those]:
        raise UserError(
            f"'{folder}' does not hold the tensors that its config.json describes ({'; '.join(problems)});"
            f" use the config.json and weights of one model"
        )


def _expected_shapes(wanted: Iterable[Piece], scales: Container[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for piece in wanted:
        yield piece.name, piece.shape
        if piece.name + SCALE_SUFFIX in scales:
            yield piece.name + SCALE_SUFFIX, tuple(-(-size // BLOCK) for size in piece.shape)


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Reader:
    """Reads tensors by name from whichever file has them; block-FP8 comes out as BF16."""

    def __init__(self, stored: Mapping[str, _Stored]) -> None:
        self._stored = stored
        self._handles: dict[Path, Any] = {}

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)

    def _read(self, name: str) -> Tensor:
        file = self._stored[name].file
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
        return dequantize_weight(Quantized(value, scale)).to(torch.bfloat16)


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
    block of the tensors as they are named there, so blocks begin anew at k, v and up; the rest stays as it is.
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
