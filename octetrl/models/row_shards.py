"""Tensors whose rows lie in the files of several workers: how they are named, found and read.

    state-00002-of-00004.safetensors    the second of four workers' rows of each tensor
    state-00002-of-00004.json           {"weight/norm.weight": {"start": 128, "shape": [1024], "dtype": "BF16"}, ...}

`start` is the number of the first row, `shape` that of the whole tensor. A tensor-parallel worker may have several
ranges of rows of one tensor. All but the first have names of their own, and `of` names the tensor. A tensor without
dimensions is in every file, and equal. Any range of rows can be read without the rest: by the same number of workers,
by another number, or one tensor after another for an export. Nothing here imports torch before a tensor is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from octetrl.system.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

STEM = "state"
WEIGHT = "weight/"  # what the names of a model's parameters begin with
NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.json")


@dataclass(frozen=True, slots=True)
class RowRange:
    """Where some rows of a tensor lie in the whole: from row `start` of `shape`."""

    start: int
    shape: tuple[int, ...]
    dtype: str  # safetensors' name
    of: str | None = None  # the tensor, where the file has these rows under another name


def file_stem(rank: int, count: int, stem: str = STEM) -> str:
    """The name of the two files of worker `rank` of `count`, without `.safetensors` and `.json`."""
    return f"{stem}-{rank + 1:05d}-of-{count:05d}"


def index_bytes(ranges: Mapping[str, RowRange]) -> bytes:
    """The JSON file beside the tensors of one worker."""
    entries: dict[str, dict[str, Any]] = {}
    for name, one in ranges.items():
        entries[name] = {"start": one.start, "shape": list(one.shape), "dtype": one.dtype}
        if one.of is not None:
            entries[name]["of"] = one.of
    return json.dumps(entries, indent=1).encode()


class RowShards:
    """The tensors of a folder that are in row shards. It holds files open until `close`."""

    def __init__(self, folder: Path, indexes: Iterable[str]) -> None:
        """`indexes`: names of the JSON files. UserError: one of a worker is missing, or they are of different runs."""
        self.folder = folder
        self.ranges: dict[str, RowRange] = {}
        self._parts: dict[str, list[tuple[int, Path, str]]] = {}  # first row, file and name there of each part
        self._handles: dict[Path, Any] = {}
        names = sorted(indexes)
        counts = {match[3] for name in names if (match := NAME.fullmatch(name))}
        if len(counts) != 1 or int(counts.pop()) != len(names):
            raise UserError(
                f"'{folder}' does not have the state of all workers of one run, but {', '.join(names)}; restore the"
                f" folder, or use an earlier checkpoint"
            )
        for name in names:
            self._read_index(folder / name)

    @classmethod
    def find(cls, folder: Path, stem: str = STEM) -> RowShards | None:
        """None: the folder has none."""
        found = [path.name for path in folder.glob(f"{stem}-*.json") if NAME.fullmatch(path.name)]
        return cls(folder, found) if found else None

    def _read_index(self, index: Path) -> None:
        try:
            for stored, entry in json.loads(index.read_bytes()).items():
                name = str(entry.get("of", stored))
                one = RowRange(entry["start"], tuple(entry["shape"]), entry["dtype"])
                whole = self.ranges.setdefault(name, RowRange(0, one.shape, one.dtype))
                if (whole.shape, whole.dtype) != (one.shape, one.dtype):
                    raise UserError(f"{index}: '{name}' has another shape or dtype there; restore the folder")
                self._parts.setdefault(name, []).append((one.start, index.with_suffix(".safetensors"), stored))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{index} does not say which rows its tensors are; restore the folder") from None

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of a tensor, on the CPU; all of them if `stop` is None."""
        import torch

        whole = self.ranges[name].shape
        if not whole:
            tensor: Tensor = self._handle(self._parts[name][0][1]).get_tensor(name)
            return tensor
        stop = whole[0] if stop is None else stop
        pieces: list[Tensor] = []
        done = start
        for first, end, view in self._sorted(name):
            if done < stop and first <= done < end:
                pieces.append(view[done - first : min(stop, end) - first])
                done = min(stop, end)
        if done != stop or not 0 <= start <= stop <= whole[0]:
            raise UserError(f"'{self.folder}': no worker's file has row {done} of '{name}'; use an earlier checkpoint")
        if not pieces:
            empty: Tensor = next(self._sorted(name))[2][:0]
            return empty
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _sorted(self, name: str) -> Iterator[tuple[int, int, Any]]:
        """First row, end and slice of each part, in the order of rows."""
        for start, file, stored in sorted(self._parts[name]):
            view = self._handle(file).get_slice(stored)
            yield start, start + view.get_shape()[0], view

    def _handle(self, file: Path) -> Any:
        if file not in self._handles:
            self._handles[file] = safe_open(file, framework="pt").__enter__()
        return self._handles[file]

    def close(self) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)
        self._handles.clear()
