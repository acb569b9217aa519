"""Recognize names of the Hugging Face hub where a recipe may also give a path: `owner/name`, `owner/name@REVISION`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DATASET_PREFIX = "hf:"  # before the name of a data set: never a path
_NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_LOCAL = ("models", "model", "runs", "checkpoints", "output", "outputs", "data", "datasets")  # never an owner
_FILES = (".jsonl", ".json", ".parquet", ".txt", ".csv", ".yaml", ".yml")


class HubName(NamedTuple):
    """A repository of the hub, and a branch, tag or commit of it (None: the main branch)."""

    name: str
    revision: str | None


def hub_name(text: str | Path) -> HubName | None:
    """The hub's name that `text` is; None for anything that may be a local path: it exists, or its parent does."""
    path, found = Path(text), _NAME.fullmatch(str(text))
    if found is None or path.exists() or path.parent.exists() or path.parts[0] in _LOCAL:
        return None
    return HubName(found["name"], found["revision"])


def hub_dataset(text: str | Path) -> HubName | None:
    """The hub's data set that `text` names: `hf:owner/name`, or `owner/name` without the ending of a file."""
    text = str(text)
    if text.startswith(DATASET_PREFIX):
        name, _, revision = text.removeprefix(DATASET_PREFIX).partition("@")
        return HubName(name, revision or None)
    return None if Path(text).suffix in _FILES else hub_name(text)
