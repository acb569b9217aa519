"""The tiny models of this folder's tests, made once; to be read, not written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.tiny_run import make_model
from tests.grid import WIDE


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two workers can share."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", **WIDE)
