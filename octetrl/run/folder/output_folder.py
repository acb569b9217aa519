"""A run in its folder: takes it, writes the run's recipe and id, and cleans up after a refused run.

The lock (`lock.py`) keeps two live runs apart; the resolved recipe in `config.yaml` and the run's id (`identity.py`)
keep two different runs apart. A refused run removes only what it created itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

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
from octetrl.run.folder.layout import CHECKPOINTS, RECIPE_FILE, refuse_records, refuse_used
from octetrl.run.folder.lock import FolderLock, foreign
from octetrl.system.errors import UserError
from octetrl.system.files import replaced_file
from octetrl.telemetry.provenance import where_it_runs
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import METRICS_FILE, last_step
from octetrl.trainer import checkpoint
from octetrl.workers.model_shape import model_spec

NOTHING: Mapping[str, object] = {}


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
        with self._writing():
            self._lock = FolderLock(self.path)
        try:
            self.run_id = self._resumed_run() if resume else self._new_run()
        except BaseException:
            self._lock.undo()
            raise
        self.path = self.path.absolute()  # an environment may change the working directory

    def keep(self, in_force: Mapping[str, object] = NOTHING) -> None:
        """Starts the run: writes its resolved recipe, then its id, each to a temporary file that is renamed, so a kill
        leaves whole files. Creates `checkpoints/`, so that it is missing only if it was removed.

        in_force: what the model makes of settings, for the report."""
        is_new = not (self.path / RECIPE_FILE).exists()
        with self._writing():
            try:
                record_changes(self.path, self._last_step(), self._changes)
                self._changes = []  # a restart of the workers keeps the folder again
                with replaced_file(self.path / RECIPE_FILE) as file:
                    file.write(dump_recipe(self._recipe))
                    (self.path / CHECKPOINTS).mkdir(exist_ok=True)
                if self.run_id is not None:
                    where = {**where_it_runs(), **in_force, CONTENTS: self._contents}
                    write_run_id(self.path, self.run_id, where)
            except BaseException:
                if is_new:
                    (self.path / RECIPE_FILE).unlink(missing_ok=True)
                    with suppress(OSError):
                        (self.path / CHECKPOINTS).rmdir()
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

    # ------------------------------------------------------------ what is in the folder

    def _new_run(self) -> str:
        refuse_used(self.path, was_taken=self._lock.was_taken)
        return new_run_id()

    def _resumed_run(self) -> str | None:
        if not (self.path / RECIPE_FILE).exists():
            refuse_records(self.path, was_taken=self._lock.was_taken)
            raise UserError(
                f"--resume: '{self.path}' holds no run (no {RECIPE_FILE}); leave --resume out to start one there"
            )
        before = load_recipe(str(self.path / RECIPE_FILE))
        self._check_same_recipe(before)
        places = [self.path / name for name in (ROLLOUTS, EVALUATIONS, CHECKPOINTS)]
        if files := [place.name for place in places if place.exists() and not place.is_dir()]:
            raise foreign(self.path, files)
        run_id = read_run_id(self.path)
        if run_id is None and checkpoint.latest(self.path / CHECKPOINTS) is None:
            run_id = new_run_id()  # it was killed before it wrote its own
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

    def __enter__(self) -> OutputFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_kept:
            self._lock.release()
        else:
            self._lock.undo()


def _have_same_adapters(saved: Recipe, recipe: Recipe) -> bool:
    """Whether both recipes adapt the same projections of one model. `targets: null` and a list of all are the same."""
    before, now = saved.model, recipe.model
    if before.lora is None or now.lora is None or (before.path, before.preset) != (now.path, now.preset):
        return False
    if before.lora.targets == now.lora.targets:
        return True
    spec = model_spec(recipe)
    return set(targets_of(before.lora, spec)) == set(targets_of(now.lora, spec))
