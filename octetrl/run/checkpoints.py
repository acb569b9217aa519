"""Saves a run while its next step runs, and prunes what it saved.

    stage    at a step's end: waits for the save before, then copies the state to host memory. The run stops for this
    line     the loop writes the step's metrics, with `time/checkpoint` of that step
    write    a thread writes the copy under a hidden name and renames it, while the next step runs

One save is in flight at a time. A save that fails raises its error after the next step's line, or wherever the run next
waits for it. The run's last save has no step beside it: `stage` writes it from the live state, and `write` renames it.
So it is where the host has no room for a copy. In every case the step's line is on the disk before its checkpoint is
visible, and a process killed at any moment leaves the checkpoint before.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from octetrl.config.schema import CheckpointConfig
from octetrl.data.tokenizer import Tokenizer, save_tokenizer_files
from octetrl.run.resume import BATCHES, CURSOR, Cursor, batches_to_bytes
from octetrl.run.state import BufferedBatch, Run
from octetrl.run.store import Uploads
from octetrl.system.errors import RunFailed, UserError
from octetrl.trainer import checkpoint
from octetrl.trainer.checkpoint import StagedCheckpoint
from octetrl.workers.team import WorkerLost


class Checkpoints:
    """The checkpoints of the run `run_id`, in its folder. Save within `open`."""

    def __init__(self, folder: Path, config: CheckpointConfig, run_id: str | None) -> None:
        self.folder, self._config, self._run_id = folder, config, run_id
        self.num_saved = 0  # by this process, and visible
        self._tokenizer_files: Mapping[str, bytes] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._staged: StagedCheckpoint | None = None  # written from the live state, and still hidden
        self._copied: Callable[[], StagedCheckpoint] | None = None  # writes the copy
        self._figures: dict[str, float] = {}
        self._last_written: Path | None = None
        self._uploads = None if config.store is None else Uploads(config.store, config, folder.parent, run_id)
        self._has_warned = False

    # ------------------------------------------------------------ which there are

    def latest(self) -> Path | None:
        """The last checkpoint; None if the run was cut off before its first one."""
        return self.latest_until(None)

    def latest_until(self, step: int | None) -> Path | None:
        """The last checkpoint of `step` or a step before it, after the save in flight has ended."""
        self._settle()
        return self._visible_until(step)

    def _visible_until(self, step: int | None) -> Path | None:
        return checkpoint.latest_of(self.folder, self._run_id, until=step)

    def prune(self, exempt_until: Collection[int] = ()) -> None:
        """Keep what the recipe keeps, and for each of `exempt_until` the last checkpoint up to that step."""
        sending = () if self._uploads is None else tuple(self._uploads.steps)
        exempt = [path for step in (*exempt_until, *sending) if (path := self._visible_until(step)) is not None]
        hidden = checkpoint.prune(
            self.folder,
            keep_last=self._config.keep_last,
            keep_best=self._config.keep_best,
            keep_every=self._config.keep_every,
            best_metric=self._config.best_metric,
            run_id=self._run_id,
            exempt=[checkpoint.step_of(path) for path in exempt],
        )
        if hidden:
            self._thread.submit(checkpoint.remove_hidden, hidden)
        if self._uploads is not None:
            self._uploads.prune(exempt_until)

    # ------------------------------------------------------------ saving

    def take_store(self, start: int) -> None:
        """Refuses a store that can't be written or has another run, before anything is built."""
        if self._uploads is not None:
            self._uploads.begin(start)

    def close(self) -> None:
        """Call it when the folder says how the run ended."""
        if self._uploads is not None:
            self._uploads.close()

    @contextmanager
    def open(self, run: Run, start: int) -> Iterator[None]:
        """At its end no save is in flight. If the block fails, a failed save is only a warning beside its error."""
        checkpoint.remove_leftovers(self.folder)  # of a process that was killed; a complete run saves nothing more
        self._tokenizer_files = _tokenizer_files(run.tokenizer)
        every = self._config.every
        if every and (start // every + 1) * every < run.config.steps:
            run.workers.prepare_saving()
        if self._uploads is not None:
            self._uploads.warn = run.console.warn
            if (last := self.latest()) is not None:  # that an earlier process could not send
                self._uploads.submit(last)
        try:
            yield
            self._wait()
            if self._uploads is not None:
                self._uploads.finish()
        except BaseException as error:
            self._abandon(run, error)
            raise
        finally:
            self._thread.shutdown()

    def stage(self, run: Run, step: int, metrics: Mapping[str, float], *, is_last: bool) -> dict[str, float]:
        """Takes hold of the state after `step`; `write` then saves it. Returns `time/checkpoint`, the seconds that this
        stops the run. Raises the error of the save before, if that failed."""
        began = time.perf_counter()
        self._wait()
        refusal = None if is_last else run.workers.copy_state()
        if refusal is not None and not self._has_warned:
            run.console.warn(f"each checkpoint stops the run while it is written: {refusal}")
            self._has_warned = True
        copied = not is_last and refusal is None
        batches = self._batches_after(run, step, waits=True)
        stage = self._stager(run, Cursor.of(run, step), metrics, batches, copied=copied)
        if copied:
            self._copied = stage
        else:
            self._staged = stage()
        return {"time/checkpoint": time.perf_counter() - began}

    def write(self) -> None:
        """Call it when the step's line is on the disk. Raises the error of a save that failed during the step."""
        if self._saving is not None and self._saving.done():
            self._wait()
        if self._staged is not None:
            staged, self._staged = self._staged, None
            self._commit(staged)
        elif self._copied is not None:
            stage, self._copied = self._copied, None
            self._saving = self._thread.submit(lambda: self._commit(stage()))

    def written(self) -> Path | None:
        """The last checkpoint that this process has completed. Does not wait."""
        return self._last_written

    def figures(self) -> dict[str, float]:
        """`checkpoint/*` of a save since the last call: seconds on the disk, and GB/s; and of the store."""
        taken, self._figures = self._figures, {}
        return taken if self._uploads is None else taken | self._uploads.figures()

    def save_interrupted(self, run: Run, before: Cursor) -> str:
        """Saves the run as it was before the interrupted step, if the weights are unchanged. Returns what was done."""
        at = f"cut off in step {before.step + 1}"
        if before.step == 0:
            return f"{at}: nothing to save yet"
        last = self.latest()
        last_step = 0 if last is None else checkpoint.step_of(last)
        if before.step == last_step:
            return f"{at}: step {before.step} was already saved; continue with --resume"
        if not run.workers.weights_are_whole or run.workers.policy_version != before.policy_version:
            lost = (
                f"continue from step {last_step} with --resume" if last_step else "no step is saved yet, so begin again"
            )
            return f"{at}, while the weights changed: {lost}"
        batches = self._batches_after(run, before.step, waits=False)
        failure = self._save_beside_error(run, before, batches)
        if failure is not None:
            return f"{at}: saving step {before.step} failed as well ({failure})"
        return f"{at}: saved step {before.step}; continue with --resume"

    @contextmanager
    def saved_if_failed(self, run: Run, step: int, metrics: Mapping[str, float]) -> Iterator[None]:
        """Saves the step if the run fails by a limit of its recipe, because a file can't be written, or by a callback,
        and if it is cut off: its weights are sound, and can be evaluated."""
        try:
            yield
        except (RunFailed, UserError, KeyboardInterrupt, SystemExit):
            with suppress(OSError, UserError, RunFailed):  # of a save that was begun; the next lines try again
                self.write()
            last = self.latest()
            if run.workers.policy_version > 0 and (last is None or checkpoint.step_of(last) < step):
                batches = self._batches_after(run, step, waits=True)
                failure = self._save_beside_error(run, Cursor.of(run, step), batches, metrics)
                if failure is None:
                    run.console.note(f"step {step} is saved")
                else:
                    run.console.warn(f"saving step {step} failed as well: {failure}")
            raise

    def _save_beside_error(
        self,
        run: Run,
        cursor: Cursor,
        batches: Sequence[BufferedBatch],
        metrics: Mapping[str, float] = MappingProxyType({}),
    ) -> Exception | None:
        """Saves while an error ends the run, and stays its error. Returns why it could not."""
        try:
            self._commit(self._stager(run, cursor, metrics, batches, copied=False)())
        except (OSError, UserError, RunFailed) as failure:
            return failure
        return None

    def _batches_after(self, run: Run, step: int, *, waits: bool) -> Sequence[BufferedBatch]:
        """What was generated ahead, if the recipe saves it."""
        return run.method.batches_after(step, waits=waits) if self._config.batches_ahead == "saved" else ()

    def _stager(
        self,
        run: Run,
        cursor: Cursor,
        metrics: Mapping[str, float],
        batches: Sequence[BufferedBatch],
        *,
        copied: bool,
    ) -> Callable[[], StagedCheckpoint]:
        """What writes the checkpoint of `cursor` under its hidden name, in any thread, and times it."""
        write_more, known = partial(run.workers.write_state, copied=copied), dict(metrics)

        def stage() -> StagedCheckpoint:
            began = time.perf_counter()
            files: dict[str, bytes | Mapping[str, Any]] = {CURSOR: cursor.as_json(), **self._tokenizer_files}
            if batches:
                files[BATCHES] = batches_to_bytes(batches)
            staged = checkpoint.stage(
                self.folder, cursor.step, files, write_more=write_more, metrics=known, run_id=self._run_id
            )
            seconds = time.perf_counter() - began
            speed = staged.num_bytes / 1e9 / seconds
            self._figures = {"checkpoint/write_seconds": seconds, "checkpoint/gb_per_second": speed}
            return staged

        return stage

    def _commit(self, staged: StagedCheckpoint) -> None:
        self._last_written = staged.commit()
        self.num_saved += 1
        if self._uploads is not None:
            self._uploads.submit(self._last_written)

    # ------------------------------------------------------------ the save in flight

    def _wait(self) -> None:
        """Until no save is in flight. Raises the error of one that failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _settle(self) -> None:
        """The same, but an error waits for `_wait`."""
        if self._saving is not None:
            wait_for([self._saving])

    def _abandon(self, run: Run, cause: BaseException) -> None:
        """After an error of the run: waits for the save in flight, drops one that was not begun."""
        self._settle()
        if self._saving is not None and (error := self._saving.exception()) is not None:
            is_same = isinstance(error, WorkerLost) and isinstance(cause, WorkerLost)
            run.console.warn(f"the last save failed as well: {'its worker is lost' if is_same else error}")
        self._saving = None
        if self._staged is not None:
            self._staged.discard()
        if self._uploads is not None:
            self._uploads.settle()


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """They stay the same, and a tokenizer is not asked while the next step uses it: taken once."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer_files(tokenizer, Path(folder))
        return {file.name: file.read_bytes() for file in sorted(Path(folder).iterdir())}
