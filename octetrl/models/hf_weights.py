"""Reads and writes Hugging Face safetensors: translates names, fused projections and FP8 checkpoints.

In: one `model.safetensors` or shards with their index, in BF16, float16, float32, block-FP8 (E4M3 codes with a
`weight_scale_inv` of 128 x 128 blocks) or MXFP8 (a `weight_scale` of 1 x 32, in E8M0). Both are dequantised to BF16;
frozen weights may keep the codes (`take_published_codes`). A scale is a float, or a power of two in E8M0 (that dtype,
or bytes if config.json has `scale_fmt` "ue8m0"). Every tensor's name, shape and dtype is checked before the first
tensor is read (models/weight_files.py). A value that is not finite in the model's dtype is an error that names its
tensor. Experts of gpt-oss may be MXFP4, which BF16 holds exactly; they are written in BF16.

Out: the same names, BF16 (`save_weights`) or block-FP8 (`save_weights_fp8`), split into shards by size, with
config.json and generation_config.json. Block-FP8 needs widths that are multiples of 128, because transformers computes
the size of a block from the number of scales and would misread a partial last block.

q, k, v and gate, up are separate in checkpoints and fused here, in that order. Tied models have no lm_head.weight; if a
checkpoint has one, it must equal the embedding. The buffer `rotary_emb.inv_freq` of old checkpoints is ignored. A model
with a scalar head has `score.weight` instead of lm_head, as in *ForSequenceClassification.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from octetrl.fp8.format import BLOCK, MX_BLOCK
from octetrl.fp8.mxfp4 import dequantize_mxfp4
from octetrl.fp8.mxfp8 import quantize_mx_reference
from octetrl.fp8.quantize import Quantized, check_finite, dequantize, quantize_weight_reference
from octetrl.layers.weight_memory import Loading, filling, scale_row
from octetrl.models.decoder import Decoder
from octetrl.models.families import hf_config, hf_generation_config, load_spec
from octetrl.models.published_codes import published_codes
from octetrl.models.row_shards import WEIGHT, RowShards
from octetrl.models.stacked_files import as_file, as_rows
from octetrl.models.tensor_rows import RowPiece, cut_rows_of, pieces_of
from octetrl.models.weight_files import (
    BLOCK_SCALES,
    CODES,
    INDEX,
    LM_HEAD,
    MX_SCALES,
    MXFP4,
    MXFP4_BLOCKS,
    MXFP4_SCALES,
    SCORE,
    SINGLE,
    FilePiece,
    ScaleLayout,
    Stack,
    TensorHeader,
    checked_headers,
    other_parts,
    pieces,
    scale_layout,
)
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError

MAX_SHARD_BYTES = 5_000_000_000
EMBEDDING = "embedding.weight"

# ---------------------------------------------------------------- in


@torch.no_grad()
def load_weights(model: Decoder, folder: str | Path, *, new_head: bool = False, loading: Loading | None = None) -> None:
    """Fills `model` from a Hugging Face folder, one parameter after another, and quantises it. `new_head`: a missing
    head becomes zero. `loading`: which rows are read, all of them by default; a part of a model reads its own.

    UserError, one line: what `checked_headers` refuses; a value that is not finite in the model's dtype (its tensor).
    """
    loading = loading or Loading()
    headers = checked_headers(folder, model.spec.whole, scalar=model.is_scalar, new_head=new_head)
    parameters = dict(model.named_parameters())
    shards = RowShards.find(Path(folder))
    spec, cut, fill = model.spec.whole, cut_rows_of(model.spec), filling(model, loading)
    by_parameter: dict[str, list[FilePiece]] = {}
    for piece in pieces(spec, scalar=model.is_scalar, held=headers):
        by_parameter.setdefault(piece.parameter, []).append(piece)
    reader = _Reader(headers, scale_layout(folder)) if shards is None else _RowReader(shards)
    with reader:
        for name, parts in by_parameter.items():
            with fill(name) as (first, filled):
                own_rows = pieces_of(cut.get(name), first, first + len(filled))
                for piece in parts:
                    for rows in _rows_of_piece(own_rows, piece):
                        own = filled[rows.start - first : rows.start - first + rows.rows]
                        if piece.name not in headers:  # the new head
                            own.zero_()
                            continue
                        where = f"{headers[piece.name].file}: '{piece.name}'"
                        read = reader.weight(piece, rows.whole, rows.whole + rows.rows)
                        own.copy_(_finite(read, own.dtype, where))
        if model.spec.tied_embeddings and LM_HEAD in headers:
            start, stop = loading.rows_of(EMBEDDING, parameters[EMBEDDING])
            _check_tied(reader, spec, headers[LM_HEAD].file, pieces_of(cut.get(EMBEDDING), start, stop))
    loading.count.read_bytes += reader.read_bytes
    model.requantize()


@torch.no_grad()
def take_published_codes(model: Decoder, folder: str | Path, loading: Loading | None = None) -> int:
    """Replace codes and scales of the model's FP8 linears by those of a block-FP8 folder, where they fit
    (published_codes.py). `model` is loaded from it. Returns how many linears have the folder's codes. `loading`: which
    rows are read, all of them by default.

    A linear with a multiplier of 0, which some files have for blocks of zeros, keeps its own codes.
    """
    loading = loading or Loading()
    headers = checked_headers(folder, model.spec, scalar=model.is_scalar, new_head=True)
    if scale_layout(folder).block != BLOCK_SCALES.block:
        return 0
    fitting = published_codes(model.spec, headers, scalar=model.is_scalar).fitting
    taken = 0
    with _Reader(headers, BLOCK_SCALES) as reader:
        for name, linear in model.float8_linears():
            scales = {piece: reader.scale(piece.name) for piece in fitting.get(name, ())}
            if not scales or any(bool((scale <= 0).any()) for scale in scales.values()):
                continue
            start, stop = loading.rows_of(f"{name}.weight", linear.codes)
            own_rows = pieces_of(None, start, stop)
            for piece, scale in scales.items():
                for rows in _rows_of_piece(own_rows, piece):
                    end, row = rows.whole + rows.rows, scale_row(linear, rows.start)
                    own = scale[rows.whole // BLOCK : -(-end // BLOCK)]
                    codes = reader.read(piece.name, rows.whole, end)
                    linear.codes[rows.start : rows.start + rows.rows] = codes.to(linear.codes.device)
                    linear.scale[row : row + len(own)] = own.to(linear.scale.device)
            linear.adopt_codes()
            taken += 1
    loading.count.read_bytes += reader.read_bytes
    return taken


def _rows_of_piece(own_rows: Sequence[RowPiece], piece: FilePiece) -> Iterator[RowPiece]:
    """What of `own_rows` a tensor of the folder has. `whole` is then the number of its row in that tensor."""
    for own in own_rows:
        first, last = max(own.whole, piece.start), min(own.whole + own.rows, piece.start + piece.rows)
        if first < last:
            yield RowPiece(own.start + first - own.whole, first - piece.start, last - first)


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
    """Reads rows of tensors by name from whichever file has them; block-FP8 comes out as BF16."""

    def __init__(self, headers: Mapping[str, TensorHeader], scales: ScaleLayout) -> None:
        self._headers, self._scales = headers, scales
        self._handles: dict[Path, Any] = {}
        self.read_bytes = 0

    def __enter__(self) -> _Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor as it is in its file; all of them if `stop` is None."""
        header = self._headers[name]
        if header.file not in self._handles:
            self._handles[header.file] = safe_open(header.file, framework="pt").__enter__()
        handle = self._handles[header.file]
        is_whole = stop is None or (start, stop) == (0, header.shape[0])
        tensor: Tensor = handle.get_tensor(name) if is_whole else handle.get_slice(name)[start:stop]
        self.read_bytes += tensor.nbytes
        return tensor

    def weight(self, piece: FilePiece, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of ours. Of block-FP8 whole blocks are read, of stacked matrices whole ones."""
        name = piece.name
        if piece.stack is not None:
            first, last = start // piece.stack.matrix_rows, -(-stop // piece.stack.matrix_rows)
            before = first * piece.stack.matrix_rows
            return self._matrices(piece.stack, name, first, last)[start - before : stop - before]
        if self._headers[name].dtype != CODES:
            return self.read(name, start, stop)
        height = self._scales.block[0]
        first, last = start // height, -(-stop // height)
        codes = self.read(name, first * height, min(last * height, self._headers[name].shape[0]))
        scale = self.scale(name)[first:last]
        weight = dequantize(Quantized(codes, scale), self._scales.block).to(torch.bfloat16)
        _check_multipliers(codes, scale, weight, name, self._scales)
        return weight[start - first * height : stop - first * height]

    def _matrices(self, stack: Stack, name: str, first: int, last: int) -> Tensor:
        if self._headers[name].dtype != MXFP4:
            return as_rows(stack, self.read(name, first, last))
        blocks, scales = (self.read(name + suffix, first, last) for suffix in (MXFP4_BLOCKS, MXFP4_SCALES))
        return as_rows(stack._replace(turned=False), dequantize_mxfp4(blocks, scales))

    def scale(self, name: str) -> Tensor:
        """All scales of a tensor of codes, in float32."""
        scale = self.read(name + self._scales.suffix)
        if scale.dtype == torch.uint8:
            scale = scale.view(torch.float8_e8m0fnu)
        return scale.float()


class _RowReader:
    """Reads rows of the tensors of a checkpoint of several workers."""

    def __init__(self, shards: RowShards) -> None:
        self._shards = shards
        self.read_bytes = 0

    def __enter__(self) -> _RowReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._shards.close()

    def weight(self, piece: FilePiece, start: int, stop: int) -> Tensor:
        """Rows `start` to `stop` of ours."""
        rows = self._shards.rows(WEIGHT + piece.parameter, piece.start + start, piece.start + stop)
        self.read_bytes += rows.nbytes
        return rows


def _check_multipliers(codes: Tensor, scale: Tensor, weight: Tensor, name: str, layout: ScaleLayout) -> None:
    """UserError for a multiplier that is not above 0, or too large for its codes. Blocks of zeros may have 0."""
    is_zero = scale == 0
    kept = dequantize(Quantized(codes, is_zero.float()), layout.block)
    erased = bool(is_zero.any()) and bool((kept != 0).any())
    too_large = not weight.isfinite().all() and bool(scale.isfinite().all()) and bool(codes.float().isfinite().all())
    if erased or too_large or bool((scale < 0).any()):
        given = float(scale.max() if too_large else scale.min())
        raise UserError(
            f"'{name}{layout.suffix}' has a multiplier of {given:.3g}; one is above 0, and small enough for its codes"
            f" to stay finite in BF16: fetch it again"
        )


def _check_tied(reader: _Reader | _RowReader, spec: ModelSpec, file: Path, own_rows: Sequence[RowPiece]) -> None:
    embedding = next(pieces(spec))
    head = replace(embedding, name=LM_HEAD)
    for own in own_rows:
        rows = own.whole, own.whole + own.rows
        if not torch.equal(reader.weight(head, *rows), reader.weight(embedding, *rows)):
            raise UserError(
                f"{file}: {LM_HEAD} differs from the embedding though config.json says tie_word_embeddings; set it"
                f" false"
            )


# ---------------------------------------------------------------- out


def hf_files(model: Decoder, max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, bytes | dict[str, Tensor]]:
    """`model` as a Hugging Face folder in its own dtype, by file name: shards of live tensors, the rest as bytes."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in _split(model):
        if shards[-1] and sum(held.nbytes for held in shards[-1].values()) + tensor.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    config = hf_config(model.spec, str(model.dtype).removeprefix("torch."), scalar=model.is_scalar)
    return {**dict(zip(_shard_names(len(shards)), shards, strict=True)), **_json_files(shards, config, model.spec)}


def hf_config_files(model: Decoder) -> dict[str, bytes]:
    """The files of `hf_files` without weights: what the model is, where its weights are saved in another form."""
    config = hf_config(model.spec.whole, str(model.dtype).removeprefix("torch."), scalar=model.is_scalar)
    return _json_files([{}], config, model.spec)


def save_weights(model: Decoder, folder: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `model` as a Hugging Face folder in its own dtype: shards, config.json, generation_config.json."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = hf_files(model, max_shard_bytes)
    _refuse_other_weights(folder, files)
    for name, content in files.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            shard = {key: tensor.cpu().contiguous() for key, tensor in content.items()}
            save_file(shard, folder / name, metadata={"format": "pt"})


def save_from_shards(shards: RowShards, folder: Path, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write the weights of a checkpoint of several workers as `save_weights` does. One shard is in memory at a time."""
    scalar = WEIGHT + SCORE in shards.ranges
    spec = load_spec(shards.folder, scalar=scalar)
    dtypes = {checked.dtype for checked in checked_headers(shards.folder, spec, scalar=scalar).values()}
    config = hf_config(spec, "bfloat16" if dtypes == {"BF16"} else "float32", scalar=scalar)
    with _RowReader(shards) as reader:
        tensors = (
            (piece.name, as_file(piece, reader.weight(piece, 0, piece.rows))) for piece in pieces(spec, scalar=scalar)
        )
        _write(tensors, config, spec, folder, max_shard_bytes)


def save_weights_fp8(
    model: Decoder, folder: str | Path, max_shard_bytes: int = MAX_SHARD_BYTES, *, mx: bool = False
) -> None:
    """Write `model` as block-FP8, DeepSeek's layout, which vLLM, SGLang and transformers read.

    The linears of the layers become E4M3 codes with a float32 `weight_scale_inv` (our `scale`) for each 128 x 128
    block of the tensors as they are named there, so blocks start again at k, v and up; the rest does not change.
    UserError: a width that is not a multiple of 128.

    `mx`: as MXFP8 instead, ModelOpt's layout, which vLLM reads: `weight_scale` [N, K/32], bytes of E8M0. Widths are
    multiples of 32.
    """
    refuse_ragged(model.spec, mx=mx)
    config = hf_config(model.spec, str(model.dtype).removeprefix("torch."), scalar=model.is_scalar)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
    }
    if mx:
        config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "MXFP8"}
    matrices = [piece.name for piece in pieces(model.spec, scalar=model.is_scalar) if piece.is_bf16_matrix]
    if matrices or mx:
        not_converted = [name.removesuffix(".weight") for name in (*matrices, LM_HEAD)]
        not_converted += [prefix.rstrip(".") for prefix in other_parts(model.spec)]
        config["quantization_config"]["ignore" if mx else "modules_to_not_convert"] = not_converted
    linears = {piece.name for piece in pieces(model.spec, scalar=model.is_scalar) if piece.is_linear}
    _write(_quantized(_split(model), linears, mx=mx), config, model.spec, Path(folder), max_shard_bytes)


def refuse_ragged(spec: ModelSpec, *, mx: bool = False) -> None:
    """Raise UserError for a model that `save_weights_fp8` can't write."""
    if any(piece.stack is not None and piece.is_linear for piece in pieces(spec)):
        raise UserError(f"the files of {spec.family} have no FP8 form with blocks of {BLOCK}; export BF16")
    block = MX_BLOCK if mx else BLOCK
    if ragged := {name: size for name, size in spec.linear_sizes().items() if size % block}:
        given = ", ".join(f"{name} {size}" for name, size in ragged.items())
        raise UserError(f"FP8 weights are exported in whole blocks of {block}, and this model has {given}; export BF16")


def _split(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for piece in pieces(model.spec, scalar=model.is_scalar):
        fused = parameters[piece.parameter].detach()
        yield piece.name, as_file(piece, fused[piece.start : piece.start + piece.rows])


def _quantized(
    tensors: Iterator[tuple[str, Tensor]], linears: Container[str], *, mx: bool
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        if name not in linears:
            yield name, tensor
            continue
        if mx:
            check_finite(tensor, name)
            codes, scale = quantize_mx_reference(tensor.cpu())
            yield name, codes
            yield name + MX_SCALES.suffix, scale.to(torch.float8_e8m0fnu).view(torch.uint8)
            continue
        codes, scale = quantize_weight_reference(tensor.cpu(), name=name)
        yield name, codes
        yield name + BLOCK_SCALES.suffix, scale


def _write(
    tensors: Iterator[tuple[str, Tensor]], config: dict[str, Any], spec: ModelSpec, folder: Path, max_shard_bytes: int
) -> None:
    """Writes a stream of tensors with one shard in memory at a time. The files get their names at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    parts: list[Path] = []
    shards: list[dict[str, Tensor]] = []  # on the meta device, for names and sizes
    for number, shard in enumerate(_shards(tensors, max_shard_bytes), start=1):
        parts.append(folder / f"model-{number:05d}.part")
        save_file(shard, parts[-1], metadata={"format": "pt"})
        shards.append({name: tensor.to("meta") for name, tensor in shard.items()})
    names, texts = _shard_names(len(parts)), _json_files(shards, config, spec)
    try:
        _refuse_other_weights(folder, {*names, *texts, *(part.name for part in parts)})
    except UserError:
        for part in parts:
            part.unlink()
        raise
    for part, name in zip(parts, names, strict=True):
        part.replace(folder / name)
    for name, content in texts.items():
        (folder / name).write_bytes(content)


def _shard_names(count: int) -> list[str]:
    numbers = range(1, count + 1)
    return [SINGLE] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in numbers]


def _json_files(shards: Sequence[Mapping[str, Tensor]], config: Mapping[str, Any], spec: ModelSpec) -> dict[str, bytes]:
    files: dict[str, Mapping[str, Any]] = {}
    if len(shards) > 1:
        named = zip(_shard_names(len(shards)), shards, strict=True)
        weight_map = {tensor: file for file, shard in named for tensor in shard}
        total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        files[INDEX] = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    files |= {"config.json": config, "generation_config.json": hf_generation_config(spec)}
    return {name: (json.dumps(content, indent=2) + "\n").encode() for name, content in files.items()}


def _refuse_other_weights(folder: Path, names: Collection[str]) -> None:
    """Raise UserError if weights would stay there that these files do not replace: a reader would mix two models."""
    others = sorted(path.name for path in folder.glob("model*.safetensors*") if path.name not in names)
    if others:
        raise UserError(f"'{folder}' has {others[0]}, of another model or in other shards; give a new folder")


def _shards(tensors: Iterator[tuple[str, Tensor]], max_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Groups of at most `max_bytes` in order; a larger tensor has its own shard. One group is in memory at a time."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        if shard and sum(held.nbytes for held in shard.values()) + tensor.nbytes > max_bytes:
            yield shard
            shard = {}
        shard[name] = tensor.cpu().contiguous()
    yield shard
