"""The run folder: locks it for one run, and cleans up after a refused run.

    config.yaml  history.jsonl  run.json  metrics.jsonl  rollouts/  evaluations/  checkpoints/  lock
    warnings.jsonl  report.html  logs/  events.out.tfevents.*

Locks of the operating system prevent two live runs in one folder: one of the folder itself, and one of `lock`, which
names the process and may be deleted. They end with the process. The resolved recipe in
`config.yaml` and the run's id (`identity.py`) prevent a mix of two different runs. A new run starts only in a
folder without files of another run.

A refused run removes only the files and the empty folders that it created itself. Another run may have started in a
folder that it created. The lock file is removed last. Another process may open it before the removal and lock it
afterwards. So after locking, a process checks that the file still exists, and otherwise starts again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO

from octetrl.config.load import dump_recipe, load_recipe
from octetrl.config.lora import targets_of
from octetrl.config.schema import Recipe
from octetrl.run.folder.allowed_changes import (
    Change,
    changed_after,
    changes_between,
    record_changes,
    refuse_changes,
    refuse_contents,
)
from octetrl.run.folder.contents import CONTENTS, Contents, changed_contents, read_contents
from octetrl.run.folder.identity import new_run_id, read_run_id, refuse_foreign_checkpoints, write_run_id
from octetrl.run.folder.layout import (
    CHECKPOINTS,
    LOCK,
    RECIPE_FILE,
    foreign_file,
    is_lock,
    live_run,
    process_of,
    records_in,
    refuse_held,
)
from octetrl.system.errors import UserError
from octetrl.system.folder_lock import folder_lock
from octetrl.system.replaced_file import replaced_file
from octetrl.telemetry.bench_record import where_it_runs
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE, last_step
from octetrl.trainer import checkpoint
from octetrl.workers.model_shape import model_spec

NOTHING: Mapping[str, object] = {}
PROBED = 0.05  # seconds; longer than `octetrl status` holds a lock
ATTEMPTS = 1000  # to take a folder that refused runs remove at the same time


class OutputFolder:
    """Open it before anything is built, so that two runs cannot both start. Call `keep` when everything is built.

    A context manager. If it ends before `keep` (the run was refused), it removes what it created. `run_id` is the
    folder's: a new one, or that of the resumed run (None if it has neither a run.json nor a checkpoint). `allowed`:
    fields that a resumed run may change (allowed_changes.py).
    """

    def __init__(self, recipe: Recipe, *, resume: bool, allowed: Collection[str] = ()) -> None:
        self.path = Path(recipe.output_dir)
        self._recipe, self._allowed = recipe, allowed
        self._changes: list[Change] = []
        self._contents: Contents = {}
        self._resumes, self._is_kept = resume, False
        self._made: list[Path] = []  # folders, the outermost first
        self._made_lock = False
        self._lock: IO[str] | None = None
        self._held = ExitStack()  # the folder's own lock
        try:
            with self._writing():
                self._lock = self._take_lock()
            self.run_id = self._resumed_run() if resume else self._new_run()
            self.path = self.path.absolute()  # an environment may change the working directory
            self._made = [folder.absolute() for folder in self._made]
        except BaseException:
            self._clean_up()
            raise

    def keep(self, in_force: Mapping[str, object] = NOTHING) -> None:
        """Starts the run: writes its id and its resolved recipe, each to a temporary file that is renamed, so a kill
        leaves whole files. Creates `checkpoints/`, so that it is missing only if it was removed.

        in_force: what the model makes of settings, for the report."""
        with self._writing():
            try:
                if self.run_id is not None:
                    where = {**where_it_runs(), **in_force, CONTENTS: self._contents}
                    write_run_id(self.path, self.run_id, where)
                record_changes(self.path, self._last_step(), self._changes)
                self._changes = []  # a restart of the workers keeps the folder again
                with replaced_file(self.path / RECIPE_FILE) as file:
                    file.write(dump_recipe(self._recipe))
                    (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            except BaseException:
                if not (self.path / RECIPE_FILE).exists():
                    _remove_if_empty(self.path / CHECKPOINTS)
                    (self.path / RUN_FILE).unlink(missing_ok=True)
                raise
        self._is_kept = True

    def check_contents(self, contents: Contents) -> None:
        """Refuse a resumed run whose files or code differ from what it began with, unless `allowed` names them. A run
        whose run.json has no digests gets them now."""
        self._contents = contents
        if not self._resumes and not self._is_kept:
            return
        saved = read_contents(self.path)
        changed = changed_contents(saved, contents)
        refuse_contents(self.path, changed, self._allowed)
        self._changes += [Change(field, saved[field], contents[field]) for field in changed]

    def has_changed_contents(self, step: int) -> bool:
        """Whether contents were allowed to change after `step`, or now."""
        fields = {change.field for change in self._changes} | changed_after(self.path, step)
        return bool(fields & self._contents.keys())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir: cannot write in '{self.path}' ({error.strerror}); choose another folder"
            ) from error

    # ------------------------------------------------------------ the lock

    def _take_lock(self) -> IO[str]:
        if not is_lock(self.path / LOCK):
            raise foreign_file(self.path / LOCK)
        for _ in range(ATTEMPTS):
            self._make_folders()
            self._held.close()
            try:
                if not self._held.enter_context(folder_lock(self.path)):
                    time.sleep(PROBED)
                    if not self._held.enter_context(folder_lock(self.path)):
                        raise live_run(self.path, process_of(self.path))
                lock = self._open_lock()
            except FileNotFoundError:
                continue  # a refused run took the folder away in between
            try:
                _lock_now(lock)
            except BlockingIOError:
                lock.seek(0)
                owner = lock.read().strip()
                lock.close()
                self._made_lock = False  # perhaps created here, but locked by another run
                raise live_run(self.path, owner) from None
            if self._is_in_place(lock):
                break
            lock.close()
        else:
            raise FileNotFoundError(errno.ENOENT, "folders can't be created there")
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return lock

    def _make_folders(self) -> None:
        """Like `mkdir -p`, and records which folders it created."""
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        for folder in reversed(missing):
            try:
                folder.mkdir()
            except (FileExistsError, FileNotFoundError):
                if folder.exists() and not folder.is_dir():
                    raise
                continue  # another run was faster: it created the folder or removed its parent
            if folder not in self._made:
                self._made.append(folder)

    def _open_lock(self) -> IO[str]:
        path = self.path / LOCK
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self._made_lock = True
        except FileExistsError:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
            self._made_lock = False
        return os.fdopen(descriptor, "r+")

    def _is_in_place(self, lock: IO[str]) -> bool:
        """Whether the locked file is still the one in the folder."""
        try:
            return os.path.samestat(os.fstat(lock.fileno()), os.stat(self.path / LOCK))
        except FileNotFoundError:
            return False

    # ------------------------------------------------------------ what is in the folder

    def _new_run(self) -> str:
        refuse_held(self.path)
        return new_run_id()

    def _resumed_run(self) -> str | None:
        if not (self.path / RECIPE_FILE).exists():
            found = records_in(self.path)
            remedy = "leave --resume out to start one there"
            if found:
                remedy = f"put back the {RECIPE_FILE} of its {', '.join(found)}, or give another output_dir"
            raise UserError(f"--resume: '{self.path}' holds no run (no {RECIPE_FILE}); {remedy}")
        before = load_recipe(str(self.path / RECIPE_FILE))
        self._check_same_recipe(before)
        for name in (ROLLOUTS, EVALUATIONS, CHECKPOINTS):
            if (self.path / name).exists() and not (self.path / name).is_dir():
                raise UserError(f"--resume: '{self.path / name}' is a file, not a folder; move it out of the way")
        run_id = read_run_id(self.path)
        refuse_foreign_checkpoints(self.path, run_id)
        self._check_checkpoints_are_there(before)
        return run_id

    def _check_same_recipe(self, saved: Recipe) -> None:
        """Refuses a changed recipe, except for what resuming may change (allowed_changes.py)."""
        before, now = saved.model_dump(), self._recipe.model_dump()
        if _have_same_adapters(saved, self._recipe):
            before["model"]["lora"]["targets"] = now["model"]["lora"]["targets"]
        self._changes = changes_between(before, now)
        refuse_changes(self.path, self._changes, self._allowed, saved)

    def _check_checkpoints_are_there(self, saved: Recipe) -> None:
        """Refuses a run that lost its checkpoints. A run that was cut off before the first one starts again."""
        folder, every = self.path / CHECKPOINTS, saved.checkpoint.every
        if checkpoint.latest(folder) is not None:
            return
        measured = last_step(self.path / METRICS_FILE)
        had_one = every and measured >= 2 * every  # the second save waits for the first before it writes its line
        if measured and (had_one or not folder.is_dir()):
            raise UserError(
                f"--resume: '{self.path}' has metrics up to step {measured} but no checkpoint; restore"
                f" {CHECKPOINTS}/, or start again in another output_dir"
            )

    def _last_step(self) -> int:
        last = checkpoint.latest(self.path / CHECKPOINTS)
        return 0 if last is None else checkpoint.step_of(last)

    # ------------------------------------------------------------ the end

    def _clean_up(self) -> None:
        """Removes what a refused run created. The lock is held until the end."""
        if self._made_lock:
            (self.path / LOCK).unlink(missing_ok=True)
        for folder in reversed(self._made):
            _remove_if_empty(folder)
        self._close_locks()

    def _close_locks(self) -> None:
        self._held.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_kept:
            self._clean_up()
        else:
            self._close_locks()


def _lock_now(lock: IO[str]) -> None:
    """Raises BlockingIOError if another process holds it. `octetrl status` holds it for an instant, so tries twice."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(PROBED)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _have_same_adapters(saved: Recipe, recipe: Recipe) -> bool:
    """Whether both recipes adapt the same projections of one model. `targets: null` and a list of all are the same."""
    before, now = saved.model, recipe.model
    if before.lora is None or now.lora is None or (before.path, before.preset) != (now.path, now.preset):
        return False
    if before.lora.targets == now.lora.targets:
        return True
    spec = model_spec(recipe)
    return set(targets_of(before.lora, spec)) == set(targets_of(now.lora, spec))


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        try:
            folder.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
