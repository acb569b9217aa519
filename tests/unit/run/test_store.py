"""The copy of a run in a store: what is sent, kept and removed, and what a kill or a failure leaves there."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest
import torch

from octetrl.config.schema import CheckpointConfig
from octetrl.run import store as module
from octetrl.run.store import RunStore, Uploads, fetch_recipe, fetch_run
from octetrl.system.errors import RunFailed, UserError
from octetrl.system.files import folder_lock
from octetrl.trainer import checkpoint
from tests.unit.run.s3_server import s3_url

NEW = itertools.count()
SAME = b"tokenizer" * 100
CHANGES = ("write", "put", "copy", "remove")


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place in an empty store."""
    monkeypatch.setattr(module, "PAUSE", 0.0)
    if request.param == "s3":
        return s3_url(monkeypatch)
    return f"memory://runs-{next(NEW)}/mine" if request.param == "memory" else f"file://{tmp_path}/store/mine"


def save(folder: Path, step: int, accuracy: float = 0.0) -> Path:
    """A step of a run in `folder`, with its checkpoint."""
    for name, text in {"config.yaml": "steps: 9\n", "run.json": '{"run": "ours"}'}.items():
        (folder / name).write_text(text)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {one}}}\n' for one in range(1, step + 1)))
    (folder / "rollouts").mkdir(exist_ok=True)
    (folder / "rollouts" / f"step_{step:06d}.jsonl").write_text(f"{step}\n" * step)
    payload = {"w.safetensors": {"w": torch.full((300,), float(step))}, "tokenizer.json": SAME}
    metrics = {"eval/accuracy": accuracy}
    return checkpoint.stage(folder / "checkpoints", step, payload, metrics=metrics, run_id="ours").commit()


def uploads(url: str, folder: Path, start: int = 0, **config: int) -> Uploads:
    made = Uploads(url, CheckpointConfig(store=url, **config), folder, "ours")
    made.warn = lambda text: None
    made.begin(start)
    return made


def send(url: str, folder: Path, *steps: Path, start: int = 0, **config: int) -> dict[str, float]:
    """The figures of the last upload."""
    sending = uploads(url, folder, start, **config)
    for path in steps:
        sending.submit(path)
        sending.finish()
        figures = sending.figures()
        sending.prune(())
    sending.close()
    return figures


def stored(url: str) -> set[str]:
    return set(RunStore(url).sizes())


def steps_in(url: str) -> list[int]:
    store = RunStore(url)
    return sorted(store.manifests(store.sizes()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def fetched_files(url: str, place: Path) -> dict[str, bytes]:
    fetch_run(url, place)
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def test_a_stored_run_comes_back_as_it_was(url: str, folder: Path, tmp_path: Path) -> None:
    send(url, folder, save(folder, 1), save(folder, 2))
    whole = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    last = {name: content for name, content in whole.items() if "step_000001/" not in name}
    assert fetched_files(url, tmp_path / "there") == last
    store = RunStore(url)
    for damaged in (SAME[:-1] + b"x", SAME + b"x"):
        store.write("checkpoints/step_000002/tokenizer.json", damaged)
        with pytest.raises(UserError, match=r"tokenizer\.json was altered"):
            fetch_run(url, tmp_path / "damaged")
        assert not (tmp_path / "damaged").exists()


def test_what_the_store_has_is_not_sent_again(url: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    put = RunStore.put
    monkeypatch.setattr(RunStore, "put", lambda self, name, path: (sent.append(name), put(self, name, path))[1])
    first, second = save(folder, 1), save(folder, 2)
    figures = send(url, folder, first, second)
    of_checkpoint = [f"checkpoints/step_00000{n}/w.safetensors" for n in (1, 2)]
    tokenizer = "checkpoints/step_000001/tokenizer.json"
    assert sorted(sent) == sorted([*of_checkpoint, tokenizer, *(f"rollouts/step_00000{n}.jsonl" for n in (1, 2))])
    assert figures["checkpoint/stored_step"] == 2 and figures["checkpoint/failed_uploads"] == 0
    sent.clear()
    third = save(folder, 3)
    assert send(url, folder, third, start=2)["checkpoint/upload_gb"] * 1e9 < 2_000  # weights, journal
    assert sorted(sent) == ["checkpoints/step_000003/w.safetensors", "rollouts/step_000003.jsonl"]
    sent.clear()
    uploads(url, folder, 3).submit(third)
    assert sent == []


def test_the_policy_keeps_last_best_and_every_nth(url: str, folder: Path) -> None:
    accuracy = {1: 0.1, 2: 0.9, 3: 0.2, 4: 0.3, 5: 0.4, 6: 0.1, 7: 0.1}
    sending = uploads(url, folder, keep_last=1, keep_best=1, keep_every=3)
    for step, value in accuracy.items():
        sending.submit(save(folder, step, value))
        sending.settle()
        if step == 4:
            RunStore(url).write("checkpoints/step_000004/notes.txt", b"a user's own")
        sending.prune([5] if step < 7 else [])
    sending.close()
    assert steps_in(url) == [2, 3, 4, 6, 7]
    assert not any(
        "step_000005" in name or "step_000001/" in name for name in stored(url) - {"rollouts"} if "check" in name
    )
    hidden = checkpoint.prune(
        folder / "checkpoints", keep_last=1, keep_best=1, keep_every=3, best_metric="eval/accuracy", run_id="ours"
    )
    assert [path.name for path in hidden] == [".step_000001.removed", ".step_000004.removed", ".step_000005.removed"]


def killing(number: int, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """The process dies before the change with this number. Returns what counts the changes."""
    count = itertools.count()

    def dying(change: Callable[..., object]) -> Callable[..., object]:
        def wrapper(*args: object) -> object:
            if next(count) == number:
                raise KeyboardInterrupt
            return change(*args)

        return wrapper

    for name in CHANGES:
        monkeypatch.setattr(RunStore, name, dying(getattr(RunStore, name)))
    return lambda: next(count)


def test_killed_at_any_change_the_store_has_a_whole_checkpoint(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(folder, 1), save(folder, 2)
    files = sorted(path.name for path in second.iterdir())
    latest = list[int]()
    for number in range(40):
        url = f"memory://runs-{next(NEW)}/mine"
        send(url, folder, first)
        sending = uploads(url, folder, 1, keep_last=1)
        with pytest.MonkeyPatch.context() as patch:
            changes = killing(number, patch)
            try:
                sending._send(second, sending_manifest(second))
                sending._prune(())
            except KeyboardInterrupt:
                pass
            is_killed = changes() <= number + 1 and number < changes()
        there = tmp_path / f"there-{number}"
        fetch_run(url, there)
        latest.append(step := max(int(path.name[5:]) for path in (there / "checkpoints").iterdir()))
        assert sorted(path.name for path in (there / "checkpoints" / f"step_{step:06d}").iterdir()) == files
        send(url, folder, second, save(folder, 3), start=step, keep_last=1)  # the run goes on
        assert steps_in(url) == [3]
        assert {name for name in stored(url) if name.startswith("checkpoints/")} == {
            f"checkpoints/step_000003/{name}" for name in files
        }
        if not is_killed:
            break
    assert latest == sorted(latest) and latest[0] == 1 and latest[-1] == 2


def sending_manifest(path: Path) -> dict[str, object]:
    manifest = checkpoint._read_manifest(path)
    assert manifest is not None
    return manifest


def test_a_failed_upload_is_counted_and_an_error_at_the_end(
    url: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, tries = save(folder, 1), save(folder, 2), []
    put = RunStore.put

    def failing(self: RunStore, name: str, path: Path) -> None:
        tries.append(name)
        if "step_000002/w" in name:
            raise UserError("no network")
        put(self, name, path)

    monkeypatch.setattr(RunStore, "put", failing)
    sending, warned = uploads(url, folder), list[str]()
    sending.warn = warned.append
    for path in (first, second):
        sending.submit(path)
    with pytest.raises(RunFailed):
        sending.finish()
    assert sending.figures()["checkpoint/failed_uploads"] == 1 and sending.figures()["checkpoint/stored_step"] == 1
    assert tries.count("checkpoints/step_000002/w.safetensors") == module.TRIES and len(warned) == 1
    assert steps_in(url) == [1] and sending.steps == set()
    monkeypatch.setattr(RunStore, "put", put)
    sending.submit(save(folder, 3))
    sending.finish()  # the next one is whole again
    sending.close()
    assert steps_in(url) == [1, 3]


def test_another_process_that_takes_the_store_over_is_the_only_one_that_writes(url: str, folder: Path) -> None:
    ours = uploads(url, folder)
    ours.submit(save(folder, 1))
    ours.finish()
    uploads(url, folder, 1).close()
    before = stored(url)
    ours.submit(save(folder, 2))
    ours.prune(())
    with pytest.raises(RunFailed):
        ours.finish()
    ours.close()
    assert stored(url) == before


def test_another_runs_store_and_an_older_folder(url: str, folder: Path, tmp_path: Path) -> None:
    send(url, folder, save(folder, 1))
    fetch_run(url, there := tmp_path / "there")
    send(url, folder, save(folder, 2), start=1)
    fetch_run(url, there)  # which gets the later one too
    assert sorted(path.name for path in (there / "checkpoints").iterdir()) == ["step_000001", "step_000002"]
    assert (there / "metrics.jsonl").read_text() == (folder / "metrics.jsonl").read_text()
    (there / "checkpoints" / "step_000002").rename(there / "checkpoints" / "step_000009_best")  # a user's own
    fetch_run(url, there)
    assert (there / "checkpoints" / "step_000002").is_dir()
    (there / "run.json").write_text('{"run": "another"}')
    send(url, folder, save(folder, 3), start=2)
    with pytest.raises(UserError, match="another run"):
        fetch_run(url, there)
    (there / "run.json").unlink()
    with pytest.raises(UserError, match="another run"):
        fetch_run(url, there)
    with pytest.raises(UserError, match="another run"):
        Uploads(url, CheckpointConfig(), folder, "theirs").begin(0)


def test_a_place_that_is_taken_is_refused_before_anything_is_fetched(url: str, folder: Path, tmp_path: Path) -> None:
    send(url, folder, save(folder, 1))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "notes.txt").write_text("a user's own")
    for place in (tmp_path / "taken", tmp_path / "taken" / "notes.txt"):
        with pytest.raises(UserError):
            fetch_run(url, place)
    assert [path.name for path in tmp_path.rglob("*") if path.name.startswith(".")] == []
    fetching = tmp_path / ".there.fetched"
    (fetching / "checkpoints").mkdir(parents=True)
    with folder_lock(fetching), pytest.raises(UserError):
        fetch_run(url, tmp_path / "there")
    assert (fetching / "checkpoints").is_dir()  # of the process that fetches
    fetch_run(url, tmp_path / "there")
    assert not fetching.exists()
    for content in (b"[1, 2]", b"steps: 9", b"\xff"):
        RunStore(url).write("config.yaml", content)
        with pytest.raises(UserError):
            fetch_recipe(url, None)


def test_a_checkpoint_that_cannot_be_read_counts_as_not_sent(url: str, folder: Path) -> None:
    sending, warned = uploads(url, folder), list[str]()
    sending.warn = warned.append
    path = save(folder, 1)
    manifest = sending_manifest(path)
    (path / checkpoint.MANIFEST).unlink()
    sending._send(path, manifest)
    assert sending.figures()["checkpoint/failed_uploads"] == 1 and len(warned) == 1
    with pytest.raises(RunFailed):
        sending.finish()


def test_a_bucket_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    url = s3_url(monkeypatch)
    RunStore(url).refuse_no_bucket()
    with pytest.raises(UserError):
        RunStore(url.replace("bucket", "no-bucket")).refuse_no_bucket()


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    fsspec.filesystem("memory").store.clear()
