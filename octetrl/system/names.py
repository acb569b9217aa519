"""Names of the Hugging Face hub where a recipe may also give a path: `owner/name`, `owner/name@REVISION`. Addresses of
servers."""

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


def is_url(text: str | Path) -> bool:
    """Whether it is the URL of a place in a store, such as s3://bucket/runs/mine, and no path."""
    return re.fullmatch(r"[a-z][a-z0-9+.-]*://[^?#\s]+", str(text)) is not None


HOW = "write it as http://localhost:8000/v1"
_FORM = re.compile(r"https?://[^/\s@]+(/\S*)?")
_LAST_PORT = 65_535


def is_address(url: str) -> bool:
    """Whether it is of http or https, without a user, and httpx and the name service take its port, brackets and host
    name. Without httpx, of which the client itself says that it is missing, only the form is known."""
    if not _FORM.fullmatch(url):
        return False
    try:
        import httpx
    except ImportError:
        return True
    try:
        address = httpx.URL(url)
        host = address.host  # decoded: raises for a label that is no Punycode
        address.raw_host.decode("ascii").encode("idna")  # as a socket does, for labels that are empty or too long
    except (httpx.InvalidURL, UnicodeError):  # IDNAError is a UnicodeError
        return False
    return bool(host) and (address.port is None or 0 < address.port <= _LAST_PORT)
