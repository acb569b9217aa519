"""What this project's engine offers beyond `RolloutBackend` (rollout/backend.py): its KV scales and all metrics.

The doctor compares it op by op with the trainer, and `bench step` reads its capacity. They work with this engine alone;
everything else goes through the protocol.
"""

from __future__ import annotations

from octetrl.config.errors import UserError
from octetrl.engine.engine import Engine
from octetrl.workers.worker import Worker


def own_engine(worker: Worker) -> Engine:
    """The engine of a worker. UserError if it has another backend."""
    if not isinstance(worker.engine, Engine):
        raise UserError(
            f"this worker generates with {type(worker.engine).__name__}, and the doctor and `bench step` look into"
            " OctetRL's own engine; run them without another backend"
        )
    return worker.engine
