"""Cores that a process may use and those that are free; freed memory that stays; imports without the collector."""

from __future__ import annotations

import gc
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octetrl.system import host
from octetrl.system.host import free_cores, keep_freed_memory, num_cores
from octetrl.system.process import uncollected
from tests.house.tree import REPO

IDLE, BUSY, WAITS = "0 0 0 9 0 0 0 0 0 0", "5 2 2 0 0 0 0 0 9 9", "0 0 1 0 8 0 0 0 0 0"
START = "0 0 0 0 0 0 0 0 0 0"


@pytest.mark.parametrize(
    ("cores", "free"),
    [
        ([IDLE, IDLE, IDLE], 3),
        ([IDLE, BUSY, WAITS], 2),
        ([BUSY, BUSY, BUSY], 1),
        ([START, START, START], 3),  # no tick in between
        (["6 0 0 4 0 0 0 0 0 0"] * 3, 1),
    ],
)
def test_cores_that_idle_are_free(cores: list[str], free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`guest` is counted in `user` already. The fourth core is not this process's."""
    looks = iter([[START] * 4, [*cores, IDLE]])

    def look() -> str:
        lines = [f"cpu{core} {times}" for core, times in enumerate(next(looks))]
        return "\n".join([f"cpu  {BUSY}", *lines, "intr 1 2 3", "ctxt 7"])

    stat = tmp_path / "stat"
    texts = iter([look(), look()])
    monkeypatch.setattr(host, "STAT", stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    stat.write_text(next(texts))
    monkeypatch.setattr(time, "sleep", lambda _: stat.write_text(next(texts)))
    assert free_cores() == free


@pytest.mark.parametrize("text", [None, "", "cpu0 a b c d e\n"])
def test_a_machine_that_does_not_say_it_has_no_number(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "STAT", tmp_path / "stat")
    if text is not None:
        (tmp_path / "stat").write_text(text)
    assert free_cores(0.0) is None


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, 8),  # no quota, as at the root of a machine
        ("0::/a/b\n", {"a/b/cpu.max": "250000 100000\n"}, 3),  # v2, rounded up
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "200000 100000\n"}, 2),  # the group above limits
        ("0::/../x\n", {"cpu.max": "50000 100000\n"}, 1),  # a container that sees its own group as the mount
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 8),  # more than the affinity
        (
            "3:memory:/m\n2:cpu,cpuacct:/c\n0::/\n",
            {"cpu/c/cpu.cfs_quota_us": "400000", "cpu/c/cpu.cfs_period_us": "100000"},
            4,
        ),
        ("2:cpu:/host/path\n", {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "50000"}, 3),
        ("2:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ("nonsense\n", {"cpu.max": "100000 100000"}, 8),
        (None, {"cpu.max": "100000 100000"}, 8),
    ],
)
def test_cores_are_those_of_the_affinity_within_the_quota_of_the_container(
    groups: str | None, files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(host, "CGROUPS", tmp_path / "fs")
    monkeypatch.setattr(host, "OWN_CGROUPS", tmp_path / "own")
    if groups is not None:
        (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert num_cores() == cores


GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="not glibc")
FAULTS = """
import ctypes, resource
from octetrl.system.host import keep_freed_memory
if {keep}:
    assert keep_freed_memory({{}})
libc, size = ctypes.CDLL(None), 16 << 20
def use():  # as torch allocates
    place = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(place), ctypes.c_size_t(64), ctypes.c_size_t(size)) == 0
    ctypes.memset(place, 1, size)
    libc.free(place)
for _ in range(20):  # malloc keeps the first seven remainders of its alignment apart
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@GLIBC
def test_memory_that_is_used_again_is_not_cleared_again() -> None:
    """In processes of their own: the thresholds hold for a whole process."""

    def pages(keep: bool) -> int:
        environment = {"MALLOC_MMAP_THRESHOLD_": "131072"} if not keep else {}
        command = [sys.executable, "-c", FAULTS.format(keep=keep)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    page = resource.getpagesize()
    assert pages(keep=False) * page >= 4 * (16 << 20) // 2  # half: the kernel may use larger pages
    assert pages(keep=True) * page < 1 << 20


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_thresholds_that_the_user_has_set_stay(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


IN_A_PROCESS = """
import gc
from octetrl.system.process import uncollected
try:
    with uncollected():
        assert not gc.isenabled()
        made = [{} for _ in range(1000)]
        raise ImportError
except ImportError:
    pass
assert gc.isenabled() and gc.get_freeze_count() > 1000
gc.unfreeze()
gc.disable()
with uncollected():
    pass
assert not gc.isenabled() and gc.get_freeze_count() == 0
"""


def test_modules_are_imported_without_collections_and_stay_out_of_later_ones() -> None:
    ended = subprocess.run([sys.executable, "-S", "-c", IN_A_PROCESS], cwd=REPO, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 0, ended.stderr


def test_a_process_that_has_pytorch_keeps_its_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it froze could be tensors that nobody uses."""
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", gc))
    frozen = gc.get_freeze_count()
    with uncollected():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
