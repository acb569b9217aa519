"""The doctor on several workers: all examine, and one that finds other bits is named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe
from octetrl.config.schema import Recipe
from octetrl.doctor import findings as many
from octetrl.doctor.findings import Findings, compared
from tests.e2e.tiny_run import make_model, tiny_recipe
from tests.unit.workers.thread_team import ThreadTeam

SMALL = ["--prompts", "1", "--sequences", "1", "--answer-tokens", "3"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("doctor")
    file = folder / "recipe.yaml"
    file.write_text(dump_recipe(tiny_recipe(make_model(folder / "model"), folder / "run", {"precision": "bf16"})))
    return file


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ThreadTeam]]:
    teams: list[ThreadTeam] = []

    def start(recipe: Recipe, *_: Any) -> ThreadTeam:
        teams.append(ThreadTeam(recipe, recipe.cluster.num_workers, trains=False))
        return teams[-1]

    monkeypatch.setattr(many, "start_team", start)
    yield teams


def test_every_worker_examines(recipe: Path, started: list[ThreadTeam], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", str(recipe), "cluster.cpus=2", "cluster.device=auto", *SMALL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("by each of 2 workers") and "on cpu: 1 prompts x 1 answers of 3 tokens" in lines[0]
    assert [line.partition(": ")[0] for line in lines[1:3]] == ["worker 0", "worker 1"]
    assert all("equal: every bit of" in line for line in lines[1:3])
    assert lines[3] == "equal: all 2 workers drew the same tokens with the same log-probs, bit for bit"
    assert run_command(["doctor", str(recipe), "cluster.cpus=2", "cluster.device=auto", "--attribute"]) == 2
    assert "--attribute: it examines one worker" in capsys.readouterr().err


def test_the_worker_that_differs_is_named(recipe: Path) -> None:
    team: Any = ThreadTeam(Recipe.model_validate({"model": {"path": "m"}}), 3, trains=False)
    good = Findings("m", ("  a pass  equal",), "equal: every bit", True, "aa")
    lines, equal = compared(team, [good, replace(good, digest="bb"), good])
    assert not equal
    assert lines[3] == "  it drew other tokens or log-probs than 2 of the workers (bb, not aa): its GPU may be faulty"
    lines, equal = compared(team, [good, replace(good, digest="bb")])
    assert not equal and lines[-1] == (
        "  it drew other tokens or log-probs than worker 0 (bb, not aa): the GPU of one of them may be faulty"
    )
    broken = replace(good, verdict="first difference: x", equal=False)
    lines, equal = compared(team, [good, good, broken])
    assert not equal and lines[-2:] == ["worker 2: first difference: x", "  a pass  equal"]
    team.close()
