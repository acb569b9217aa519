"""One tiny model for all end-to-end tests, and the runs that several of them look at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.e2e import tiny_run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder; Qwen3's architecture."""
    return tiny_run.make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a finished run of three steps, by precision. Made once; to be read, not written."""

    @cache
    def run_folder(precision: str) -> Path:
        folder = tmp_path_factory.mktemp("finished") / precision
        tiny_run.run(model, folder, {"precision": precision, "checkpoint.every": 1, "logging.tensorboard": True})
        return folder

    return run_folder
