"""Weights of the workers that train, sent to workers that only generate.

    first trainer   codes, scales, tensors that are not FP8, KV scales -> buckets of bytes -> broadcast
    engine worker   the same tensors, in the same order, into a second buffer until `adopt`; without one in place

On a GPU all of this runs on a stream of its own, beside the forwards of an open session. `broadcast` returns when the
tensors have arrived, so their next reader need not wait for that stream.

The engine of a worker reads its trainer's tensors (engine/weights.py). So the tensors to send are those that the engine
has, found by name in the trainer's model. A linear that is FP8 only in the rollout travels as BF16, and the engine
quantises it. With LoRA only the adapters travel: the frozen weights came from the same file.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions

from octetrl.config.worker_memory import BufferChoice, batch_cache_bytes, choose_buffer
from octetrl.fp8.kv_scales import KVScales
from octetrl.records import Published
from octetrl.system.errors import UserError
from octetrl.system.host import available_host_bytes
from octetrl.trainer.peers import ProcessGroupPeers
from octetrl.workers.worker import Worker

BUCKET_BYTES = 1 << 28
NONE = -1  # version of scales that are not there


class Transfer(ProcessGroupPeers):
    """Rank 0 is the first of the workers that train, the others generate."""

    _stream: torch.cuda.Stream | None = None

    def broadcast(self, tensors: Sequence[Tensor]) -> int:
        """Copies the tensors of rank 0 into those of all others, in place. Returns their bytes."""
        with self._on_own_stream():
            return sum(self._broadcast_bucket(bucket) for bucket in _buckets(tensors))

    def _broadcast_bucket(self, bucket: Sequence[Tensor]) -> int:
        sizes = [tensor.nbytes for tensor in bucket]
        if len(bucket) == 1 and bucket[0].device.type == self._device.type:  # large, such as an embedding: no copy
            self._from_first(_bytes_of(bucket[0]))
            return sizes[0]
        bytes_B = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        places = bytes_B.split(sizes)
        if self.share.rank == 0:
            for place, tensor in zip(places, bucket, strict=True):
                place.copy_(_bytes_of(tensor))
        self._from_first(bytes_B)
        if self.share.rank:
            for place, tensor in zip(places, bucket, strict=True):
                _bytes_of(tensor).copy_(place)
        return sum(sizes)

    def _from_first(self, bytes_B: Tensor) -> None:
        self._finish(partial(self._collectives.broadcast, [bytes_B], BroadcastOptions()), "weights")  # from rank 0

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """On a GPU: begins after the work that has been launched, and ends on the host when its own work has ended.

        On the current stream, which an open session uses too, each bucket would wait for the forwards in flight.
        """
        if self._device.type != "cuda":
            yield
            return
        self._stream = stream = self._stream or torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))  # the tensors may have pending reads and writes
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


class WeightSender:
    """Sends the weights of the first trainer."""

    def __init__(self, worker: Worker, transfer: Transfer) -> None:
        self._worker, self._transfer = worker, transfer

    def send(self) -> int:
        """Sends the weights and KV scales that the trainer has published. Returns bytes."""
        worker = self._worker
        scales = worker.kv_scales
        header = torch.tensor([worker.policy_version, NONE if scales is None else scales.policy_version])
        tensors = [*weight_tensors(worker), *([] if scales is None else [scales.scale_LS])]
        if worker.device.type == "cuda":
            torch.cuda.synchronize(worker.device)
        return self._transfer.broadcast([header]) + self._transfer.broadcast(tensors)


class WeightReceiver:
    """Receives the weights of a worker that only generates. With a second buffer, new weights may arrive while the
    engine generates, and wait there until `adopt`. Without, `adopt` receives them in place."""

    def __init__(self, worker: Worker, transfer: Transfer) -> None:
        self._worker, self._transfer = worker, transfer
        self._waiting: list[Tensor] | None = None  # the second buffer
        self._version: int | None = None
        self._scales: KVScales | None = None
        self.seconds = 0.0  # that the last weights took to arrive, from the moment when their sender was ready

    def choose_buffer(self) -> BufferChoice:
        """By the recipe, or by the memory that is free now. It comes before the KV cache takes its share."""
        worker = self._worker
        return choose_buffer(
            worker.recipe,
            weights=sum(tensor.nbytes for tensor in weight_tensors(worker)),
            cache=batch_cache_bytes(worker.recipe, worker.spec, worker.policy.precisions()),
            free=_free_bytes(worker.device),
        )

    def double(self) -> None:
        """Allocates the second buffer. Raises UserError without room for it."""
        self._waiting = _beside(weight_tensors(self._worker))

    def receive(self) -> None:
        header = torch.zeros(2, dtype=torch.int64)
        self._transfer.broadcast([header])
        began = time.perf_counter()
        version, scales_version = header.tolist()
        worker = self._worker
        targets = list(weight_tensors(worker) if self._waiting is None else self._waiting)
        if scales_version != NONE:
            shape = worker.spec.num_layers, worker.spec.num_cache_scales
            scale_LS = torch.empty(shape, dtype=torch.float32, device=worker.device)
            self._scales = KVScales(scale_LS, scales_version)
            targets.append(scale_LS)
        self._transfer.broadcast(targets)
        self.seconds = time.perf_counter() - began
        self._version = version

    def adopt(self) -> int:
        """Puts what was received last into the worker; the engine has it after `publish`. Returns its version. Without
        a second buffer it receives first, while the first trainer sends."""
        if self._waiting is None:
            self.receive()
        assert self._version is not None, "`receive` comes first"
        worker = self._worker
        if self._waiting is not None:  # `publish` reads them back, so the buffer is free for the next ones afterwards
            for own, new in zip(weight_tensors(worker), self._waiting, strict=True):
                _bytes_of(own).copy_(_bytes_of(new))
        worker.trainer.policy_version = self._version
        if self._scales is not None:
            worker.kv_scales = self._scales
        return self._version

    def put_into_engine(self) -> Published:
        """`adopt`, then `publish`. The metric `time/receive_weights` is how long the weights took to arrive."""
        published = self._worker.publish(self.adopt())
        return replace(published, metrics={**published.metrics, "time/receive_weights": self.seconds})


def _beside(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Memory for as many tensors. Raises UserError without room for it."""
    try:
        return [torch.empty_like(tensor) for tensor in tensors]
    except torch.OutOfMemoryError as error:
        size = sum(tensor.nbytes for tensor in tensors) / 1e9
        raise UserError(
            f"cluster.weight_buffer: a worker that generates has no room for a second buffer, {size:.1f} GB; use single"
        ) from error


def _free_bytes(device: torch.device) -> int:
    """Memory that can be allocated on the worker's device."""
    if device.type != "cuda":
        return available_host_bytes() or 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def keep_scales(worker: Worker, version: int) -> None:
    """Keeps the KV scales of a version that may still draw, for the replay of what it draws."""
    most = worker.recipe.cluster.max_staleness
    if most and worker.kv_scales is not None:
        worker.earlier_scales[version] = worker.kv_scales
        for old in [old for old in worker.earlier_scales if old < version - most]:
            del worker.earlier_scales[old]


def weight_tensors(worker: Worker) -> list[Tensor]:
    """All tensors that an update changes and the engine reads, in an order that all workers share."""
    trained = worker.trainer_model
    of_engine = {name for name, _ in worker.engine_model.named_parameters()}
    is_lora = worker.recipe.model.lora is not None
    parameters = [
        one.detach()
        for name, one in sorted(trained.named_parameters())
        if name in of_engine and (one.requires_grad or not is_lora)
    ]
    if is_lora:
        return parameters
    codes = [tensor for _, linear in trained.float8_linears() for tensor in (linear.codes, linear.scale)]
    return parameters + codes


def _bytes_of(tensor: Tensor) -> Tensor:
    """[bytes], a view."""
    assert tensor.is_contiguous(), "a tensor that is sent is contiguous"
    return tensor.view(-1).view(torch.uint8)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if bucket and filled + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        filled += tensor.nbytes
    if bucket:
        yield bucket
