"""What a lost worker's line says of Ray's own reason."""

from __future__ import annotations

import pytest

from tests.e2e.installed_ray import ray  # noqa: F401  # isort: skip: the imports of octetrl.workers.ray need it

from ray.exceptions import RayActorError

from octetrl.workers.ray import _why

DEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: _RayWorker
The actor is dead because its worker process has died. Worker exit type: {kind} Worker exit detail: {detail}"""


@pytest.mark.parametrize(
    ("kind", "detail", "said"),
    [
        (
            "SYSTEM_ERROR",
            "Worker unexpectedly exits with a connection error code 2. End of file. Some potential root causes. (1) The"
            " process is killed by SIGKILL by OOM killer due to high memory usage.",
            "its process died",
        ),
        (
            "NODE_OUT_OF_MEMORY",
            "Task was killed due to the node running low on memory.",
            "its process died (out of memory)",
        ),
        (
            "INTENDED_SYSTEM_EXIT",
            "Worker exits because it was idle for a long time. More.",
            "its process died (Ray: INTENDED_SYSTEM_EXIT, Worker exits because it was idle for a long time)",
        ),
    ],
)
def test_only_what_ray_itself_did_is_repeated(kind: str, detail: str, said: str) -> None:
    assert _why(RayActorError(error_msg=DEAD.format(kind=kind, detail=detail))) == said


def test_no_reason_is_none() -> None:
    assert _why(RayActorError(error_msg="The actor died because of an error.")) == "its process died"
