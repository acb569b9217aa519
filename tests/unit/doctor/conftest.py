"""One tiny model for all tests of the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import tiny_run


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.make_model(
        tmp_path_factory.mktemp("doctor") / "model", num_hidden_layers=2, tie_word_embeddings=False
    )
