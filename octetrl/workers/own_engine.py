"""What this project's engine offers beyond `RolloutBackend` (rollout/backend.py): metrics as a record, and its scales.

Workers in processes of their own, the doctor and the benches need it. They run with this engine alone; all
else that a worker does goes through the protocol.
"""

from __future__ import annotations

from octetrl.engine.engine import Engine
from octetrl.workers.worker import Worker


def own_engine(worker: Worker) -> Engine:
    """The engine of a worker."""
    assert isinstance(worker.engine, Engine), f"this needs the engine of octetrl, not {type(worker.engine).__name__}"
    return worker.engine
