"""What the study's runner refuses, in one line."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from benchmarks.study import runs
from octetrl.config.errors import UserError


@pytest.mark.parametrize("damage", ["cut", "missing", "other", "empty"])
def test_a_damaged_pack_is_one_line(damage: str, tmp_path: Path) -> None:
    state, packed = tmp_path / "state", tmp_path / "packed"
    (state / "starts" / "one").mkdir(parents=True)
    (state / "starts" / "one" / "weights").write_bytes(numpy.random.default_rng(0).bytes(30_000))
    runs.pack(state, packed, limit_mb=1.0, piece_mb=0.01)
    first, second, *_ = sorted(packed.iterdir())
    if damage == "missing":
        second.unlink()
    else:
        first.write_bytes({"cut": first.read_bytes()[:100], "other": b"x" * 100, "empty": b""}[damage])
    with pytest.raises(UserError, match=r"--unpack: the pieces in .* are damaged or incomplete") as error:
        runs.unpack(packed, tmp_path / "other")
    assert "\n" not in str(error.value) and list((tmp_path / "other").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--jobs 0", "--jobs: 0 is too small; give 1 or more"),
        ("--seeds 0", "--seeds: 0 is too small"),
        ("--seeds -3", "--seeds: -3 is too small"),
        ("--first-seed -1", "--first-seed: -1 is too small; give 0 or more"),
        ("--seconds nan", "--seconds: nan can't be used; give a number above 25"),
        ("--seconds 25", "--seconds: 25 can't be used"),
        ("--job-seconds nan", "--job-seconds: nan can't be used"),
        ("--piece-mb 0", "--piece-mb: 0 can't be used; give 0.001 or more"),
        ("--pack-mb nan", "--pack-mb: nan can't be used"),
        ("--pack /proc/x", "--pack: cannot write in '/proc/x'"),
        ("--state /proc/zz", "--state: cannot write in '/proc/zz'"),
        ("--unpack {file}", "--unpack: '.*file' holds no state.tar.gz.00"),
        ("--state {file}", "--state: cannot write in '.*file'"),
    ],
)
def test_arguments_that_cannot_be_used_are_one_line(
    words: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run_jobs", lambda plan, arguments: pytest.fail("a job was started"))
    (tmp_path / "file").touch()
    first = ["smollm2-sums", "--model", "m", "--arms", "bf16", "--state", str(tmp_path / "state")]
    with pytest.raises(UserError, match=says) as error:
        runs.main([*first, *words.format(file=tmp_path / "file").split()])
    assert "\n" not in str(error.value)
