"""Tiny models, made once, to be read and not written; and teams of threads in place of Ray's processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from octetrl.config.schema import Recipe
from octetrl.workers import build_workers
from tests.e2e.conftest import rewards_here  # noqa: F401
from tests.e2e.tiny_run import make_model
from tests.grid import WIDE
from tests.unit.workers.thread_team import ThreadTeam


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that two workers can share."""
    return make_model(tmp_path_factory.mktemp("wide") / "model", **WIDE)


@pytest.fixture
def teams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadTeam]]:
    """Those that were started."""
    started: list[ThreadTeam] = []

    def start(recipe: Recipe, folder: Path | None, _: object, **__: object) -> ThreadTeam:
        started.append(ThreadTeam(recipe, recipe.cluster.num_workers, trains=folder is not None))
        return started[-1]

    monkeypatch.setattr(build_workers, "start_team", start)
    yield started
    for team in started:
        team.close()
