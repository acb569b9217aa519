"""A GPU whose memory is full ends a command with one line."""

from __future__ import annotations

import pytest
import torch

from octetrl.cli import main


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 3.55 GiB. GPU 0 has a total capacity of 139 GiB."
            ),
            "octetrl: failed: the GPU's memory is full (CUDA out of memory. Tried to allocate 3.55 GiB, raised on",
        ),
        (RuntimeError("another fault"), None),
    ],
)
def test_a_full_gpu_is_one_line(error, line, monkeypatch, capsys):
    error.add_note("raised on worker 1 (host b, GPU 0)")

    def verb(arguments):
        raise error

    monkeypatch.setattr(main, "_run_verb", verb)
    if line is None:
        with pytest.raises(RuntimeError, match="another fault"):
            main.run_command(["bench", "step"])
        return
    assert main.run_command(["bench", "step"]) == main.FAILED
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1
