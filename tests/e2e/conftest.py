"""One tiny model for all end-to-end tests, and the runs that several of them look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from octetrl.config.environment import EnvironmentConfig
from octetrl.environments.python_object import Given
from octetrl.environments.reward_workers import FunctionRewards
from octetrl.environments.scoring import Scorer
from octetrl.run import environment
from tests.e2e import tiny_run

IN_PROCESSES = environment._rewards


@pytest.fixture(scope="module")
def rewards_here() -> Iterator[None]:
    """Rewards in this process, for runs whose rewards are no matter: a reward process takes as long as two steps."""

    def rewards(scorer: Scorer, config: EnvironmentConfig, given: Given) -> FunctionRewards:
        return FunctionRewards(scorer, timeout_seconds=config.reward_timeout_seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "_rewards", rewards)
        yield


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
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(environment, "_rewards", IN_PROCESSES)  # whichever test asks first
            tiny_run.run(model, folder, {"precision": precision, "checkpoint.every": 1, "logging.tensorboard": True})
        return folder

    return run_folder
