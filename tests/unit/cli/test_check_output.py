"""What `octetrl check` says of the folder that a run will write, and of what its curves need."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_check import check, folder, tokenizer  # noqa: F401


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("output_dir=/proc/x", "output_dir: cannot write '/proc/x' (No such file or directory); give another folder"),
        ("output_dir=held", "output_dir: 'held' holds report.html, "),
        ("logging.wandb_project=x", "logging.wandb_project: 'x' needs wandb, which is not installed"),
    ],
)
def test_what_a_run_cannot_write(
    change: str,
    says: str,
    folder: Path,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "held").mkdir()
    (folder / "held/report.html").touch()
    code, _, err = check(capsys, change)
    assert code == 2 and says in err and err.count("\n") == 1
    (folder / "held/config.yaml").touch()
    code, out, _ = check(capsys, "output_dir=held")
    assert code == 0 and "held already holds a run; only --resume continues it" in out
    check(capsys, "output_dir=new/run")
    assert not (folder / "new").exists()
