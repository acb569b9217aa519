"""What holds for every test: one thread a worker, fixed seeds, and GPU tests skipped where there is no Hopper GPU.

Hypothesis draws the same examples each time (`derandomize`), so a red test is red again when it is run alone.
"""

from __future__ import annotations

import os
import random
import sys

import pytest
from hypothesis import settings

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: it reads this once
    os.environ["OMP_NUM_THREADS"] = "1"

settings.register_profile("house", derandomize=True, deadline=None, database=None)
settings.load_profile("house")

HOPPER = (9, 0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch  # only now: half of the tests need no torch and should start at once

    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER:
        return
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0 (Hopper) or newer"))


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed what a test may draw from, as far as it is imported."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
