"""What docs/library.md, docs/index.md and the README show in Python runs, on a tiny model and with fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import octetrl
from tests.e2e.tiny_run import make_model
from tests.house.markdown import code_blocks
from tests.house.tree import REPO

Capture = pytest.CaptureFixture[str]
SMALL: dict[str, Any] = {
    "steps": 1,
    "rollout": {"prompts_per_step": 2, "group_size": 4, "max_prompt_tokens": 64, "max_new_tokens": 6},
    "cluster": {"device": "cpu", "cpu_threads": 1},
    "environment": {"eval_size": 2},
    "evaluation": {"max_new_tokens": 4},
    "logging": {"console": "quiet", "tensorboard": False},
}


def pages_python(page: str) -> str:
    """The Python blocks of a page that use the library, one after the other."""
    blocks = code_blocks((REPO / page).read_text(encoding="utf-8"))
    shown = [block.text for block in blocks if block.language == "python"]
    return "\n".join(text for text in shown if "octetrl." in text or "print(run." in text)


@pytest.mark.parametrize("page", ["README.md", "docs/library.md", "docs/index.md"])
def test_it_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "models" / "Qwen3-0.6B", max_position_embeddings=4096)
    train = octetrl.train

    def small(*args: Any, **given: Any) -> octetrl.FinishedRun:
        return train(*args, **{**given, **SMALL})

    monkeypatch.setattr(octetrl, "train", small)
    text = pages_python(page)
    assert text.count("octetrl.train(") and ("octetrl.LLM(" in text or page == "docs/index.md")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, page, "exec"), names)
    assert (tmp_path / "models" / "mine" / "config.json").is_file()
    assert names["run"].metrics[0]["step"] == 1
    assert "None" not in capsys.readouterr().out.splitlines()[0], "there is an accuracy"
