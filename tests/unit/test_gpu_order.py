"""The workers of pytest are dealt to the GPUs in turn, and each still sees all of them."""

from __future__ import annotations

import pytest

from tests.gpu_order import VISIBLE, sharing, turn, visible


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
