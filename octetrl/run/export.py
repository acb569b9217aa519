"""A run's weights as a Hugging Face folder: `octetrl export`.

A checkpoint already has Hugging Face's format (config.json, safetensors, tokenizer), so export copies it. The trained,
evaluated and exported weights are the same bytes. A checkpoint of several workers has the rows of each weight in
several files. Export joins them and holds one file of its own at a time. A checkpoint of a LoRA run holds only the
adapter, in PEFT's format. Export then reads the base weights again and adds the branches; with `adapter` it copies the
adapter. A reward model's head belongs to its adapter.

With `fp8` the linears are written as block-FP8, or MXFP8 if the run trained in it (`save_weights_fp8`), from weights in
memory. The codes are those that the quantiser gives for these weights, so a run in `fp8_full` would generate with the
same ones.

All files are written to `out/.partial` and then moved up, config.json as the last: a folder without it is no model. The
hidden folder can be created only once, so two programs that write there do not mix their files: the second is refused.
Nothing but files of the failing program is removed. A killed program leaves the hidden folder, which may be deleted.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from octetrl.config.load import load_recipe
from octetrl.data.tokenizer import load_tokenizer
from octetrl.models.decoder import Decoder
from octetrl.models.decoder_class import decoder_class
from octetrl.models.families import SCALAR, load_spec
from octetrl.models.hf_weights import load_weights, refuse_ragged, save_from_shards, save_weights, save_weights_fp8
from octetrl.models.other_parts import copy_other_parts
from octetrl.models.peft_adapters import (
    CONFIG,
    WEIGHTS,
    is_adapter,
    load_adapter,
    merge_adapters,
    read_adapter_config,
)
from octetrl.models.row_shards import RowShards
from octetrl.models.scalar_decoder import ScalarDecoder
from octetrl.models.weight_files import checked_headers
from octetrl.run.build import full_precision
from octetrl.run.model_source import precision_of, recipe_of_run
from octetrl.run.resume import OF_THE_RUN
from octetrl.run.trained_model import read_model, refuse_pruned, trained_model
from octetrl.system.errors import UserError

FLOATS = (torch.bfloat16, torch.float16, torch.float32)  # FP8 codes come from weights that were checked
FULL_WEIGHTS = ("model.safetensors", "model-")  # what the names of whole weights begin with
INSIDE = ".partial"
LAST = "config.json"


def export_run(
    run_or_checkpoint: str,
    to: str,
    *,
    adapter: bool = False,
    fp8: bool = False,
    add: Callable[[Path, Path], None] | None = None,
) -> Path:
    """Write the model of a run's last checkpoint (or of a checkpoint) to `to`, a folder that is new or empty.

    `adapter`: of a run with LoRA, the adapter in PEFT's form instead of the merged model. `fp8`: the linears as E4M3
    codes with scales of 128 x 128 blocks, of 1 x 32 if the run trained in MXFP8. `add`: writes further files, from the
    checkpoint into the folder. UserError for weights that are not finite, and for `fp8`: an adapter alone, a reward
    model, or a width that is not a multiple of 128.
    """
    if adapter and fp8:
        raise UserError("--fp8: an adapter alone has no FP8 form; leave out --adapter to write the merged model in FP8")
    target = Path(to)
    if target.exists() and not target.is_dir():
        raise UserError(f"--to: cannot write in '{target}' (Not a directory); choose another folder")
    if target.is_dir() and any(target.iterdir()):
        raise UserError(f"--to: '{target}' exists and is not empty; give a new folder")

    mx = precision_of(run_or_checkpoint, None)[1].get("fp8", {}).get("format") == "mxfp8"

    def export(source: Path) -> None:
        if adapter and not is_adapter(source):
            raise UserError(
                f"--adapter: '{run_or_checkpoint}' was trained without model.lora; export it without --adapter"
            )
        if fp8:
            _refuse_fp8(source, run_or_checkpoint, mx=mx)
        merged = merged_model(source) if is_adapter(source) and not adapter else None
        if fp8 and merged is None:
            merged = _whole_model(source)
        with new_folder(target) as folder:
            try:
                _write(source, folder, merged, adapter=adapter, fp8=fp8, mx=mx)
            except OSError as error:
                if error.filename and error.filename2 is None and Path(error.filename).parent == source:
                    raise UserError(
                        f"'{error.filename}' cannot be read ({error.strerror}); repair or restore it"
                    ) from error
                raise
            if not adapter:
                copy_other_parts(_base(run_or_checkpoint, source), folder)
            _refuse_non_finite(folder, source)
            if add is not None:
                add(source, folder)
            refuse_pruned(source)

    read_model(run_or_checkpoint, export)
    return target


def _base(given: str, source: Path) -> Path:
    """The folder that the weights of `source` began with: of an adapter, of a run, or `source` itself."""
    recipe = None if is_adapter(source) else recipe_of_run(given)
    path = trained_model(source)["path"] if recipe is None else load_recipe(recipe).model.path
    return Path(path or source)


def _write(source: Path, folder: Path, merged: Decoder | None, *, adapter: bool, fp8: bool, mx: bool) -> None:
    """Copy the model of `source` to `folder`, with the weights of `merged` in place of its own if there is one."""
    left_out = (*OF_THE_RUN, *((CONFIG, WEIGHTS) if merged is not None else ()), *(FULL_WEIGHTS if fp8 else ()))
    for file in source.iterdir():
        if file.is_file() and not file.name.startswith(left_out):
            shutil.copyfile(file, folder / file.name)  # not the mode: safetensors writes 0600
    shards = RowShards.find(source)
    if merged is not None and fp8:
        save_weights_fp8(merged, folder, mx=mx)
    elif merged is not None:
        save_weights(merged, folder)
    elif shards is not None and not adapter:
        save_from_shards(shards, folder)


def _refuse_non_finite(target: Path, source: Path) -> None:
    """Raise UserError if a weight that was written is not a finite number. No reader could use the model."""
    for file in sorted(target.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                tensor = tensors.get_tensor(name)
                if tensor.dtype in FLOATS and not tensor.isfinite().all():
                    raise UserError(
                        f"'{source}': {name} is not finite everywhere; export an earlier checkpoint, as RUN@STEP"
                    )


def _refuse_fp8(source: Path, given: str, *, mx: bool) -> None:
    merged = is_adapter(source)
    if read_adapter_config(source)[2] if merged else SCALAR in (source / "config.json").read_text(encoding="utf-8"):
        raise UserError(f"--fp8: '{given}' is a reward model, which has no FP8 form; export it without --fp8")
    base = Path(trained_model(source)["path"]) if merged else source
    if (base / "config.json").is_file():  # `merged_model` says where it is missing
        refuse_ragged(load_spec(base), mx=mx)


def _whole_model(folder: Path) -> Decoder:
    """The model of a checkpoint with whole weights, on the CPU, in their dtype."""
    spec = load_spec(folder)
    dtypes = {header.dtype for header in checked_headers(folder, spec).values()}
    dtype = torch.float32 if "F32" in dtypes and "BF16" not in dtypes else torch.bfloat16
    model = decoder_class(spec)(spec, full_precision(spec), "train", dtype=dtype)
    load_weights(model, folder)
    return model


def merged_model(folder: Path) -> Decoder:
    """The base of the adapter in `folder` with its branches added, on the CPU, in the adapter's dtype."""
    trained = trained_model(folder)
    base = Path(trained["path"])
    if not (base / "config.json").is_file():
        raise UserError(
            f"the adapter in '{folder}' was trained beside '{base}', but that folder has no model now; export from the"
            f" folder that the run was started in, or correct base_model_name_or_path in its {CONFIG}"
        )
    lora, _, is_scalar = read_adapter_config(folder)
    spec = load_spec(base, scalar=is_scalar)
    if is_scalar and (folder / "tokenizer_config.json").is_file():
        spec = replace(spec, pad_token_id=load_tokenizer(folder).pad_token_id)
    with safe_open(folder / WEIGHTS, framework="pt") as tensors:
        dtype: torch.dtype = tensors.get_tensor(min(tensors.keys())).dtype  # an A's; `score`, float32, comes after
    if is_scalar:
        model: Decoder = ScalarDecoder(spec, full_precision(spec), dtype=dtype, lora=lora)
    else:
        model = decoder_class(spec)(spec, full_precision(spec), "train", dtype=dtype, lora=lora)
    load_weights(model, base, new_head=True)
    load_adapter(model, folder)
    merge_adapters(model)
    return model


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Give a hidden folder for the files of `target`, which is new or empty, and move them up at the end.

    Raises UserError, of the option --to, if the disk refuses or another program writes to `target`."""
    aside, existed, made, moved = target / INSIDE, target.is_dir(), False, list[Path]()
    try:
        target.mkdir(parents=True, exist_ok=True)
        aside.mkdir()
        made = True
        yield aside
        if any(path != aside for path in target.iterdir()):
            raise FileExistsError(errno.EEXIST, "File exists", str(target))
        for file in sorted(aside.iterdir(), key=lambda file: file.name == LAST):
            moved.append(file.rename(target / file.name))
        moved.clear()
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileExistsError):
            raise UserError(
                f"--to: another program writes to '{target}', or has written to it meanwhile; give a new folder"
            ) from error
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UserError(f"--to: cannot write in '{target}' ({reason}); choose another folder") from error
    finally:
        for file in moved:  # one of them failed
            file.unlink(missing_ok=True)
        if made:
            shutil.rmtree(aside, ignore_errors=True)
        if not existed:
            with suppress(OSError):  # it has files: the model, or those of another program
                target.rmdir()
