"""The workers of pytest are dealt to the GPUs in turn, and each still sees all of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_order import VISIBLE, driver_lists, sharing, turn, visible
from tests.house.tree import REPO


@pytest.mark.parametrize(
    ("given", "worker", "order"),
    [
        ({}, "gw0", "0,1,2"),
        ({}, "gw4", "1,2,0"),
        ({VISIBLE: "5, GPU-a"}, "gw1", "GPU-a,5"),
        ({VISIBLE: "5"}, "gw3", "5"),
        ({VISIBLE: ""}, "gw3", ""),
    ],
)
def test_a_worker_begins_with_its_gpu_and_sees_all(given: dict[str, str], worker: str, order: str) -> None:
    environment = {**given, "PYTEST_XDIST_WORKER": worker}
    turn(environment, ["0", "1", "2"])
    assert environment[VISIBLE] == order


def test_one_gpu_or_none_is_left_as_it_is() -> None:
    for numbers in ([], ["0"]):
        environment = {"PYTEST_XDIST_WORKER": "gw1"}
        turn(environment, numbers)
        assert VISIBLE not in environment
        assert visible(environment, numbers) == numbers


@pytest.mark.parametrize(("workers", "gpus", "most"), [("12", 2, 6), ("13", 2, 7), ("6", 1, 6), ("3", 0, 3)])
def test_how_many_workers_share_a_gpu(workers: str, gpus: int, most: int) -> None:
    assert sharing({"PYTEST_XDIST_WORKER_COUNT": workers}, [str(number) for number in range(gpus)]) == most
    assert sharing({}, [str(number) for number in range(gpus)]) == 1


def machine_of(gpus: int, folder: Path) -> dict[str, str]:
    """The environment of a machine whose driver lists so many GPUs."""
    script = folder / "nvidia-smi"
    script.write_text("#!/bin/sh\n" + "".join(f"echo 'GPU {number}: H200'\n" for number in range(gpus)))
    script.chmod(0o755)
    unset = (VISIBLE, "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS")
    usual = {name: text for name, text in os.environ.items() if name not in unset}
    return usual | {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_the_suite_has_a_worker_for_every_place_on_every_gpu(tmp_path: Path) -> None:
    """`make test-gpu` on a machine of three: how many processes it would start, and what a process of it sees first."""
    environment = machine_of(3, tmp_path)
    make = ["make", "-C", str(REPO), "-n", "test-gpu", f"PYTHON={sys.executable}", "JOBS=4"]
    recipe = subprocess.run(make, env=environment, capture_output=True, text=True, check=True).stdout
    count = re.search(r"-n (\S.*\)\)) --dist", recipe)
    assert count is not None, recipe
    shown = subprocess.run(["sh", "-c", f"echo {count[1]}"], cwd=REPO, env=environment, capture_output=True, text=True)
    assert shown.stdout == "12\n", shown.stderr

    (tmp_path / "test_seen.py").write_text(
        "import os\nfrom tests.gpu.conftest import sharing\n"
        "def test_seen():\n    assert os.environ['CUDA_VISIBLE_DEVICES'] in ('0,1,2', '1,2,0')\n"
        "    assert sharing(os.environ) == 1\n"
    )
    seen = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "-p", "tests.conftest"]
    run = subprocess.run(
        [*seen, str(tmp_path / "test_seen.py")], cwd=REPO, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


def test_a_machine_without_a_driver_has_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_lists() == []
