"""The processes of one tensor-parallel vLLM (`cluster.tensor_parallel`), as one of them sees them.

Each rank runs a vLLM with a scheduler of its own (vLLM's external launcher). All get the same requests in the same
order, so they schedule the same forwards, which meet in vLLM's own collectives. Nothing interrupts a rank that waits
there for another. So the ranks compare their errors and their new tokens before the next forward.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from octetrl.backends.vllm.calls import RequestOutput
from octetrl.layers.tensor_group import TensorGroup
from octetrl.system.errors import UserError

STEP = "vLLM's step"
END = -1  # behind the tokens of a request; the next number says whether it has finished

Result = TypeVar("Result")


class Commands(Protocol):
    """Exchanges between the hosts of the ranks, which wait for no forward (trainer/peers.py)."""

    def gather_records(self, record: Any, phase: str) -> list[Any]:
        """The JSON records of all ranks, in order."""

    def maximum(self, values: Tensor, phase: str) -> Tensor:
        """The largest of each element over all ranks."""


class Ranks(TensorGroup, Protocol):
    """The workers that share a model (trainer/tensor_peers.py). One without others is None in this room."""

    @property
    def commands(self) -> Commands: ...

    def join_default_group(self) -> None:
        """Makes torch.distributed's default group of these workers."""


def together(ranks: Ranks | None, phase: str, work: Callable[[], Result]) -> Result:
    """The result of `work` on this rank, which exchanges nothing. An error of any rank is raised on all.

    UserError stays one; another rank's error is a RuntimeError with its text.
    """
    if ranks is None:
        return work()
    try:
        result = work()
    except Exception as error:
        _tell(ranks, phase, error)
        raise
    _tell(ranks, phase, None)
    return result


def step_together(ranks: Ranks | None, step: Callable[[], Sequence[RequestOutput]]) -> Sequence[RequestOutput]:
    """The outputs of one step. Raises the error of any rank on all, and RuntimeError if the ranks' tokens differ: they
    would run different forwards. One exchange of three numbers."""
    if ranks is None:
        return step()
    try:
        outputs = step()
    except Exception as error:
        ranks.commands.maximum(torch.tensor([1, 0, 0]), STEP)
        _tell(ranks, STEP, error)
        raise
    drawn = checksum(outputs)
    failed, most, least = ranks.commands.maximum(torch.tensor([0, drawn, -drawn]), STEP).tolist()
    if failed:
        _tell(ranks, STEP, None)
    if most != -least:
        raise RuntimeError(
            f"vLLM's {ranks.size} ranks have sampled different tokens in one step, so they would run different"
            " forwards, and their collectives would hang; continue with --resume, and use cluster.tensor_parallel=1 if"
            " it happens again"
        )
    return outputs


def checksum(outputs: Sequence[RequestOutput]) -> int:
    """A checksum of the new tokens of all requests, in their order."""
    numbers = array("q")
    for output in outputs:
        for part in output.outputs:
            numbers.extend(part.token_ids)
        numbers.extend((END, int(output.finished)))
    return zlib.crc32(numbers.tobytes())


def _tell(ranks: Ranks, phase: str, error: Exception | None) -> None:
    """Exchanges the errors of all ranks. Raises the first one where this rank has none."""
    own = None if error is None else [f"{error}" or type(error).__name__, isinstance(error, UserError)]
    for rank, told in enumerate(ranks.commands.gather_records(own, phase)):
        if told is not None and error is None:
            text, is_of_user = told
            raise UserError(text) if is_of_user else RuntimeError(f"vLLM's rank {rank}: {text}")
