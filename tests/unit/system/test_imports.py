"""The collector is off while PyTorch is imported, and on afterwards, also after an error."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from octetrl.system.process import uncollected
from tests.house.tree import REPO

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
