"""Modules of a test instead of vLLM's, under the version that the adapter takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from octetrl.config.backends import VLLM_VERSION


@contextmanager
def installed_vllm(monkeypatch: pytest.MonkeyPatch, contents: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """`contents`: the names of each module. Environment variables that are set within are gone afterwards."""
    for name, names in contents.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("octetrl.config.backends.version", lambda _: VLLM_VERSION)
    environment = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
