"""What glibc does with memory that a process has freed.

By default it returns large blocks to the kernel at once. torch on a CPU allocates the temporary tensors of a forward
and a backward again and again, and the kernel clears each page when it is next used (lab/log.md has measurements).
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_KEPT_BYTES = 1 << 30


def keep_freed_memory(environment: Mapping[str, str]) -> bool:
    """Let this process keep up to 1 GiB of memory that it has freed, for its next tensors. No result changes.

    False, and nothing is done, if `environment` sets glibc's thresholds, or if the C library is not glibc.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in environment for name in chosen):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    return all(mallopt(option, _KEPT_BYTES) == 1 for option in (_MMAP_THRESHOLD, _TRIM_THRESHOLD))
