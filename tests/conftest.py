"""What holds for every test: one thread a worker, fixed seeds, and GPU tests skipped where there is no Hopper GPU, or
refused where one was asked for (`required.py`). The last lines name groups of tests that this machine could not run.

Hypothesis draws the same examples each time (`derandomize`), so a red test is red again when it is run alone.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from itertools import groupby, islice

import pytest
from hypothesis import settings

from tests.gpu_order import turn
from tests.required import check_names, is_required, not_run, skip_reason

if "PYTEST_XDIST_WORKER" in os.environ:  # before torch is imported: it reads this once
    os.environ["OMP_NUM_THREADS"] = "1"
    turn(os.environ)
    gc.disable()  # until all tests are collected: imported objects stay, so a collection would find nothing to free

for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
    os.environ.pop(name, None)  # of the caller's terminal: what is printed is compared as text
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = "127.0.0.1,localhost"  # the servers of tests

settings.register_profile("house", derandomize=True, deadline=None, database=None)
settings.load_profile("house")

HOPPER = (9, 0)


def pytest_configure(config: pytest.Config) -> None:
    check_names()
    if is_required("gpu") and not hasattr(config, "workerinput") and not _has_hopper():
        raise pytest.UsageError("OCTETRL_REQUIRE asks for gpu, and this machine has no Hopper GPU: nothing was tested")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    in_children = [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "not run"
    ]
    for line in [*not_run(skipped), *dict.fromkeys(in_children)]:
        terminalreporter.write_line(line, yellow=True)


def _has_hopper() -> bool:
    import torch  # only now: half of the tests need no torch and should start at once

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= HOPPER


@pytest.hookimpl(trylast=True)  # after those that are not asked for are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        items[:] = _dealt(items, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or _has_hopper():
        return
    reason = skip_reason("gpu", "they need a GPU of compute capability 9.0 (Hopper) or newer")
    for item in gpu_tests:
        item.add_marker(pytest.mark.skip(reason=reason))


def _dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Each worker's share begins with files of slow tests, so that none is left with one of them at the end. xdist
    gives each worker an equal piece of the list, and later to one without work the end of another's."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    files = [list(tests) for path, tests in groupby(items, lambda item: item.path) if path in slow]
    others = (item for item in items if item.path not in slow)
    order: list[pytest.Item] = []
    for worker in range(workers):
        order += [item for file in files[worker::workers] for item in file]
        order += islice(others, max(0, (worker + 1) * len(items) // workers - len(order)))
    return order


def pytest_collection_finish() -> None:
    """Leave what imports and collection made out of every later garbage collection: it lives as long as the process,
    and to look through it costs tens of times more than through what a test makes."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Seed what a test may draw from, as far as it is imported."""
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
