"""The parts of a published model that are not trained here: one that reads images, layers that predict further tokens.

Loading ignores them (`weight_files.other_parts`), and checkpoints do not have them. An export has them as they were in
the folder that the run started from, so that other readers find the whole model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octetrl.models.families import load_spec
from octetrl.models.family import SCALAR
from octetrl.models.weight_files import INDEX, SINGLE, files_of, other_parts
from octetrl.system.errors import UserError
from octetrl.system.json_file import read_json

OTHERS = "model-other-parts.safetensors"
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def copy_other_parts(base: Path, folder: Path) -> None:
    """Add the other parts of `base` to the Hugging Face folder `folder`, in a file of their own. Does nothing for a
    model that has none.

    UserError: `base`, which has the part that reads images, is not there."""
    named = read_json(folder / "config.json").texts("architectures")
    if any(name.endswith(SCALAR) for name in named):
        return  # a reward model, of a text's model alone
    spec = load_spec(folder)
    prefixes = other_parts(spec)
    if not prefixes:
        return
    if not (base / "config.json").is_file():
        if spec.outer_config is None:
            return
        raise UserError(
            f"the part that reads images is in '{base}', where the run began and no model is now; export from the"
            " folder that the run was started in"
        )
    tensors: dict[str, Tensor] = {}
    for file in files_of(base):
        try:
            with safe_open(file, framework="pt") as opened:
                names = [name for name in opened.keys() if name.startswith(prefixes)]  # noqa: SIM118 (not a dict)
                tensors |= {name: opened.get_tensor(name) for name in names}
        except SafetensorError as error:
            raise UserError(f"'{file}' cannot be read ({error}); fetch it again") from None
    if not tensors:
        return
    weight_map, total_bytes = _weight_map(folder)
    save_file(tensors, folder / OTHERS, metadata={"format": "pt"})
    weight_map |= dict.fromkeys(tensors, OTHERS)
    total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    for name in PROCESSORS:
        if (base / name).is_file() and not (folder / name).exists():
            shutil.copyfile(base / name, folder / name)


def _weight_map(folder: Path) -> tuple[dict[str, Any], int]:
    """The file of each tensor, and the bytes of all. A single file gets another name, because readers look for no
    second one beside it."""
    if (folder / SINGLE).is_file():
        shard = (folder / SINGLE).rename(folder / "model-00001.safetensors")
        with safe_open(shard, framework="pt") as opened:
            names = list(opened.keys())
            return dict.fromkeys(names, shard.name), sum(opened.get_tensor(name).nbytes for name in names)
    index = read_json(folder / INDEX)
    total_bytes = index.object("metadata").integer("total_size", 0, most=1 << 60, least=0)
    return dict(index.object("weight_map")), total_bytes
