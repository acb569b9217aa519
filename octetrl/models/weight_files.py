"""Checks the safetensors headers of a Hugging Face model folder against the tensors that the model needs.

`checked_headers` reads no tensor and needs no torch, so `octetrl check` reports in a fraction of a second what the
loader (models/hf_weights.py) would refuse. The loader checks the values.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from octetrl.models.families import is_mxfp8, prediction_layers, scale_format
from octetrl.models.family import FAMILIES
from octetrl.models.row_shards import WEIGHT, RowShards
from octetrl.shapes.blocks import (
    PLACES,
    LinearLayout,
    MatrixLayout,
    StackedLinearLayout,
    TensorLayout,
)
from octetrl.shapes.spec import ModelSpec
from octetrl.system.errors import UserError, dangling
from octetrl.system.json_file import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LM_HEAD = "lm_head.weight"
EMBED_TOKENS = "embed_tokens.weight"  # behind the decoder's name
TEXT_ALONE = "model"  # the decoder's name, of a model that reads no images
SCORE = "score.weight"
IGNORED_SUFFIX = "rotary_emb.inv_freq"
FLOATS = {"BF16", "F16", "F32"}
CODES = "F8_E4M3"
MXFP4 = "MXFP4"  # not safetensors' word: `NAME_blocks` and `NAME_scales`, both of bytes (fp8/mxfp4.py)
MXFP4_BLOCKS, MXFP4_SCALES = "_blocks", "_scales"  # behind the weight's name
MXFP4_BLOCK = 32  # values along the sum with one scale, 16 bytes
SCALES = FLOATS | {"F8_E8M0"}
EXPONENTS = "U8"  # scales by their exponent alone, 2^(byte - 127); only where `scale_format` says so
BYTES = "U8"
SCALE_BLOCK = 128  # rows and columns that share a scale: BLOCK of fp8/format.py, which needs torch
NAMES_SHOWN = 3


class ScaleLayout(NamedTuple):
    """How a folder stores the scales of its codes. block: rows and columns that share one."""

    suffix: str  # behind the weight's name
    block: tuple[int, int]
    dtypes: frozenset[str]

    def shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // part) for size, part in zip(codes, self.block, strict=False))


BLOCK_SCALES = ScaleLayout("_scale_inv", (SCALE_BLOCK, SCALE_BLOCK), frozenset(SCALES))
MX_SCALES = ScaleLayout("_scale", (1, 32), frozenset({EXPONENTS, "F8_E8M0"}))  # vLLM: "modelopt_mxfp8"


def scale_layout(folder: str | Path) -> ScaleLayout:
    if is_mxfp8(folder):
        return MX_SCALES
    more = {EXPONENTS} if scale_format(folder) == "ue8m0" else set()
    return BLOCK_SCALES._replace(dtypes=BLOCK_SCALES.dtypes | more)


class Stack(NamedTuple):
    """How a tensor of a checkpoint holds the matrices of all experts [X, ...], or their biases [X, rows]."""

    matrix_rows: int  # our rows of each expert
    turned: bool  # a matrix has our rows as its columns
    interleaved: int  # parts whose rows alternate there, and follow one another here; 1: as here


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A Hugging Face tensor: rows `start ... + rows` of our parameter `parameter`. `shape`: in the file."""

    name: str
    parameter: str
    start: int
    shape: tuple[int, ...]
    is_linear: bool = False  # the weight of a linear of the layers, which a block-FP8 checkpoint has as codes
    is_bf16_matrix: bool = False  # a matrix of the layers that such a checkpoint leaves as it is
    stack: Stack | None = None  # models/stacked_files.py; None: the tensor is our rows

    @property
    def columns(self) -> tuple[int, ...]:
        """The shape of one of our rows."""
        if self.stack is None:
            return self.shape[1:]
        return self.shape[1:2] if self.stack.turned else self.shape[2:]

    @property
    def rows(self) -> int:
        return self.shape[0] if self.stack is None else self.shape[0] * self.stack.matrix_rows


def pieces(spec: ModelSpec, *, scalar: bool = False, held: Container[str] | None = None) -> Iterator[FilePiece]:
    """Every tensor of the checkpoint of `spec`, in the order in which they are written. `held`: names in a folder that
    is read. It may have the experts' matrices apart where others have one tensor, and be that of a model that reads
    images, where one with a scalar head is written as a text's model alone."""
    hidden, model = spec.hidden_size, model_prefix(spec)
    if scalar and (held is None or f"{model}.{EMBED_TOKENS}" not in held):
        model = TEXT_ALONE
    yield FilePiece(f"{model}.{EMBED_TOKENS}", "embedding.weight", 0, (spec.vocab_size, hidden))
    for layer in range(spec.num_layers):
        ours, theirs = f"layers.{layer}", f"{model}.layers.{layer}"
        for place, block in zip(PLACES, spec.blocks_of(layer), strict=True):
            if block.is_whole_layer:
                for tensor in block.tensors(spec):
                    yield from _pieces_of(tensor, theirs, f"{ours}.{tensor.name}", held)
                continue
            yield FilePiece(f"{theirs}.{place.hf_norm}.weight", f"{ours}.{place.norm}.weight", 0, (hidden,))
            for tensor in block.tensors(spec):
                module = f"{theirs}.{block.hf_name or place.hf_name}"
                yield from _pieces_of(tensor, module, f"{ours}.{place.name}.{tensor.name}", held)
    yield FilePiece(f"{model}.norm.weight", "norm.weight", 0, (hidden,))
    if scalar:
        yield FilePiece(SCORE, SCORE, 0, (1, hidden))
    elif not spec.tied_embeddings:
        yield FilePiece(LM_HEAD, "lm_head.weight", 0, (spec.vocab_size, hidden))


def model_prefix(spec: ModelSpec) -> str:
    """What the names of the decoder's tensors begin with in a checkpoint."""
    return TEXT_ALONE if spec.outer_config is None else "model.language_model"


def other_parts(spec: ModelSpec) -> tuple[str, ...]:
    """What the names of tensors begin with that are not of the decoder: of a part that reads images, of layers that
    predict further tokens. They are not trained here, and an export has them as they were."""
    family = FAMILIES.get(spec.family)
    return () if family is None or not (family.delta or family.outer) else ("model.visual.", "mtp.")


def files_are_copies(spec: ModelSpec) -> bool:
    """Whether tensors of a checkpoint lie otherwise than ours, so that they are no views of ours."""
    return any(piece.stack is not None and piece.stack.turned for piece in pieces(spec))


def _pieces_of(tensor: TensorLayout, module: str, parameter: str, held: Container[str] | None) -> Iterator[FilePiece]:
    """The pieces of a block's tensor; `module` is the block's name in the checkpoint."""
    if not isinstance(tensor, LinearLayout):
        name = f"{module}.{tensor.hf_name or tensor.name}"
        if isinstance(tensor, MatrixLayout):
            stack = Stack(1, turned=False, interleaved=1) if tensor.is_convolution else None
            shape = tensor.shape if stack is None else (tensor.rows, 1, tensor.columns)
            yield FilePiece(name, parameter, 0, shape, is_bf16_matrix=True, stack=stack)
        else:
            yield FilePiece(name, parameter, 0, tensor.shape)
        return
    if isinstance(tensor, StackedLinearLayout) and _is_one_tensor(tensor, f"{module}.{tensor.name}", held):
        yield from _stacked_pieces(tensor, f"{module}.{tensor.name}", parameter)
        return
    module = f"{module}.{tensor.submodule}"
    numbers = [f"{index}." for index in range(tensor.count)] if isinstance(tensor, StackedLinearLayout) else [""]
    start = 0
    for number in numbers:
        for name, rows in tensor.parts:
            theirs, shape = f"{module}{number}{name}", (rows, tensor.in_features)
            yield FilePiece(f"{theirs}.weight", f"{parameter}.weight", start, shape, is_linear=True)
            if tensor.bias:
                yield FilePiece(f"{theirs}.bias", f"{parameter}.bias", start, (rows,))
            start += rows


def _is_one_tensor(tensor: StackedLinearLayout, name: str, held: Container[str] | None) -> bool:
    apart = tensor.files == "stacked" and held is not None and name not in held
    return tensor.files != "separate" and not apart


def _stacked_pieces(tensor: StackedLinearLayout, name: str, parameter: str) -> Iterator[FilePiece]:
    matrix, turned = (tensor.out_features, tensor.in_features), tensor.files == "turned"
    stack = Stack(tensor.out_features, turned, len(tensor.parts) if turned else 1)
    shape = (tensor.count, *(matrix[::-1] if turned else matrix))
    yield FilePiece(name, f"{parameter}.weight", 0, shape, is_linear=True, stack=stack)
    if tensor.bias:
        of_biases = stack._replace(turned=False)
        yield FilePiece(f"{name}_bias", f"{parameter}.bias", 0, (tensor.count, tensor.out_features), stack=of_biases)


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """File, shape and dtype of a tensor in the folder."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def checked_headers(
    folder: str | Path, spec: ModelSpec, *, scalar: bool = False, new_head: bool = False
) -> dict[str, TensorHeader]:
    """The headers of the tensors in `folder`, by name, if they are those of `spec`. `scalar`: with a scalar head.
    `new_head`: which may be missing, as a causal model has none.

    UserError, one line: no or unreadable safetensors, two sets of them, or an index of other files; tensors that are
    missing, extra, stored twice, misshapen or of a foreign dtype; scales that belong to no codes. It has their number
    and the first names.
    """
    folder = Path(folder)
    shards = RowShards.find(folder)
    ignored = [f"model.layers.{spec.num_layers + extra}." for extra in range(prediction_layers(folder))]
    ignored += other_parts(spec)
    if shards is None:
        headers = _read_headers(folder, tuple(ignored))
    else:
        headers = dict(_headers_of_rows(shards, list(pieces(spec, scalar=scalar))))
    wanted = list(pieces(spec, scalar=scalar, held=headers))
    if scalar and new_head and SCORE not in headers:
        headers.pop(LM_HEAD, None)
        wanted = [piece for piece in wanted if piece.name != SCORE]
    headers |= _of_mxfp4(wanted, headers)
    _check(folder, wanted, headers, spec.tied_embeddings and not scalar, scale_layout(folder))
    return headers


def _of_mxfp4(wanted: Iterable[FilePiece], headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
    """The headers of stacked matrices whose blocks and scales a folder has, as of one tensor."""
    found = {}
    for piece in wanted:
        parts = [headers.get(piece.name + suffix) for suffix in (MXFP4_BLOCKS, MXFP4_SCALES)]
        if piece.stack is None or None in parts or piece.name in headers:
            continue
        rows, columns = piece.shape[:0:-1] if piece.stack.turned else piece.shape[1:]
        scales = (piece.shape[0], rows, columns // MXFP4_BLOCK)
        fits = [(part.dtype, part.shape) for part in parts if part is not None]
        if fits == [(BYTES, (*scales, MXFP4_BLOCK // 2)), (BYTES, scales)] and columns % MXFP4_BLOCK == 0:
            found[piece.name] = TensorHeader(headers[piece.name + MXFP4_BLOCKS].file, piece.shape, MXFP4)
    return found


def _read_headers(folder: Path, ignored: tuple[str, ...]) -> dict[str, TensorHeader]:
    """Name, file, shape and dtype of every tensor in the folder, without reading a tensor. `ignored`: prefixes of
    names."""
    headers: dict[str, TensorHeader] = {}
    twice: list[str] = []
    weight_map = _weight_map(folder)
    for file in files_of(folder):
        try:
            with safe_open(file, framework="np") as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    if name.endswith(IGNORED_SUFFIX) or name.startswith(ignored):
                        continue
                    if name in headers:
                        twice.append(f"{name} in {headers[name].file.name} and {file.name}")
                    tensor = handle.get_slice(name)
                    headers[name] = TensorHeader(file, tuple(tensor.get_shape()), tensor.get_dtype())
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} can't be read as safetensors ({error}); fetch it again") from None
    if twice:
        raise UserError(f"'{folder}' stores {len(twice)} tensors twice: {_some(twice)}; fetch the model again")
    elsewhere = [
        f"{name} in {file}, which {headers[name].file.name} has"
        for name, file in (weight_map or {}).items()
        if name in headers and headers[name].file != folder / file
    ]
    if elsewhere:
        raise UserError(f"{folder / INDEX} is not of these files: it names {_some(elsewhere)}; fetch the model again")
    return headers


def files_of(folder: Path) -> list[Path]:
    """The safetensors of a folder. UserError: none, or some are missing."""
    weight_map = _weight_map(folder)
    return [folder / SINGLE] if weight_map is None else _shards(folder, weight_map)


def _headers_of_rows(shards: RowShards, wanted: Sequence[FilePiece]) -> Iterator[tuple[str, TensorHeader]]:
    """The headers in a checkpoint of several workers, which has our parameters in place of Hugging Face's tensors."""
    for piece in wanted:
        whole = shards.ranges.get(WEIGHT + piece.parameter)
        if whole is not None:
            fits = whole.shape[1:] == piece.columns and whole.shape[0] >= piece.start + piece.rows
            yield piece.name, TensorHeader(shards.folder, piece.shape if fits else whole.shape, whole.dtype)
    known = {WEIGHT + piece.parameter for piece in wanted}
    for name, whole in shards.ranges.items():
        if name.startswith(WEIGHT) and name not in known:
            yield name, TensorHeader(shards.folder, whole.shape, whole.dtype)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor by the index; None: there is only the single file."""
    index = folder / INDEX
    if not index.is_file():
        if (folder / SINGLE).is_file():
            return None
        raise UserError(
            f"'{folder}' has neither {SINGLE} nor {INDEX}; give a folder with safetensors weights, or set"
            f" model.init=random{dangling(folder, SINGLE, INDEX)}"
        )
    weight_map = dict(read_json(index, "fetch it again").object("weight_map"))
    if not weight_map or not all(isinstance(name, str) for name in weight_map.values()):
        raise UserError(f"{index} is not a safetensors index: its weight_map names no files; fetch it again")
    outside = sorted({name for name in weight_map.values() if Path(name).name != name})
    if outside:
        raise UserError(f"{index} names {_some(outside)}, which is not beside it; fetch it again")
    return weight_map


def _shards(folder: Path, weight_map: Mapping[str, str]) -> list[Path]:
    """The files that the index names. UserError: some are missing."""
    names = sorted(set(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if (folder / SINGLE).is_file() and SINGLE not in names:
        other = f"names {_some(absent)}, which is not there" if absent else f"names {len(names)} other files"
        raise UserError(f"'{folder}' has {SINGLE}, and a {INDEX} that {other}; remove what is not of this model")
    if absent:
        raise UserError(
            f"{folder} lacks {_some(absent)} named by {INDEX}; fetch the missing files{dangling(folder, *absent)}"
        )
    return [folder / name for name in names]


def _check(
    folder: Path, wanted: list[FilePiece], headers: Mapping[str, TensorHeader], tied: bool, scales: ScaleLayout
) -> None:
    """Raises one UserError with all problems of names, shapes and dtypes."""
    names = {piece.name for piece in wanted}
    of_mxfp4 = {name for name in names if name in headers and headers[name].dtype == MXFP4}
    of_mxfp4 |= {name + suffix for name in of_mxfp4 for suffix in (MXFP4_BLOCKS, MXFP4_SCALES)}
    headers = {name: header for name, header in headers.items() if name not in of_mxfp4}
    wanted = [piece for piece in wanted if piece.name not in of_mxfp4]
    known = names | ({LM_HEAD} if tied else set())
    weight_of = {name: name.removesuffix(scales.suffix) for name in headers if name.endswith(scales.suffix)}
    weight_of = {scale: weight for scale, weight in weight_of.items() if weight in known}
    coded = {name for name in known if name in headers and headers[name].dtype == CODES}
    found = {
        "missing": [piece.name for piece in wanted if piece.name not in headers]
        + [name + scales.suffix for name in sorted(coded) if name + scales.suffix not in headers],
        "extra": sorted(name for name in headers if name not in known and name not in weight_of),
        "misshapen": [
            f"{name} {list(headers[name].shape)} instead of {list(shape)}"
            for name, shape in _expected_shapes(wanted, weight_of, scales)
            if name in headers and headers[name].shape != shape
        ],
        "foreign dtype": [
            f"{name} {entry.dtype}"
            for name, entry in headers.items()
            if (name in known and entry.dtype not in FLOATS | {CODES})
            or (name in weight_of and entry.dtype not in scales.dtypes)
        ],
        "FP8 without being a matrix": [name for name in sorted(coded) if len(headers[name].shape) != 2],
        "scale beside a weight that is not FP8": [
            f"{scale} ({headers[weight].dtype})"
            for scale, weight in weight_of.items()
            if weight in headers and weight not in coded
        ],
    }
    if problems := [f"{len(those)} {kind}: {_some(those)}" for kind, those in found.items() if those]:
        raise UserError(
            f"'{folder}' does not hold the tensors that its config.json describes ({'; '.join(problems)});"
            f" use the config.json and weights of one model"
        )


def _expected_shapes(
    wanted: Iterable[FilePiece], found: Container[str], scales: ScaleLayout
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for piece in wanted:
        yield piece.name, piece.shape
        if piece.name + scales.suffix in found:
            yield piece.name + scales.suffix, scales.shape(piece.shape)


def _some(names: list[str]) -> str:
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
