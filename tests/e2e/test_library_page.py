"""What docs/library.md, docs/index.md and the README show in Python runs, on a tiny model and with fewer steps, and so
does what docs/coming_from.md shows to users of TRL and verl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

import octetrl
from octetrl.cli.main import run_command
from tests.e2e.tiny_run import make_model, read_lines
from tests.house.markdown import code_blocks
from tests.house.tree import REPO

PAGE = "docs/coming_from.md"
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


@pytest.mark.parametrize("page", ["README.md", "docs/library.md", "docs/index.md", "docs/coming_from.md"])
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
    assert text.count("octetrl.train(") and ("octetrl.LLM(" in text or page in ("docs/index.md", "docs/coming_from.md"))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, page, "exec"), names)
    assert (tmp_path / "models" / "mine" / "config.json").is_file()
    assert names["run"].metrics[0]["step"] == 1
    assert "None" not in capsys.readouterr().out.splitlines()[0], "there is an accuracy"


def test_the_recipe_for_users_of_verl_trains_on_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "models" / "Qwen3-0.6B", max_position_embeddings=4096)
    (tmp_path / "gsm8k").mkdir()
    for name, numbers in {"train": range(6), "test": range(6, 8)}.items():
        rows = [
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{n} + 1 ="}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
                "extra_info": {"index": n, "split": name},
            }
            for n in numbers
        ]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "gsm8k" / f"{name}.parquet")
    (recipe,) = [block.text for block in code_blocks((REPO / PAGE).read_text("utf-8")) if block.language == "yaml"]
    Path("verl.yaml").write_text(recipe, encoding="utf-8")
    small = ["rollout.prompts_per_step=2", "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=4", "steps=1"]
    assert run_command(["train", "verl.yaml", *small, "cluster.device=cpu", "evaluation.every=1"]) == 0
    (line,) = read_lines(tmp_path / "runs" / "verl" / "metrics.jsonl")
    assert (line["rollout/count"], line["eval/tasks"]) == (16, 2)
