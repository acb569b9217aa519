"""What the workers of one run exchange while they train: sums, whole tensors from their owners, small records.

All workers run the same program. They call the same methods in the same order, and every method returns when all
workers have called it. `Alone` is the only worker of a run; it exchanges nothing. `ProcessGroupPeers` uses
torch.distributed: NCCL between GPUs, gloo between CPU processes.

    sum_to_owners         each owner gets the sum of its rows over all workers      reduce-scatter, all-reduce
    gather_from_owners    every worker gets the rows of all owners, in place        all-gather, broadcasts
    sum, maximum          of small tensors: gathered, then combined in the order of ranks, with equal bits everywhere
    gather, gather_records    tensors of different lengths, and JSON records, of all workers
    agree                 the first error that any worker reports

The same number of workers gives the same bits each time. Another number changes the order of float32 sums.

**Owners.** Up to 16 workers own the rows of a model together. More are divided into groups of consecutive ranks
(config/cluster.py), each of which owns all rows: among many workers blocks of 128 rows do not divide evenly. Sums are
added within each group, then by the workers of all groups that own the same rows, with equal bits in all groups.
So new weights are exchanged within a group.

Every call has a deadline. If the other workers do not answer in time, `PeersLost` names the worker, the phase and the
seconds. N values, R bytes or elements of the largest share of one worker.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, Store, TCPStore, Work

from octetrl.layers.tensor_group import ONE_WORKER, TensorGroup
from octetrl.system.errors import RunFailed
from octetrl.trainer.shards import Cut, GradientMode, Share, buckets, lots

LONGEST_POLL_SECONDS = 1e-3
BUCKETS_IN_FLIGHT = 4  # of NCCL, whose next exchange waits for no process
LARGE_COPY_BYTES = 1 << 20  # of a part of a bucket that is copied by a launch of its own
IN_PLACE_BYTES = 1 << 30  # of tensors that are gathered in place by one exchange
LINK_BYTES = {"cuda": 1 << 29, "cpu": 1 << 23}  # of the tensor whose exchange shows the link's speed
LINK_ROUNDS = 4  # the fastest counts; the first may connect


class PeersLost(RunFailed):
    """Another worker did not answer in time, or its connection broke."""


class Peers(Protocol):
    """The workers of a run, as one of them sees them. `phase` names the work in errors, such as "gradient sums"."""

    @property
    def share(self) -> Share:
        """The rank of this worker, and the number of workers."""

    @property
    def owners(self) -> Share:
        """The rank of this worker in its group of owners, which owns all rows, and the number of workers in it."""

    @property
    def gradients(self) -> GradientMode:
        """How the workers add their gradients (trainer/gradients.py)."""

    @property
    def worker(self) -> Share:
        """The number of this worker among all of the run, those of all parts of the model included."""

    @property
    def group(self) -> TensorGroup:
        """The workers that share this worker's model by rows (trainer/tensor_peers.py). They train the same batch."""

    def sum_in_group(self, values_N: Tensor, phase: str) -> Tensor:
        """The sum over `group`, float64 [N]."""

    def agree_in_group(self, error: str | None, phase: str) -> str | None:
        """The first error in `group`; None if no worker of it has one."""

    def sum_to_owners(self, cuts: Sequence[Cut], phase: str) -> list[Tensor]:
        """For each cut, the sum over all workers of this worker's rows: float32, valid until the next call."""

    def gather_from_owners(self, cuts: Sequence[Cut], phase: str) -> None:
        """Copy the rows of each owner into the tensors of all workers, in place, bucket by bucket. Any dtype."""

    def sum(self, values_N: Tensor, phase: str) -> Tensor:
        """The sum over all workers, float64 [N], on the device of `values_N`."""

    def maximum(self, values: Tensor, phase: str) -> Tensor:
        """The largest value over all workers, element by element. NaN if any is NaN."""

    def gather(self, values_N: Tensor, phase: str) -> list[Tensor]:
        """The tensors of all workers in the order of ranks. N may differ between workers, the dtype must not."""

    def gather_records(self, record: Any, phase: str) -> list[Any]:
        """The JSON records of all workers in the order of ranks."""

    def agree(self, error: str | None, phase: str) -> str | None:
        """The first error in the order of ranks; None if no worker has one."""

    def link_speed(self) -> float:
        """GB/s at which this worker receives, measured by a short exchange; 0 if it is alone."""

    def close(self) -> None:
        """End the connections."""


class WholeModel:
    """The part of `Peers` of a worker whose model is whole."""

    share: Share
    group: TensorGroup = ONE_WORKER

    @property
    def owners(self) -> Share:
        return self.share

    @property
    def worker(self) -> Share:
        return self.share

    def sum_in_group(self, values_N: Tensor, phase: str) -> Tensor:
        return values_N.double()

    def agree_in_group(self, error: str | None, phase: str) -> str | None:
        return error


class Alone(WholeModel):
    """The only worker of a run."""

    share = Share()
    gradients: GradientMode = "local"

    def sum_to_owners(self, cuts: Sequence[Cut], phase: str) -> list[Tensor]:
        return [cut.tensor.float() for cut in cuts]

    def gather_from_owners(self, cuts: Sequence[Cut], phase: str) -> None:
        pass

    def sum(self, values_N: Tensor, phase: str) -> Tensor:
        return values_N.double()

    def maximum(self, values: Tensor, phase: str) -> Tensor:
        return values

    def gather(self, values_N: Tensor, phase: str) -> list[Tensor]:
        return [values_N]

    def gather_records(self, record: Any, phase: str) -> list[Any]:
        return [record]

    def agree(self, error: str | None, phase: str) -> str | None:
        return error

    def link_speed(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


ALONE = Alone()


def serve_store(host: str) -> tuple[Store, str]:
    """A new store for the workers of a run, served while it is referred to, and its address "host:port".

    Keep it while the workers live: NCCL connects through it, and looks into it later.
    """
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def join_store(address: str, deadline_seconds: float = 60.0) -> Store:
    """The store at "host:port" that another process serves. PeersLost if nobody answers."""
    host, _, port = address.rpartition(":")
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=deadline_seconds))
    except RuntimeError as error:
        raise PeersLost(f"no worker serves {address} ({deadline_seconds:g} s): {_first_line(error)}") from error


class Running(NamedTuple):
    """A collective that was started at `began`, of time.monotonic."""

    work: Work
    began: float
    phase: str


class ProcessGroupPeers(WholeModel):
    """Peers over torch.distributed. Build it in every worker's process, with the same store."""

    bucket_elements = 1 << 28  # of one exchange of `gather_from_owners`, the same for all workers
    in_place_from = 6 << 20  # bytes from each owner by one exchange of a tensor that is not copied into a bucket

    def __init__(
        self,
        store: Store,
        share: Share,
        device: torch.device,
        *,
        gradients: GradientMode = "local",
        owners: int | None = None,
        deadline_seconds: float = 600.0,
        name: str = "peers",
    ) -> None:
        """`device`: where tensors are exchanged; NCCL for a GPU, gloo for the CPU, by which tensors of a GPU may travel
        too. `owners`: how many workers own all rows together; None: all. `name`: unique within the store."""
        self.share, self.gradients = share, gradients
        self._device, self._deadline_seconds = device, deadline_seconds
        self.connection = store, device, deadline_seconds  # by which some of the workers connect as a group
        self._collectives = self._connected(PrefixStore(name, store), share)
        size = owners or share.count
        assert share.count % size == 0, f"{share.count} workers in groups of {size} owners"
        group, rank = divmod(share.rank, size)
        self._owners, groups = Share(rank, size), Share(group, share.count // size)
        self._among_owners = self._collectives
        self._across_groups: Any = None  # the workers that own the same rows
        if groups.count > 1:
            self._among_owners = self._connected(PrefixStore(f"{name} owners {group}", store), self._owners)
            self._across_groups = self._connected(PrefixStore(f"{name} rows {rank}", store), groups)

    def _connected(self, store: Store, share: Share) -> Any:
        try:
            if self._device.type != "cuda":
                return ProcessGroupGloo(store, share.rank, share.count, timedelta(seconds=self._deadline_seconds))
            nccl = torch.distributed.ProcessGroupNCCL  # only CUDA builds of torch have it
            options = nccl.Options()
            options._timeout = timedelta(seconds=2 * self._deadline_seconds)  # ours comes first and names the phase
            with torch.cuda.device(self._device):
                connected: Any = nccl(store, share.rank, share.count, options)
        except RuntimeError as error:
            raise self._lost("connect", self._deadline_seconds, error) from error
        one = torch.zeros(1, device=self._device)
        self._finish(lambda: connected.allreduce([one]), "connect")  # NCCL connects in its first collective
        return connected

    @property
    def owners(self) -> Share:
        return self._owners

    def sum_to_owners(self, cuts: Sequence[Cut], phase: str) -> list[Tensor]:
        counts = [[cut.part(rank).numel() for cut in cuts] for rank in range(self._owners.count)]
        width = max(map(sum, counts))
        parts_CR = torch.zeros(self._owners.count, width, dtype=torch.float32, device=self._device)
        for rank, sizes in enumerate(counts):
            for cut, piece in zip(cuts, parts_CR[rank].split([*sizes, width - sum(sizes)]), strict=False):
                piece.view(cut.part(rank).shape).copy_(cut.part(rank))
        sum_R = parts_CR.new_empty(width)
        self._finish(lambda: self._among_owners._reduce_scatter_base(sum_R, parts_CR.view(-1)), phase)
        if self._across_groups is not None:
            self._finish(lambda: self._across_groups.allreduce([sum_R]), phase)
        own = [cut.part(self._owners.rank) for cut in cuts]
        pieces = sum_R[: sum(part.numel() for part in own)].split([part.numel() for part in own])
        return [piece.view(part.shape).to(part.device) for piece, part in zip(pieces, own, strict=True)]

    def gather_from_owners(self, cuts: Sequence[Cut], phase: str) -> None:
        large = [cut for cut in cuts if self._is_large(cut)]
        small = [cut for cut in cuts if not self._is_large(cut)]
        in_flight = BUCKETS_IN_FLIGHT if self._device.type == "cuda" else 0
        running = deque(self._start(partial(self._gather_in_place, lot), phase) for lot in lots(large, IN_PLACE_BYTES))
        for bucket in buckets(small, self.bucket_elements):
            counts = [[cut.num_bytes(rank) for cut in bucket] for rank in range(self._owners.count)]
            own_R = torch.empty(max(map(sum, counts)), dtype=torch.uint8, device=self._device)
            all_CR = own_R.new_empty(self._owners.count, own_R.numel())
            self._copy_parts(bucket, counts, own_R, self._owners.rank, out=True)
            running.append(self._start(partial(self._among_owners._allgather_base, all_CR.view(-1), own_R), phase))
            if self._device.type == "cuda":
                running[-1].work.wait()  # the copies below come after it on the GPU; this process goes on
            while len(running) > in_flight:
                self._complete(running.popleft())
            for rank, bytes_R in enumerate(all_CR):
                if rank != self._owners.rank:
                    self._copy_parts(bucket, counts, bytes_R, rank, out=False)
        for one in running:
            self._complete(one)

    def _is_large(self, cut: Cut) -> bool:
        here = cut.tensor.device.type == self._device.type  # not where workers that share a GPU exchange on the host
        exchanges = 1 if cut.is_even else self._owners.count  # `_in_place`
        return here and cut.tensor.nbytes >= self.in_place_from * self._owners.count * exchanges

    def _gather_in_place(self, cuts: Sequence[Cut]) -> Work:
        """One exchange. No row is copied on this worker: each arrives where it belongs."""
        increment_version([cut.tensor for cut in cuts])  # collectives do not tell autograd
        starts = [start for cut in cuts for start in self._in_place(cut)]
        if self._device.type != "cuda":
            works = [start() for start in starts]
            for work in works[:-1]:
                work.wait(timedelta(seconds=self._deadline_seconds))
            return works[-1]
        self._among_owners._start_coalescing()
        for start in starts:
            start()
        whole: Work = self._among_owners._end_coalescing()
        return whole

    def _in_place(self, cut: Cut) -> list[Callable[[], Work]]:
        """An all-gather if all workers own equally many rows, else a broadcast by each."""
        if cut.is_even:
            own_R = _bytes(cut.part(self._owners.rank))
            return [partial(self._among_owners._allgather_base, _bytes(cut.tensor), own_R)]
        owners = [rank for rank in range(self._owners.count) if cut.num_bytes(rank)]
        return [partial(self._broadcast, _bytes(cut.part(rank)), rank) for rank in owners]

    def _broadcast(self, bytes_R: Tensor, rank: int) -> Any:
        options = BroadcastOptions()
        options.rootRank = rank
        return self._among_owners.broadcast([bytes_R], options)

    def _copy_parts(
        self, cuts: Sequence[Cut], counts: Sequence[Sequence[int]], bytes_R: Tensor, rank: int, *, out: bool
    ) -> None:
        sizes = [size for size in counts[rank] if size]
        parts = [_bytes(cut.part(rank)) for cut, size in zip(cuts, counts[rank], strict=True) if size]
        pieces = bytes_R[: sum(sizes)].split(sizes)
        pairs = list(zip(*((pieces, parts) if out else (parts, pieces)), strict=True))
        for target, source in pairs:
            if source.nbytes >= LARGE_COPY_BYTES:
                target.copy_(source)
        small = [pair for pair in pairs if pair[1].nbytes < LARGE_COPY_BYTES]
        if small:  # few launches: a bucket has the scales and norms of all layers
            torch._foreach_copy_([target for target, _ in small], [source for _, source in small])

    def sum(self, values_N: Tensor, phase: str) -> Tensor:
        return self._all_gather(values_N.double(), phase).sum(0)

    def maximum(self, values: Tensor, phase: str) -> Tensor:
        return reduce(torch.maximum, self._all_gather(values, phase).unbind())

    def gather(self, values_N: Tensor, phase: str) -> list[Tensor]:
        counts = self._all_gather(torch.tensor([values_N.numel()]), phase).flatten().tolist()
        padded_N = values_N.new_zeros(max(counts))
        padded_N[: values_N.numel()] = values_N
        return [row_N[:count] for row_N, count in zip(self._all_gather(padded_N, phase), counts, strict=True)]

    def gather_records(self, record: Any, phase: str) -> list[Any]:
        text = torch.tensor(list(json.dumps(record).encode()), dtype=torch.uint8)
        return [json.loads(bytes(one.tolist())) for one in self.gather(text, phase)]

    def agree(self, error: str | None, phase: str) -> str | None:
        return next((one for one in self.gather_records(error, phase) if one is not None), None)

    def link_speed(self) -> float:
        """Measured by the fastest of a few all-gathers in place. Their memory is freed."""
        each = LINK_BYTES[self._device.type] // self.share.count
        all_B = torch.zeros(each * self.share.count, dtype=torch.uint8, device=self._device)
        own_B = all_B[each * self.share.rank :][:each]
        exchange = partial(self._collectives._allgather_base, all_B, own_B)
        seconds = min(self._seconds_of(exchange, "link") for _ in range(LINK_ROUNDS))
        if self._device.type == "cuda":
            del all_B, own_B, exchange
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
        return each * (self.share.count - 1) / 1e9 / seconds

    def _seconds_of(self, start: Callable[[], Work], phase: str) -> float:
        """The seconds of a collective; on a GPU by the GPU's clock, because `_poll` notices the end up to a millisecond
        late."""
        if self._device.type != "cuda":
            began = time.perf_counter()
            self._finish(start, phase)
            return time.perf_counter() - began
        stream = torch.cuda.current_stream(self._device)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record(stream)
        running = self._start(start, phase)
        running.work.wait()  # the stream goes on after it
        last.record(stream)
        self._complete(running)
        last.synchronize()
        return first.elapsed_time(last) / 1e3

    def _all_gather(self, values: Tensor, phase: str) -> Tensor:
        """[C, ...] on the device of `values`: those of all workers, of one shape and dtype."""
        if not values.numel():
            return values.new_empty(self.share.count, *values.shape)
        bytes_B = values.to(self._device).contiguous().view(-1).view(torch.uint8)
        all_CB = bytes_B.new_empty(self.share.count, bytes_B.numel())
        self._finish(lambda: self._collectives._allgather_base(all_CB.view(-1), bytes_B), phase)
        return all_CB.view(values.dtype).view(self.share.count, *values.shape).to(values.device)

    def _finish(self, start: Callable[[], Work], phase: str) -> None:
        """Run a collective to its end. PeersLost names the phase if it fails or takes longer than the deadline."""
        self._complete(self._start(start, phase))

    def _start(self, start: Callable[[], Work], phase: str) -> Running:
        began = time.monotonic()
        try:
            return Running(start(), began, phase)
        except RuntimeError as error:
            raise self._lost(phase, time.monotonic() - began, error) from error

    def _complete(self, running: Running) -> None:
        try:
            if self._device.type == "cuda":
                self._poll(running)  # NCCL's `wait` does not wait on the host
            running.work.wait(timedelta(seconds=self._deadline_seconds))
        except PeersLost:
            raise
        except RuntimeError as error:
            raise self._lost(running.phase, time.monotonic() - running.began, error) from error

    def _poll(self, running: Running) -> None:
        pause = 1e-5
        while not running.work.is_completed():
            if time.monotonic() - running.began > self._deadline_seconds:
                raise self._lost(running.phase, self._deadline_seconds, None)
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_POLL_SECONDS)

    def _lost(self, phase: str, seconds: float, error: RuntimeError | None) -> PeersLost:
        why = "another worker has stalled or ended" if error is None else _first_line(error)
        me = f"worker {self.share.rank} of {self.share.count}"
        return PeersLost(f"{me}, phase '{phase}': no answer from the other workers after {seconds:.1f} s: {why}")

    def close(self) -> None:
        if self._across_groups is not None:
            self._across_groups.shutdown()
            self._among_owners.shutdown()
        self._collectives.shutdown()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
