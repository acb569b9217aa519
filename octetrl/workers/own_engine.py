"""What this project's engine offers beyond `RolloutBackend` (rollout/backend.py): its KV scales, all metrics, drafts.

The doctor compares it op by op with the trainer, and `bench step` reads its capacity. They work with this engine alone;
everything else goes through the protocol.
"""

from __future__ import annotations

from collections.abc import Sequence

from octetrl.engine.engine import Engine
from octetrl.records import EarlierAnswer
from octetrl.rollout.backend import RemembersAnswers
from octetrl.system.errors import UserError
from octetrl.workers.worker import Worker


def own_engine(worker: Worker) -> Engine:
    """The engine of a worker. UserError if it has another backend."""
    if not isinstance(worker.engine, Engine):
        raise UserError(
            f"this worker generates with {type(worker.engine).__name__}, and the doctor and `bench step` look into"
            " OctetRL's own engine; run them without another backend"
        )
    return worker.engine


def remember(worker: Worker, answers: Sequence[EarlierAnswer]) -> None:
    """Gives answers of earlier steps to a worker's engine, for its drafts. Another backend makes none from them."""
    if isinstance(worker.engine, RemembersAnswers):
        worker.engine.remember(answers)
