"""A run that N workers began goes on with M: the same weights and moments, and further steps. Workers are threads."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from octetrl.config.schema import Recipe
from octetrl.run.loop import train
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.workers.worker import Worker
from tests.e2e.tiny_run import make_model, read_lines, tiny_recipe
from tests.unit.workers.test_checkpoint_state import owned, same, whole_of
from tests.unit.workers.thread_team import ThreadTeam

pytestmark = pytest.mark.usefixtures("rewards_here")

CHANGES: dict[str, Any] = {
    "checkpoint.every": 1,
    "rollout.max_new_tokens": 6,
    "trainer.tokens_per_micro_batch": 64,  # several for each worker
    "trainer.optimizer.states": "8bit",
    "cluster.device": "auto",
}


class States:
    """What each worker of this process owned when it last saved, and when it last loaded, by rank."""

    def __init__(self) -> None:
        self.saved: dict[int, dict[str, Tensor]] = {}
        self.loaded: dict[int, dict[str, Tensor]] = {}

    @staticmethod
    def whole(parts: Mapping[int, dict[str, Tensor]]) -> dict[str, Tensor]:
        return whole_of([part for _, part in sorted(parts.items())])


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Iterator[States]:
    found = States()
    write_state, load = Worker.write_state, Worker.load

    def written(worker: Worker, folder: Path, copied: bool) -> list[WrittenFile]:
        assert not copied, "nothing runs beside the last step's"
        found.saved[worker.peers.share.rank] = owned(worker)
        return write_state(worker, folder, copied=copied)

    def filled(worker: Worker, saved: Checkpoint, policy_version: int) -> None:
        load(worker, saved, policy_version)
        found.loaded[worker.peers.share.rank] = owned(worker)

    def start(recipe: Recipe, folder: Path | None, deadlines: object, **_: object) -> ThreadTeam:
        return ThreadTeam(recipe, recipe.cluster.num_workers, trains=folder is not None)

    monkeypatch.setattr(Worker, "write_state", written)
    monkeypatch.setattr(Worker, "load", filled)
    monkeypatch.setattr("octetrl.workers.build_workers.start_team", start)
    yield found


def on(count: int) -> dict[str, Any]:
    return {"cluster.cpus": count} if count > 1 else {"cluster.device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "model", hidden_size=256, head_dim=64)  # several blocks of rows


@pytest.mark.parametrize(("begun", "others"), [(2, (3, 1)), (1, (2,))])
def test_a_run_goes_on_with_another_number_of_workers(
    begun: int, others: tuple[int, ...], states: States, model: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    train(tiny_recipe(model, first, CHANGES | on(begun) | {"steps": 1}))
    assert len(states.saved) == begun
    saved = states.whole(states.saved)
    weights = [name for name in saved if name.startswith("weight/")]
    assert weights and len(saved) >= 3 * len(weights), "each has two moments"
    for count in others:
        states.loaded.clear()
        folder = tmp_path / f"on_{count}"
        shutil.copytree(first, folder)
        train(tiny_recipe(model, folder, CHANGES | on(count) | {"checkpoint.every": 0, "steps": 3}), resume=True)
        assert len(states.loaded) == count
        same(states.whole(states.loaded), saved)
        lines = read_lines(folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3]
        assert all(line["mismatch/max_abs_diff"] == 0.0 for line in lines)
        assert lines[0] == read_lines(first / "metrics.jsonl")[0]
