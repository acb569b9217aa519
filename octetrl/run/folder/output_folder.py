"""A run in its folder: takes it, writes the run's recipe and id, and cleans up after a refused run.

The lock (layout.py) keeps two live runs apart. The resolved recipe in `config.yaml` and the run's id keep two different
runs apart. A refused run removes only what it created itself.

A run gets a random id when it starts. `run.json` in its folder and the manifest of each checkpoint contain it.
`run.json` also says where the run was started or resumed last (commit, machine, versions) and the linears' formats.
Only checkpoints of the folder's own run are resumed from, exported or pruned. A folder without `run.json` belongs to
the run of its checkpoints, if they all belong to one run.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from octetrl.config.load import dump_recipe, load_recipe
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
from octetrl.run.folder.layout import (
    CHECKPOINTS,
    RECIPE_FILE,
    FolderLock,
    foreign,
    refuse_records,
    refuse_used,
    remove_run,
)
from octetrl.system.errors import UserError
from octetrl.system.files import replaced_file
from octetrl.telemetry.ending import FINISHED, LIVE, given_callbacks, read_ending, read_where
from octetrl.telemetry.provenance import where_it_runs
from octetrl.telemetry.rollouts import EVALUATIONS, ROLLOUTS
from octetrl.telemetry.sinks import METRICS_FILE, RUN_FILE, last_step
from octetrl.trainer import checkpoint

EPOCHS = "epochs"  # in run.json: the length that a recipe gave in place of steps
NOTHING: Mapping[str, object] = {}
_SHOWN = 3  # names of checkpoints in a message


class OutputFolder:
    """Open it before anything is built, so that two runs cannot both start. Call `keep` when everything is built.

    A context manager. If it ends before `keep` (the run was refused), it removes what it created. `run_id` is the
    folder's: a new one, or that of the resumed run (None if it has neither a run.json nor a checkpoint). `allowed`:
    fields that a resumed run may change (allowed_changes.py).
    """

    def __init__(self, recipe: Recipe, *, resume: bool, allowed: Collection[str] = ()) -> None:
        self.path = Path(recipe.output_dir)
        self._recipe, self._allowed = recipe, allowed
        self._saved: Recipe | None = None
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

    def keep(self, in_force: Mapping[str, object] = NOTHING, recipe: Recipe | None = None) -> None:
        """Starts the run: writes its resolved recipe, then its id, each to a temporary file that is renamed, so a kill
        leaves whole files. Creates `checkpoints/`, so that it is missing only if it was removed.

        in_force: what the model makes of settings, for the report. recipe: with the steps that its `epochs` are, which
        take their place in the file."""
        self._recipe = self._recipe if recipe is None else recipe
        epochs, plain = self._recipe.epochs, self._recipe.model_copy(update={"epochs": None})
        found = {**where_it_runs(), **in_force, **({} if epochs is None else {EPOCHS: epochs})}
        with self._writing():
            record_changes(self.path, self._last_step(), self._changes)
            self._changes = []  # a restart of the workers keeps the folder again
            with replaced_file(self.path / RECIPE_FILE) as file:
                file.write(dump_recipe(plain))
                (self.path / CHECKPOINTS).mkdir(exist_ok=True)
            if self.run_id is not None:
                write_run_id(self.path, self.run_id, {**found, CONTENTS: self._contents})
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

    def finished(self) -> str | None:
        """After which step, and why, the resumed run ended with this recipe's number of steps. None: it goes on."""
        ending = read_ending(read_where(self.path)) if self._saved is not None else None
        if self._saved is None or ending is None or ending.how != FINISHED:
            return None
        step, steps = last_step(self.path / METRICS_FILE), self._recipe.steps
        if self._recipe.epochs is not None:  # how many steps it is follows from the data
            steps = self._saved.steps if read_where(self.path).get(EPOCHS) == self._recipe.epochs else step + 1
        is_done = step >= steps or (bool(ending.why) and steps == self._saved.steps)
        return f" after step {step}{ending.why and f' ({ending.why})'}" if is_done else None

    def given_callbacks(self) -> list[str]:
        """Classes of the callbacks that were given in Python when the resumed run began."""
        return given_callbacks(self.path) if self._resumes else []

    def has_changed_contents(self, step: int) -> bool:
        """Whether contents were allowed to change after `step`, or now."""
        return bool(self._changed_after(step) & self._contents.keys())

    def resamples(self, step: int) -> bool:
        """Whether a temperature changed like this: batches that were sampled ahead of `step` had the earlier one."""
        return any(field.endswith(".temperature") for field in self._changed_after(step))

    def _changed_after(self, step: int) -> set[str]:
        return {change.field for change in self._changes} | changed_after(self.path, step)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise UserError(
                f"output_dir: cannot write in '{self.path}' ({error.strerror}); choose another folder"
            ) from error

    def _new_run(self) -> str:
        refuse_used(self.path, was_taken=self._lock.was_taken)
        return new_run_id()

    def _resumed_run(self) -> str | None:
        if not (self.path / RECIPE_FILE).exists():
            refuse_records(self.path, was_taken=self._lock.was_taken)
            raise UserError(
                f"--resume: '{self.path}' holds no run (no {RECIPE_FILE}); leave --resume out to start one there"
            )
        self._saved = before = load_recipe(str(self.path / RECIPE_FILE))
        self._changes = changes_between(before.model_dump(), self._recipe.model_dump())
        refuse_changes(self.path, self._changes, self._allowed, before)
        places = [self.path / name for name in (ROLLOUTS, EVALUATIONS, CHECKPOINTS)]
        if files := [place.name for place in places if place.exists() and not place.is_dir()]:
            raise foreign(self.path, files)
        run_id = read_run_id(self.path)
        if run_id is None and checkpoint.latest(self.path / CHECKPOINTS) is None:
            run_id = new_run_id()  # it was killed before it wrote its own
        _refuse_foreign_checkpoints(self.path, run_id)
        self._check_checkpoints_are_there(before)
        return run_id

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
            return
        if not self._resumes:
            remove_run(self.path)  # as half a start on a full disk
        self._lock.undo()


def new_run_id() -> str:
    """A new id from the operating system's entropy, so that no random generator of a run advances."""
    return uuid.uuid4().hex[:12]


def read_run_id(run_folder: Path) -> str | None:
    """The id of the folder's run; None if it has no run.json and no checkpoint. Raises UserError if it is not clear."""
    path = run_folder / RUN_FILE
    try:
        run_id = json.loads(path.read_bytes())["run"]
    except FileNotFoundError:
        return _id_of_checkpoints(run_folder)
    except (ValueError, TypeError, KeyError, RecursionError):
        run_id = None
    if not isinstance(run_id, str):
        raise UserError(f"'{path}' does not name a run; restore it, or delete it if all checkpoints belong to one run")
    return run_id


def write_run_id(run_folder: Path, run_id: str, where: Mapping[str, object]) -> None:
    """Write run.json of a run that starts. `where`: where it runs, and in which formats."""
    with replaced_file(run_folder / RUN_FILE) as file:
        json.dump({"run": run_id, **where, **LIVE}, file)


def _refuse_foreign_checkpoints(run_folder: Path, run_id: str | None) -> None:
    """Raises UserError naming the checkpoints of another run. One with an unreadable manifest may be this run's."""
    owners = checkpoint.owners(run_folder / CHECKPOINTS)
    others = [name for name, owner in owners.items() if owner not in (run_id, checkpoint.UNKNOWN)]
    if others:
        raise UserError(
            f"--resume: '{run_folder / CHECKPOINTS}' holds checkpoints of another run ({_some(others)});"
            f" move them out of this folder, then --resume"
        )


def _id_of_checkpoints(run_folder: Path) -> str | None:
    owners = checkpoint.owners(run_folder / CHECKPOINTS)
    ids = {owner for owner in owners.values() if owner != checkpoint.UNKNOWN}
    if len(ids) > 1:
        raise UserError(
            f"'{run_folder / CHECKPOINTS}' holds checkpoints of {len(ids)} runs ({_some(list(owners))}), and no"
            f" {RUN_FILE} says which run owns the folder; name one checkpoint, or move the others out"
        )
    return ids.pop() if ids else None


def _some(names: list[str]) -> str:
    """`names`, sorted, without the end of a long list."""
    more = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*sorted(names)[:_SHOWN], *more])
