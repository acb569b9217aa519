"""A copy of a run in an object store: `checkpoint.store: s3://bucket/runs/mine`, or another URL of fsspec. No torch.

The copy is a run folder, from which the run continues on any machine:

    holder                          the token of the process that writes here; one that finds another's stops writing
    config.yaml, metrics.jsonl ...  the journal (JOURNAL), up to a checkpoint or later
    rollouts/, evaluations/         likewise
    checkpoints/step_000050/        its manifest is written last and removed first: without one it does not count
    checkpoints/.step_000050.files  while it is sent or removed: its names; what a killed process left goes by them

A thread sends a checkpoint while the next steps run. A file that the store has already, by the checksums of the
manifests, is copied there or left as it is. Nothing is removed but what a manifest of this run or a list of `.files`
names. A failed upload is tried again, then counted, and warned of. The next checkpoint sends what is missing; a run
whose last checkpoint could not be sent ends with an error.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from octetrl.config.load import parse_yaml
from octetrl.config.ranking import kept_steps
from octetrl.config.schema import CheckpointConfig, Recipe
from octetrl.run.folder.layout import CHECKPOINTS, RECIPE_FILE, REPORT, refuse_live
from octetrl.system.errors import RunFailed, UserError
from octetrl.system.files import folder_lock
from octetrl.telemetry.curves import short_reason
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import HISTORY_FILE, METRICS_FILE, RUN_FILE, WARNINGS
from octetrl.trainer.file_digests import MANIFEST, STEP_NAME, altered_files, parse_manifest

HOLDER = "holder"
JOURNAL = (METRICS_FILE, WARNINGS, HISTORY_FILE, REPORT, RUN_FILE, RECIPE_FILE)
TRIES, PAUSE = 3, 2.0  # of an upload; seconds before the second
_STEP_FILE = re.compile(rf"({ROLLOUTS}|{EVALUATIONS})/step_(\d+)\.jsonl")
_MANIFEST = re.compile(rf"{CHECKPOINTS}/step_(\d+)/{MANIFEST}")
_FILES = re.compile(rf"{CHECKPOINTS}/\.step_(\d+)\.files")
_FIELD = "checkpoint.store"

Say = Callable[[str], None]
Manifest = Mapping[str, Any]


class StoreLost(UserError):
    """This process is not the holder of the store any more."""


class RunStore:
    """The objects below a URL, by their names in the run folder. Raises UserError for what a client raises."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            how = "pip install it" if isinstance(error, ImportError) else "give one of fsspec's, such as s3://"
            raise UserError(f"{_FIELD}: '{url}' can't be opened ({short_reason(error)}); {how}") from error
        self._root = root.rstrip("/")

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # a client's, of a network, of credentials or of a bucket
            hint = "see its address, credentials and rights, or set it to null"
            raise UserError(f"{_FIELD}: can't {doing} '{self.url}' ({short_reason(error)}); {hint}") from error

    def sizes(self, folder: str = "") -> dict[str, int]:
        """The size of each object below a folder, by its name there."""
        root = self._at(folder).rstrip("/")
        with self._explained("list"):
            try:
                found = self._fs.find(root, detail=True)
            except FileNotFoundError:
                return {}
        return {path.removeprefix(root).strip("/"): int(one["size"] or 0) for path, one in found.items()}

    def refuse_no_bucket(self) -> None:
        """Where an object store has no such bucket, a listing is empty, and only the first write would fail."""
        with self._explained("find"):
            if self._fs.async_impl and not self._fs.exists(bucket := self._root.split("/")[0]):
                raise FileNotFoundError(f"there is no bucket '{bucket}'")

    def is_at(self, folder: Path) -> bool:
        """Whether it is this folder of this machine."""
        return isinstance(self._fs, LocalFileSystem) and Path(self._root).resolve() == folder.resolve()

    def read(self, name: str) -> bytes | None:
        """None: there is no such object."""
        with self._explained("read"):
            try:
                return bytes(self._fs.cat_file(self._at(name)))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        """Whole or not at all: an object store replaces an object at once, elsewhere it is renamed."""
        with self._explained("write to"):
            if self._fs.async_impl:
                return self._fs.pipe_file(self._at(name), content)
            self._make_folder_of(name)
            folder, _, last = self._at(name).rpartition("/")
            self._fs.pipe_file(f"{folder}/.{last}.partial", content)
            self._fs.mv(f"{folder}/.{last}.partial", self._at(name))

    def put(self, name: str, path: Path) -> None:
        with self._explained("write to"):
            self._make_folder_of(name)
            self._fs.put_file(str(path), self._at(name))

    def copy(self, source: str, name: str) -> bool:
        """Copies an object within the store. False: the store can't."""
        with self._explained("write to"):
            self._make_folder_of(name)
            try:
                self._fs.cp_file(self._at(source), self._at(name))
            except (NotImplementedError, FileNotFoundError):
                return False
        return True

    def get(self, name: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained("read"):
            self._fs.get_file(self._at(name), str(path))

    def remove(self, name: str) -> None:
        with self._explained("remove from"), suppress(FileNotFoundError):
            self._fs.rm_file(self._at(name))

    def remove_folder(self, name: str) -> None:
        """Removes a folder that is empty, where there are folders."""
        with suppress(OSError, NotImplementedError):
            self._fs.rmdir(self._at(name))

    def manifests(self, names: Collection[str]) -> dict[int, Manifest]:
        """Those of the whole checkpoints, by step. names: of all objects."""
        found = {int(match[1]): name for name in names if (match := _MANIFEST.fullmatch(name))}
        read = {step: parse_manifest(self.read(name) or b"") for step, name in sorted(found.items())}
        return {step: manifest for step, manifest in read.items() if manifest is not None}

    def _make_folder_of(self, name: str) -> None:
        if not self._fs.async_impl:  # object stores have no folders
            self._fs.makedirs(self._at(name).rpartition("/")[0], exist_ok=True)

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"


# ---------------------------------------------------------------- before a run begins


def refuse_store(recipe: Recipe, *, resumes: bool) -> None:
    """Refuse a store that can't be opened or listed, one with other files, and for a new run one with a run."""
    if recipe.checkpoint.store is None:
        return
    store = RunStore(recipe.checkpoint.store)
    sizes = store.sizes()
    if not sizes:
        store.refuse_no_bucket()
    if store.is_at(Path(recipe.output_dir)):
        raise UserError(f"{_FIELD}: '{store.url}' is output_dir itself; choose another folder, or set it to null")
    if sizes and HOLDER not in sizes:
        some = ", ".join(sorted(sizes)[:3]) or "a file"
        raise UserError(f"{_FIELD}: '{store.url}' holds {some}, which no run wrote; choose another folder")
    if not resumes and store.manifests(sizes):
        raise UserError(f"{_FIELD}: '{store.url}' already holds a run; continue it with --resume, or choose another")


def fetch_if_ahead(recipe: Recipe) -> None:
    """For a run that resumes: fetches a later checkpoint than output_dir has, if the recipe's store has one."""
    if recipe.checkpoint.store is not None:
        fetch_run(recipe.checkpoint.store, Path(recipe.output_dir))


def fetch_recipe(url: str, output_dir: str | None) -> Path:
    """The config.yaml of the run in a store, fetched with the run into `output_dir`; None: that of its recipe."""
    content = RunStore(url).read(RECIPE_FILE)
    if content is None:
        raise UserError(f"--resume: '{url}' holds no run (no {RECIPE_FILE}); give the checkpoint.store of a run")
    tree = parse_yaml(content.decode(errors="replace"), f"{url}/{RECIPE_FILE}")
    if not isinstance(tree, dict) or "output_dir" not in tree:
        raise UserError(f"--resume: {url}/{RECIPE_FILE} is not the recipe of a run (no output_dir)")
    folder = Path(output_dir or str(tree["output_dir"]))
    if not fetch_run(url, folder):
        raise UserError(f"--resume: '{url}' holds no run with a whole checkpoint; give the checkpoint.store of a run")
    return folder / RECIPE_FILE


def fetch_run(url: str, folder: Path) -> bool:
    """Copies a stored run into `folder`, with its last checkpoint, verified. Leaves a folder that has this or a later
    one as it is. One with an earlier checkpoint of the run gets the later one too. False: there is no whole one."""
    store = RunStore(url)
    sizes = store.sizes()
    manifests = store.manifests(sizes)
    if not manifests:
        return False
    step = max(manifests)
    has_run = (folder / RECIPE_FILE).exists()
    there = [path.parent.name for path in folder.glob(f"{CHECKPOINTS}/step_*/{MANIFEST}")]
    saved = [int(match[1]) for match in map(STEP_NAME.fullmatch, there) if match is not None]
    if has_run and max(saved, default=0) >= step:
        return True
    target = folder if has_run else folder.absolute().with_name(f".{folder.absolute().name}.fetched")
    if has_run:
        refuse_live(folder)
        run_file = folder / RUN_FILE
        if _run_of(run_file.read_bytes() if run_file.is_file() else b"") != _run_of(store.read(RUN_FILE) or b""):
            raise UserError(f"{_FIELD}: '{url}' holds another run than '{folder}'; give one of them another place")
    else:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"output_dir: '{folder}' is no empty folder, and holds no run; choose another one")
        target.mkdir(parents=True, exist_ok=True)
    with folder_lock(target) as is_free:
        if not is_free:
            raise UserError(f"output_dir: another process fetches a run into '{folder}'; wait for it, then try again")
        for left in () if has_run else list(target.iterdir()):  # by a fetch that was killed
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        for name in sizes:
            if name in JOURNAL or _STEP_FILE.fullmatch(name):
                store.get(name, aside := target / f"{name}.partial")
                aside.replace(target / name)
        _fetch_checkpoint(store, step, manifests[step], target / CHECKPOINTS)
        if not has_run:
            try:
                target.rename(folder)  # also in place of an empty one
            except OSError as error:
                raise UserError(f"output_dir: '{folder}' can't take the run of '{url}' ({error.strerror})") from error
    return True


def _fetch_checkpoint(store: RunStore, step: int, manifest: Manifest, folder: Path) -> None:
    final = folder / f"step_{step:06d}"
    partial = final.with_name(f".{final.name}.partial")
    for name in (*manifest["files"], MANIFEST):
        store.get(f"{CHECKPOINTS}/{final.name}/{name}", partial / name)
    for name in altered_files(partial, manifest["files"]):
        raise UserError(
            f"{store.url}/{CHECKPOINTS}/{final.name}: {name} was altered (its checksum is not that of {MANIFEST});"
            " delete that folder to go on from the checkpoint before it"
        )
    partial.rename(final)


def _run_of(content: bytes) -> object:
    with suppress(ValueError, AttributeError):
        return json.loads(content).get("run")
    return None


# ---------------------------------------------------------------- while a run goes on


class Uploads:
    """Sends the checkpoints of the run `run_id` in `folder` to its store, one after another, in a thread."""

    def __init__(self, url: str, config: CheckpointConfig, folder: Path, run_id: str | None) -> None:
        self._store, self._config, self._folder, self._run_id = RunStore(url), config, folder, run_id
        self._token = uuid.uuid4().hex.encode()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._sending: Future[None] | None = None
        self.steps = set[int]()  # of checkpoints that are being sent, or wait for it
        self.warn: Say = print
        self._manifests: dict[int, Manifest] = {}  # of what the store has
        self._known: dict[str, object] = {}  # by name of an object: its manifest entry, size or digest
        self._lists = set[str]()  # of uploads that were not completed
        self._last_step, self._num_failed = 0, 0
        self._error: Exception | None = None  # of the last upload
        self._figures: dict[str, float] = {}

    def begin(self, start: int) -> None:
        """Makes this process the holder of the store, for a run that goes on after step `start`."""
        sizes = self._store.sizes()
        self._manifests = self._store.manifests(sizes)
        if any(manifest.get("run") != self._run_id for manifest in self._manifests.values()):
            raise UserError(f"{_FIELD}: '{self._store.url}' holds another run; choose another place")
        self._store.write(HOLDER, self._token)
        for step, manifest in self._manifests.items():
            self._known |= {f"{_folder_of(step)}/{name}": entry for name, entry in manifest["files"].items()}
        steps = {name: match for name in sizes if (match := _STEP_FILE.fullmatch(name))}
        self._known |= {name: sizes[name] for name, match in steps.items() if int(match[2]) <= start}
        self._lists = {name for name in sizes if _FILES.fullmatch(name)}
        self._last_step = max(self._manifests, default=0)

    def submit(self, path: Path) -> None:
        """Sends a checkpoint unless the store has it. Waits for the one before: if the store is slower than the run,
        the save after the next one waits too."""
        manifest = parse_manifest((path / MANIFEST).read_bytes())
        if manifest is None or self._manifests.get(manifest["step"]) == manifest:
            return
        self.steps.add(manifest["step"])
        self.settle()
        self._sending = self._thread.submit(self._send, path, manifest)

    def prune(self, exempt_until: Collection[int]) -> None:
        """Removes from the store what the recipe does not keep, after the upload in flight."""
        self._thread.submit(self._prune, exempt_until)

    def figures(self) -> dict[str, float]:
        """The last step in the store and the number of failed uploads; of an upload since the last call, its size and
        seconds."""
        taken, self._figures = self._figures, {}
        return {"checkpoint/stored_step": self._last_step, "checkpoint/failed_uploads": self._num_failed, **taken}

    def settle(self) -> None:
        """Waits until nothing is being sent."""
        if self._sending is not None:
            wait_for([self._sending])

    def finish(self) -> None:
        """Raises RunFailed if the last checkpoint could not be sent."""
        if self._sending is not None:
            self._sending.result()
        if self._error is not None:
            raise RunFailed(f"the last checkpoint is not in the store: {self._error}; --resume sends it")

    def close(self) -> None:
        """Sends how the run ended."""
        self._thread.shutdown()
        if self._last_step and self._error is None:
            try:
                self._refuse_other_holder()
                self._send_journal(self._last_step)
            except (UserError, OSError) as error:
                self.warn(f"{_FIELD}: the end of the run was not sent ({error})")

    # ------------------------------------------------------------ in the thread

    def _send(self, path: Path, manifest: Manifest) -> None:
        step, began = manifest["step"], time.perf_counter()
        for number in range(TRIES):
            try:
                sent = self._send_checkpoint(path, manifest)
            except (UserError, OSError, ValueError) as error:  # also of the run's own files, or a damaged list
                self._error = error
                if isinstance(error, StoreLost):
                    break
                time.sleep(PAUSE * 2**number if number + 1 < TRIES else 0.0)
            else:
                self._error, self._last_step = None, step
                seconds = time.perf_counter() - began
                self._figures = {"checkpoint/upload_seconds": seconds, "checkpoint/upload_gb": sent / 1e9}
                break
        self.steps.discard(step)
        if self._error is not None:
            self._num_failed += 1
            self.warn(f"the checkpoint of step {step} was not sent to the store: {self._error}")

    def _send_checkpoint(self, path: Path, manifest: Manifest) -> int:
        """Returns the number of bytes that were sent."""
        self._refuse_other_holder()
        step = manifest["step"]
        sent = self._send_journal(step)
        listed = self._hide(step, manifest["files"])
        for name, entry in manifest["files"].items():
            sent += self._send_file(f"{_folder_of(step)}/{name}", path / name, entry)
        self._store.write(f"{_folder_of(step)}/{MANIFEST}", (path / MANIFEST).read_bytes())
        self._manifests[step] = manifest
        self._clear(listed)
        return sent

    def _send_file(self, name: str, path: Path, entry: Mapping[str, Any]) -> int:
        """Returns the number of bytes that were sent: 0 if the store has them already."""
        if self._known.get(name) == entry:
            return 0
        same = next((other for other, known in self._known.items() if known == entry), None)
        self._known.pop(name, None)
        is_copied = same is not None and self._store.copy(same, name)
        if not is_copied:
            self._store.put(name, path)
        self._known[name] = entry
        return 0 if is_copied else int(entry["size"])

    def _send_journal(self, step: int) -> int:
        """Sends what the run has written beside its checkpoints: files of steps until `step` once, others again."""
        sent = 0
        for kind in (ROLLOUTS, EVALUATIONS):
            for path in sorted((self._folder / kind).glob("step_*.jsonl")):
                name, size = f"{kind}/{path.name}", path.stat().st_size
                match = _STEP_FILE.fullmatch(name)
                if match is not None and int(match[2]) <= step and self._known.get(name) != size:
                    self._store.put(name, path)
                    self._known[name], sent = size, sent + size
        for name in JOURNAL:
            content = (self._folder / name).read_bytes() if (self._folder / name).is_file() else b""
            digest = hashlib.sha256(content).digest()
            if content and self._known.get(name) != digest:
                self._store.write(name, content)
                self._known[name], sent = digest, sent + len(content)
        return sent

    def _refuse_other_holder(self) -> None:
        if (holder := self._store.read(HOLDER)) != self._token:
            what = f"'{HOLDER}' was removed" if holder is None else "another process continues the run"
            raise StoreLost(f"{_FIELD}: {what} in '{self._store.url}'; this one sends no more")

    def _prune(self, exempt_until: Collection[int]) -> None:
        if self._error is not None:
            return
        config, metric = self._config, self._config.best_metric
        values = {step: manifest["metrics"].get(metric) for step, manifest in self._manifests.items()}
        kept = kept_steps(
            values,
            keep_last=config.keep_last,
            keep_best=config.keep_best,
            keep_every=config.keep_every,
            metric=metric,
        )
        kept |= {max((step for step in values if step <= until), default=0) for until in exempt_until}
        try:
            self._refuse_other_holder()
            for step in sorted(values.keys() - kept):
                self._remove(step)
            for listed in sorted(self._lists):
                self._clear(listed)
        except (UserError, ValueError) as error:
            self.warn(f"old checkpoints of the store were not removed: {error}")

    def _remove(self, step: int) -> None:
        """Removes a checkpoint. One with a file that it was not saved with stays, as in output_dir."""
        folder, own = _folder_of(step), {*self._manifests[step]["files"], MANIFEST}
        if any(name not in own for name in self._store.sizes(folder)):
            return
        self._clear(self._hide(step, self._manifests[step]["files"]))
        self._store.remove_folder(folder)

    def _hide(self, step: int, names: Collection[str]) -> str:
        """Removes the manifest of a step, if there is one, after it has listed `names`. Returns the list's name."""
        listed = f"{CHECKPOINTS}/.step_{step:06d}.files"
        earlier = json.loads(self._store.read(listed) or b"[]") if listed in self._lists else ()
        self._store.write(listed, json.dumps(sorted({*names, *earlier})).encode())
        self._lists.add(listed)
        if self._manifests.pop(step, None) is not None:
            self._store.remove(f"{_folder_of(step)}/{MANIFEST}")
        return listed

    def _clear(self, listed: str) -> None:
        """Removes the files of a list that are not of a whole checkpoint, then the list."""
        match = _FILES.fullmatch(listed)
        step = int(match[1]) if match else 0
        whole = self._manifests.get(step, {}).get("files", {})
        for name in json.loads(self._store.read(listed) or b"[]"):
            if name not in whole:
                self._store.remove(f"{_folder_of(step)}/{name}")
                self._known.pop(f"{_folder_of(step)}/{name}", None)
        self._store.remove(listed)
        self._lists.discard(listed)


def _folder_of(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step:06d}"
