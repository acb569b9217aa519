"""What a run asks of its workers: those who hold a model, in one process or in many.

    LearningWorkers     train, publish, save (copy, then write), load, metrics: all that a run on given data needs
    Workers             and generate, an open session, calibrate, score: what samples rollouts
    WorkersAhead        and adopt: what samples the next steps' rollouts while a step is learnt

The step, the loop, evaluation and checkpoints call these methods, and they are the same for one worker and for many.
Only run/ahead.py needs `WorkersAhead`, which workers that only train and others that only generate are. Arguments and
results are records and paths: no model, no tensor of one, no engine and no trainer crosses this border. What `train`
learnt comes back in its `PolicyUpdate`; state on disk is written and read by the workers themselves.

`local.py` is one worker in this process, `many/workers.py` several in processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from octetrl.environments.scoring import Score
from octetrl.records import (
    Completion,
    EarlierAnswer,
    GenerationRequest,
    OnCompletions,
    PackedBatch,
    PolicyUpdate,
    Published,
    Task,
)
from octetrl.rollout.backend import OnSession, RolloutSession, not_asked
from octetrl.trainer.checkpoint import Checkpoint
from octetrl.trainer.file_digests import WrittenFile
from octetrl.trainer.packing import PackingLayout


class LearningWorkers(Protocol):
    """Hold a model that is trained: a policy, or a reward model."""

    @property
    def layout(self) -> PackingLayout:
        """How `pack` packs for these workers. It follows from the recipe, not from how many they are."""

    @property
    def policy_version(self) -> int:
        """Updates that the weights have had."""

    @property
    def weights_are_whole(self) -> bool:
        """False while an update changes the weights: such weights must not be saved."""

    def train(self, batch: PackedBatch, /) -> PolicyUpdate:
        """One update from `batch`. Raises NonFiniteError, with the weights as they were, for results that are not
        finite."""

    def publish(self, policy_version: int, /) -> Published:
        """Puts the trained weights and KV scales where completions are sampled, and compares what is held there."""

    def prepare_saving(self) -> None:
        """Allocates the host memory that `copy_state` needs, before the first step; perhaps beside it."""

    def copy_state(self) -> str | None:
        """Copies the state into host memory, for `write_state`. Returns None; or, where the host has no room, why."""

    def write_state(self, folder: Path, /, *, copied: bool) -> Sequence[WrittenFile]:
        """Writes the model in Hugging Face form, and the rest of the state, into a checkpoint that is being written.
        Returns the files, which are synced. With `copied` it writes what `copy_state` copied, and may run in another
        thread beside the next step. Without, it writes the live state."""

    def load(self, saved: Checkpoint, policy_version: int, /) -> None:
        """Puts a verified checkpoint back and publishes it. UserError if it is another model's."""

    def close(self) -> None:
        """Ends the workers. A second call does nothing."""


class Workers(LearningWorkers, Protocol):
    """Hold a policy: they sample completions with the weights that they train."""

    @property
    def needs_calibration(self) -> bool:
        """Whether a calibrated FP8 cache has no scales yet."""

    def calibrate(self, token_lists: Sequence[Sequence[int]], /) -> Mapping[str, float]:
        """Makes KV scales from one forward over these sequences, and publishes them. Returns what it took."""

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        on_completions: OnCompletions | None = None,
        on_end: OnSession = not_asked,
        /,
    ) -> list[list[Completion]]:
        """`num_siblings` completions of each request, in the order of the requests. `on_completions` receives each when
        it ends, `on_end` the record of what was done."""

    def session(self, on_end: OnSession = not_asked, /) -> AbstractContextManager[RolloutSession]:
        """An open session: requests in, events out (rollout/backend.py). `on_end` receives its record."""

    def score(self, completions: Sequence[tuple[Task, str]], /) -> list[Score]:
        """The score of each (task, completion text) by `environment.reward_model`, in their order."""

    def remember(self, answers: Sequence[EarlierAnswer], /) -> None:
        """Gives answers of earlier steps, oldest first, to engines that make drafts from them. Other backends ignore
        them."""

    def forget_prefixes(self) -> None:
        """The next request prefills its whole prompt, whatever was generated before."""


@runtime_checkable
class WorkersAhead(Workers, Protocol):
    """Some only train and others only generate: these keep the weights that they have until `adopt`.

    `between_batches`: a context in which no batch is generated, with the metrics of the wait, set by who generates.
    `publish` enters it where new weights arrive in place."""

    between_batches: Callable[[], AbstractContextManager[dict[str, float]]]

    @property
    def pause_seconds(self) -> float:
        """How long nothing could be generated when weights were last adopted."""

    def adopt(self) -> None:
        """The workers that generate continue with the weights last published, also in an open session."""
