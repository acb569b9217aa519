"""Uploads to a double of the hub: what arrives, what a second try sends, and what is refused before."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest
import yaml
from safetensors.torch import load_file

from octetrl.cli.main import run_command
from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.validate import build_recipe
from octetrl.models.hf_weights import save_weights
from octetrl.models.peft_adapters import CONFIG, WEIGHTS
from octetrl.run.folder.layout import CHECKPOINTS
from octetrl.run.hub import CAVEAT, HubTarget, push_run, write_card
from octetrl.system.errors import UserError
from tests.house.tree import REPO
from tests.saved_checkpoint import save_checkpoint
from tests.unit.config.test_validate import plain_tree
from tests.unit.run.hub_double import TOKEN, USER, Hub, serving
from tests.unit.run.test_export import model

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
BASE = "/cache/hub/models--Qwen--Qwen3-0.6B/snapshots/0123"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with serving(hub) as url:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)
        yield hub


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps in fp8_full, whose checkpoint has its weights in several files."""
    folder = tmp_path / "run"
    folder.mkdir()
    tree = plain_tree(("model.path", BASE), ("precision", "fp8_full"), ("steps", 2), ("algorithm.name", "dapo"))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
    (folder / "config.yaml").write_text(dump_recipe(load_recipe(tmp_path / "mine.yaml")))
    save_checkpoint(
        folder / CHECKPOINTS,
        2,
        {},
        write_more=lambda folder: save_weights(model(seed=2), folder, max_shard_bytes=9_000),
    )
    rows = [{"step": 1, "reward/mean": 0.25, "eval/pass_at_4": 0.5}, {"step": 2, "reward/mean": 0.75, "time/step": 3.0}]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*rows, {"step": 3, "reward/mean": 9.0}])
    )
    return folder


def shards(folder: Path) -> list[Path]:
    return sorted((folder / CHECKPOINTS / "step_000002").glob("*.safetensors"))


def test_the_hub_gets_the_exported_files_and_a_card(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(run), "--push-to-hub", "sums", "--private", "--revision", "try", "--tag", "v1"]
    assert run_command(command) == 0
    assert capsys.readouterr().out.strip() == f"uploaded {hub.url}/{USER}/sums/tree/v1"
    repo, files = hub.repos[f"{USER}/sums"], hub.files(f"{USER}/sums", "try")
    assert repo["private"] and repo["tags"]["v1"] == files and not hub.files(f"{USER}/sums")
    assert len(shards(run)) > 2
    for shard in shards(run):
        assert files[shard.name] == shard.read_bytes()
    assert {"config.json", "model.safetensors.index.json", "README.md"} <= files.keys()
    assert not [path for path in run.iterdir() if path.name.startswith(".export")]
    _, head, text = files["README.md"].decode().split("---\n", 2)
    known = yaml.safe_load(head)
    assert known == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-0.6B",
        "tags": ["octetrl", "dapo", "fp8"],
    }
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    assert cells[1:] == [
        ["eval/pass_at_4", "0.5 (step 1)", "0.5 (step 1)"],
        ["reward/mean", "0.25 (step 1)", "0.75 (step 2)"],
    ]
    recipe = yaml.safe_load(text.split("```yaml\n")[1].split("```")[0])
    assert recipe["model"]["path"] == "Qwen/Qwen3-0.6B" and recipe["algorithm"]["name"] == "dapo"
    assert f"octetrl serve {USER}/sums --precision fp8_full" in text and "BF16" in text


def test_an_upload_that_broke_is_continued_and_another_model_is_refused(run: Path, hub: Hub) -> None:
    hub.fails_after = 1
    with pytest.raises(UserError) as caught:
        push_run(str(run), None, HubTarget("sums"))
    assert "\n" not in str(caught.value) and hub.files(f"{USER}/sums") == {}
    hub.fails_after, sent = None, hub.puts
    assert sent >= 1
    assert push_run(str(run), None, HubTarget("sums")) == f"{hub.url}/{USER}/sums"
    assert hub.puts == len(shards(run)) and set(hub.stored.values()) == {path.read_bytes() for path in shards(run)}
    # Weights of another model are not mixed with it.
    hub.files(f"{USER}/sums")["model-00001-of-00009.safetensors"] = b""
    with pytest.raises(UserError, match="model-00001-of-00009"):
        push_run(str(run), None, HubTarget("sums"))
    with pytest.raises(UserError, match="--private"):
        push_run(str(run), None, HubTarget("sums", private=True))


@pytest.mark.parametrize("case", ["no token", "wrong token", "no network", "bad name"])
def test_one_line_before_anything_is_written(
    case: str, run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "sums"
    if case == "no token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    elif case == "wrong token":
        monkeypatch.setenv("HF_TOKEN", "hf_other")
    elif case == "no network":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        name = "a/b/c"
    assert run_command(["export", str(run), "--to", str(tmp_path / "out"), "--push-to-hub", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert not hub.repos and not (tmp_path / "out").exists()


def test_options_of_an_upload_need_one(run: Path, tmp_path: Path) -> None:
    for wrong in ([], ["--to", str(tmp_path / "out"), "--private"]):
        assert run_command(["export", str(run), *wrong]) == 2
    assert not (tmp_path / "out").exists()


def test_the_card_of_an_adapter_names_its_base_at_the_hub(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(json.dumps({"base_model_name_or_path": "/models/x", "r": 8}))
    (tmp_path / WEIGHTS).write_bytes(b"")
    write_card(tmp_path, tmp_path, HubTarget("ann/sums", base_model="Qwen/Qwen3-0.6B"), fp8=False)
    assert json.loads((tmp_path / CONFIG).read_text()) == {"base_model_name_or_path": "Qwen/Qwen3-0.6B", "r": 8}
    head = yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])
    assert (head["library_name"], head["base_model"]) == ("peft", "Qwen/Qwen3-0.6B")


def test_the_licence_is_that_of_the_base_models_own_card(run: Path, tmp_path: Path) -> None:
    recipe, _ = build_recipe(plain_tree(("model.path", str(tmp_path / "base"))))
    assert recipe is not None
    (run / "config.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "base").mkdir()
    heads = {}
    for text in ("---\nlicense: apache-2.0\n---\n# Base", "# no head", "---\nlicense: [\n---\n"):
        (tmp_path / "base" / "README.md").write_text(text)
        write_card(run / CHECKPOINTS / "step_000002", tmp_path, HubTarget("ann/sums"), fp8=True)
        heads[text] = yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])
    assert [head.get("license") for head in heads.values()] == ["apache-2.0", None, None]
    assert all("base_model" not in head and head["tags"] == ["octetrl", "grpo", "fp8"] for head in heads.values())


def test_a_readme_of_the_working_directory_gives_no_licence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    Path("README.md").write_text("---\nlicense: mit\n---\n")
    write_card(tmp_path, tmp_path, HubTarget("ann/sums"), fp8=False)
    assert "license" not in yaml.safe_load((tmp_path / "README.md").read_text().split("---\n")[1])


def test_shards_of_another_size_are_refused(tmp_path: Path) -> None:
    save_weights(model(seed=1), tmp_path, max_shard_bytes=9_000)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for size in (20_000, 5_000_000_000):
        with pytest.raises(UserError, match="give a new folder"):
            save_weights(model(seed=2), tmp_path, max_shard_bytes=size)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    save_weights(model(seed=2), tmp_path, max_shard_bytes=9_000)
    assert load_file(min(tmp_path.glob("*.safetensors"))).keys()


def test_the_card_has_the_difference_of_every_study() -> None:
    results = (REPO / "docs" / "results.md").read_text(encoding="utf-8")
    differences = re.findall(r"^\| `[\w-]+`, `fp8_full`[^|]*\| \d+ \| [\d.]+ \| -([\d.]+) \|", results, re.MULTILINE)
    assert len(differences) == 4 and all(one in CAVEAT for one in differences)
