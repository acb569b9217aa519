"""Freed memory stays with the process, unless the user has chosen glibc's thresholds."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

from octetrl.system.host import keep_freed_memory

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
