"""Checkpoints under kill -9, altered bytes, missing files and a full disk."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octetrl.system.errors import UserError
from octetrl.trainer import file_digests
from octetrl.trainer import state_writer as state_files
from octetrl.trainer.checkpoint import latest, latest_of, load, prune, remove_hidden, remove_leftovers
from tests.saved_checkpoint import save_checkpoint


def payload(value: float = 1.0) -> dict[str, Any]:
    tensors = {"w": torch.full((3, 2), value, dtype=torch.bfloat16), "m": torch.arange(4.0)}
    return {"weights.safetensors": tensors, "state.json": {"step": value, "names": ["a"]}, "rng.bin": b"\x00\xff"}


def test_what_was_saved_is_loaded_exactly(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "checkpoints", 12, payload(), metrics={"eval/accuracy": 0.5})
    assert path.name == "step_000012" and latest(tmp_path / "checkpoints") == path
    loaded = load(path)
    assert loaded.step == 12 and loaded.metrics == {"eval/accuracy": 0.5}
    tensors = loaded.tensors("weights.safetensors")
    assert torch.equal(tensors["w"], payload()["weights.safetensors"]["w"]) and tensors["w"].dtype == torch.bfloat16
    assert torch.equal(tensors["m"], torch.arange(4.0))
    assert loaded.json("state.json") == {"step": 1.0, "names": ["a"]} and loaded.bytes("rng.bin") == b"\x00\xff"
    with pytest.raises(UserError, match="has no optimizer"):
        loaded.tensors("optimizer.safetensors")
    again = save_checkpoint(tmp_path / "checkpoints", 12, payload(2.0))  # replaces it
    assert load(again).json("state.json")["step"] == 2.0
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000012"]


def test_without_xxhash_a_checkpoint_has_sha256(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = save_checkpoint(tmp_path, 1, payload())
    with monkeypatch.context() as patch:
        patch.setattr(file_digests, "xxhash", None)
        slow = save_checkpoint(tmp_path, 2, payload())
        assert load(slow).step == 2
        with pytest.raises(UserError, match="pip install xxhash"):
            load(fast)
    kinds = [
        {entry["algorithm"] for entry in json.loads((path / "manifest.json").read_bytes())["files"].values()}
        for path in (fast, slow)
    ]
    assert kinds == [{"xxh3-128"}, {"sha256"}]
    assert load(slow).step == 2


def test_large_tensors_go_on_in_further_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "SHARD_BYTES", 40)
    tensors = {f"t{i}": torch.full((8,), float(i)) for i in range(3)}
    loaded = load(save_checkpoint(tmp_path, 1, {"a.safetensors": tensors}))
    assert loaded.files == ("a.safetensors", "a.safetensors.1", "a.safetensors.2")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded.tensors("a.safetensors").items())
    assert loaded.tensors("a.safetensors").keys() == tensors.keys()


DISK_CALLS = ("open", "pwrite", "fsync", "mkdir", "rename", "rmdir", "unlink")


def _save_until(folder: Path, call: int) -> None:
    """In a child: replaces step 2, saves step 3, hides step 1; killed in place of its `call`-th change of the disk."""
    count, lock = 0, threading.Lock()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == call:
                    os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return wrapper

    for name in DISK_CALLS:
        setattr(os, name, counted(getattr(os, name)))
    save_checkpoint(folder, 2, payload(2.5))
    save_checkpoint(folder, 3, payload(3.0))
    remove_hidden(prune(folder, keep_last=2))
    os._exit(0)


def test_killed_at_every_call_that_changes_the_disk(tmp_path: Path) -> None:
    """The checkpoint before is valid after each kill, and the next save works and leaves nothing else behind."""
    kills = 0
    for step in (1, 2):
        save_checkpoint(tmp_path / "before", step, payload(step))
    for call in range(1, 200):
        folder = shutil.copytree(tmp_path / "before", tmp_path / str(call))
        child = os.fork()
        if child == 0:
            _save_until(folder, call)
        status = os.waitpid(child, 0)[1]
        newest = latest(folder)
        assert newest is not None
        values = {"step_000001": (1,), "step_000002": (2, 2.5), "step_000003": (3,)}[newest.name]
        assert load(newest).json("state.json")["step"] in values
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
        save_checkpoint(folder, 4, payload(4.0))
        remove_hidden(prune(folder, keep_last=1))
        assert [path.name for path in folder.iterdir()] == ["step_000004"]
    else:
        pytest.fail("no save was whole")
    assert kills > 20


def test_an_exception_while_writing_leaves_nothing_of_it(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, payload())
    with pytest.raises(AssertionError):
        save_checkpoint(tmp_path, 2, payload() | {"later.bin": 3})
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


@pytest.mark.parametrize("name", ["weights.safetensors", "state.json", "rng.bin", "manifest.json"])
def test_damage_is_named_and_the_one_before_offered(tmp_path: Path, name: str) -> None:
    save_checkpoint(tmp_path, 1, payload())
    save_checkpoint(tmp_path, 5, payload())
    path = save_checkpoint(tmp_path, 9, payload(), metrics={"eval/accuracy": 0.5})
    content = (path / name).read_bytes()
    altered = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
    figures = content.replace(b"0.5", b"0.9") if name == "manifest.json" else altered
    for damaged in (altered, figures, content[:-1], b"[" * 200_000, None):
        (path / name).unlink() if damaged is None else (path / name).write_bytes(damaged)
        with pytest.raises(UserError, match=rf"step_000009: {name} .*goes on from step_000005") as error:
            load(path)
        assert "\n" not in str(error.value)
    assert load(tmp_path / "step_000005").step == 5


def test_without_one_before_and_without_a_checkpoint_it_says_so(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "run", 1, payload())
    (path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match=r"manifest.json is missing or altered; there is none before it"):
        load(path)
    for name in ("nothing", "run", "run/step_000002"):
        with pytest.raises(UserError, match="is not a checkpoint folder"):
            load(tmp_path / name)


def test_a_full_disk_is_a_users_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, payload())

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"no space left .*step_000002 .*last whole checkpoint is step_000001"):
            save_checkpoint(tmp_path, 2, payload())
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


def test_pruning_keeps_the_last_and_the_best(tmp_path: Path) -> None:
    for step, accuracy in enumerate([0.1, 0.9, 0.4, 0.9, None, 0.2, 0.3], start=1):
        save_checkpoint(tmp_path, step, payload(), metrics={} if accuracy is None else {"eval/accuracy": accuracy})
    remove_hidden(prune(tmp_path, keep_last=2, keep_best=1, best_metric="eval/accuracy"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000002", "step_000006", "step_000007"]
    remove_hidden(prune(tmp_path, keep_last=1))
    assert [path.name for path in tmp_path.iterdir()] == ["step_000007"]


def test_pruning_leaves_a_folder_with_somebodys_file(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_checkpoint(tmp_path, step, payload())
    (tmp_path / "step_000001" / "notes.txt").write_text("why this one failed")
    (tmp_path / "step_000002" / ".nfs0001").touch()
    moved = tmp_path.with_name(f"{tmp_path.name}_elsewhere")
    (tmp_path / "step_000003").rename(moved)
    (tmp_path / "step_000003").symlink_to(moved)
    remove_hidden(prune(tmp_path, keep_last=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_000001", "step_000003", "step_000004"]
    assert load(tmp_path / "step_000001").step == 1 and load(tmp_path / "step_000003").step == 3


def test_pruning_leaves_other_runs_and_the_exempt(tmp_path: Path) -> None:
    for step, run_id in ((1, "ours"), (2, "ours"), (3, "ours"), (98, "theirs"), (99, None)):
        save_checkpoint(tmp_path, step, payload(), run_id=run_id)
    save_checkpoint(tmp_path, 100, payload(), run_id="ours")
    (tmp_path / "step_000100" / "manifest.json").write_text("altered")
    remove_hidden(prune(tmp_path, keep_last=1, run_id="ours", exempt=[1]))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["step_000001", "step_000003", "step_000098", "step_000099", "step_000100"]
    assert latest_of(tmp_path, "theirs") == latest_of(tmp_path, None) == tmp_path / "step_000100"
    (tmp_path / "step_000100" / "manifest.json").unlink()
    (tmp_path / "step_000100").rename(tmp_path / "kept")
    assert latest_of(tmp_path, "ours") == tmp_path / "step_000003" and latest_of(tmp_path, "nobody") is None
    assert latest_of(tmp_path, None) == tmp_path / "step_000099" and load(tmp_path / "step_000099").step == 99


def test_latest_of_an_empty_or_missing_folder(tmp_path: Path) -> None:
    assert latest(tmp_path) is None and latest(tmp_path / "missing") is None
    remove_leftovers(tmp_path / "missing")
