"""Which worker draws which siblings, and which runs which micro-batch.

Work goes to the worker that has the least of it and has room. The longest expected requests go first, and what finds no
room stays here until a worker has some. Work is counted in expected tokens, not in requests.

A request's siblings share the prefill of their prompt, so they stay together where that keeps no worker waiting: a
worker takes as many of them as bring it to an equal share of all work. A later turn of a conversation goes back to the
worker that drew the turn before, which may still have its pages, where that worker has room.

A sibling's tokens do not depend on the worker (engine.py). All of this changes the time, never the result. An answer
may therefore move: `move` gives what a worker has not finished to another one, with the tokens that it has.

**Micro-batches.** The packing plan follows from the recipe and the batch alone, so any number of workers runs the same
micro-batches. Here they are only dealt out: the most expensive first, each to the worker with the least cost so far. A
micro-batch's cost is linear in its tokens for GEMMs and quadratic in each sequence's for attention. A token of a
mixture costs the experts that it passes through. An optimizer step is dealt by itself, because all workers meet at its
end.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from octetrl.config.cluster import ClusterConfig
from octetrl.config.memory import TOKEN_BLOCK
from octetrl.records import GenerationRequest, MicroBatch, PackedBatch, SharedBy
from octetrl.shapes.model_cuts import SHARING, sharing_sizes
from octetrl.shapes.spec import ModelSpec, pair_products, token_weights

DRAWN_KEPT = 1 << 16  # turns whose worker is remembered; a server's session has no end
EXCHANGES = 1.03  # cost of a shared micro-batch, relative to the same without exchanges; a formula's, not measured
UNKNOWN_SHARE = 0.5  # of max_new_tokens, where a request's length is not known
Said = tuple[Sequence[int], Sequence[float]]  # tokens of an unfinished answer and their log-probs


@dataclass(frozen=True, slots=True)
class Room:
    """What a worker's open session holds."""

    sequences: int  # decoded together
    tokens: int  # of its KV cache
    pages: int = 0


@dataclass(frozen=True, slots=True)
class RequestPiece:
    """Siblings of one request for one worker. Its `request` has an id of its own."""

    worker: int
    request: GenerationRequest
    of: str  # id of the whole request


@dataclass(slots=True)
class _Waiting:
    """A request whose last `left` siblings have no worker yet."""

    request: GenerationRequest
    left: int

    @property
    def next_sibling(self) -> int:
        return self.request.first_sibling + self.request.num_siblings - self.left


@dataclass(slots=True)
class _Running:
    piece: RequestPiece
    left: int
    tokens: float  # expected, of one sibling


@dataclass(slots=True)
class _Load:
    """The work that one worker has."""

    sequences: int = 0
    tokens: float = 0.0
    pieces: dict[str, _Running] = field(default_factory=dict)


class Assignment:
    """Who samples what, in one open session of all workers."""

    def __init__(self, rooms: Sequence[Room]) -> None:
        self._rooms = tuple(rooms)
        self._loads = [_Load() for _ in rooms]
        self._waiting: list[_Waiting] = []
        self._unfinished: dict[str, int] = {}  # siblings of each request
        self._drawn_by: dict[tuple[str, int], int] = {}  # worker that drew a request's sibling
        self._closed: set[int] = set()  # workers that get no work any more

    @property
    def has_work(self) -> bool:
        return bool(self._unfinished)

    @property
    def num_waiting(self) -> int:
        """Siblings that have no worker yet."""
        return sum(waiting.left for waiting in self._waiting)

    def knows(self, request_id: str) -> bool:
        return request_id in self._unfinished

    @property
    def unfinished(self) -> list[str]:
        """Ids of the requests with unfinished siblings."""
        return list(self._unfinished)

    def busy(self, worker: int) -> bool:
        return bool(self._loads[worker].pieces)

    def add(self, request: GenerationRequest) -> None:
        self._waiting.append(_Waiting(request, request.num_siblings))
        self._unfinished[request.id] = request.num_siblings

    def give(self) -> Iterator[RequestPiece]:
        """The pieces that workers have room for now."""
        self._waiting.sort(key=lambda waiting: _longest_first(waiting.request))
        unplaced: list[_Waiting] = []
        queue, self._waiting = self._waiting, unplaced
        ahead = sum(waiting.left * expected_tokens(waiting.request) for waiting in queue)
        for waiting in queue:
            each = expected_tokens(waiting.request)
            while waiting.left:
                worker = self._worker_for(waiting.request)
                if worker is None:
                    unplaced.append(waiting)
                    break
                fair = (sum(load.tokens for load in self._loads) + ahead) / len(self._loads)
                share = math.floor((fair - self._loads[worker].tokens) / each + 1e-9)
                count = min(waiting.left, max(1, share), self._rooms[worker].sequences)
                yield self._place(waiting, worker, count, each)
                ahead -= count * each

    def _worker_for(self, request: GenerationRequest) -> int | None:
        open_to = [worker for worker in range(len(self._rooms)) if self._has_room(worker)]
        if request.continues is not None:
            drew = self._drawn_by.get(request.continues)
            if drew in open_to:
                return drew
        return min(open_to, key=lambda worker: (self._loads[worker].tokens, worker), default=None)

    def _has_room(self, worker: int) -> bool:
        load, room = self._loads[worker], self._rooms[worker]
        if worker in self._closed:
            return False
        return load.sequences == 0 or (load.sequences < room.sequences and load.tokens < room.tokens)

    def _place(self, waiting: _Waiting, worker: int, count: int, each: float) -> RequestPiece:
        whole, first = waiting.request, waiting.next_sibling
        request = replace(whole, id=f"{whole.id}#{first}", first_sibling=first, num_siblings=count)
        piece = RequestPiece(worker, request, whole.id)
        waiting.left -= count
        load = self._loads[worker]
        load.pieces[request.id] = _Running(piece, count, each)
        load.sequences += count
        load.tokens += count * each
        return piece

    def finish(self, worker: int, piece_id: str, sibling: int) -> None:
        """Counts a sibling of a piece as drawn."""
        load = self._loads[worker]
        running = load.pieces[piece_id]
        running.left -= 1
        load.sequences -= 1
        load.tokens -= running.tokens
        if not running.left:
            del load.pieces[piece_id]
        whole = running.piece.of
        self._drawn_by[whole, sibling] = worker
        if len(self._drawn_by) > DRAWN_KEPT:
            del self._drawn_by[next(iter(self._drawn_by))]
        self._unfinished[whole] -= 1
        if not self._unfinished[whole]:
            del self._unfinished[whole]

    def sequences_of(self, worker: int) -> int:
        """Unfinished siblings that the worker has."""
        return self._loads[worker].sequences

    @property
    def tail_tokens(self) -> float:
        """The expected tokens of all siblings that workers have, prompts included. The last to end are long: each is
        expected to have as many tokens as one of unknown length, or more."""
        running = [one for load in self._loads for one in load.pieces.values()]
        unknown = [(one, replace(one.piece.request, expected_tokens=None)) for one in running]
        return sum(one.left * max(one.tokens, expected_tokens(request)) for one, request in unknown)

    def close(self, worker: int) -> None:
        """The worker gets no work any more."""
        self._closed.add(worker)

    def move(self, worker: int, to: int, answers: Mapping[tuple[str, int], Said]) -> list[RequestPiece]:
        """Gives the unfinished siblings of a worker to another one. Returns the pieces to submit there. `answers`: what
        each has said so far, by the piece's id and sibling. A piece of which it has none has not begun."""
        pieces = []
        load, target = self._loads[worker], self._loads[to]
        moved, load.pieces = load.pieces, {}
        load.sequences, load.tokens = 0, 0.0
        for piece_id, running in moved.items():
            whole = running.piece.request
            begun = [sibling for name, sibling in answers if name == piece_id]
            unfinished = begun or range(whole.first_sibling, whole.first_sibling + whole.num_siblings)
            assert len(unfinished) == running.left, f"{piece_id}: {running.left} siblings are unfinished"
            for sibling in unfinished:
                token_ids, logprobs = answers.get((piece_id, sibling), whole.said)
                request = replace(
                    whole,
                    id=f"{running.piece.of}#{sibling}>{to}",
                    first_sibling=sibling,
                    num_siblings=1,
                    said=(tuple(token_ids), tuple(logprobs)),
                )
                piece = RequestPiece(to, request, running.piece.of)
                target.pieces[request.id] = _Running(piece, 1, running.tokens)
                target.sequences += 1
                target.tokens += running.tokens
                pieces.append(piece)
        return pieces

    def request_of(self, worker: int, piece_id: str) -> str | None:
        """Id of the whole request; None if it was cancelled."""
        running = self._loads[worker].pieces.get(piece_id)
        return None if running is None else running.piece.of

    def cancel(self, request_id: str) -> list[RequestPiece]:
        """Forgets a request; its pieces that a worker has."""
        if self._unfinished.pop(request_id, None) is None:
            return []
        self._waiting = [waiting for waiting in self._waiting if waiting.request.id != request_id]
        dropped = []
        for load in self._loads:
            for running in [running for running in load.pieces.values() if running.piece.of == request_id]:
                del load.pieces[running.piece.request.id]
                load.sequences -= running.left
                load.tokens -= running.left * running.tokens
                dropped.append(running.piece)
        return dropped


def expected_tokens(request: GenerationRequest) -> float:
    """The expected tokens of one sibling, prompt and answer."""
    answer = request.expected_tokens
    if answer is None:
        answer = int(request.sampling.max_new_tokens * UNKNOWN_SHARE)
    return len(request.prompt_token_ids) + max(1, answer)


def _longest_first(request: GenerationRequest) -> float:
    """Requests of unknown length go first: they may be long."""
    return -math.inf if request.expected_tokens is None else -request.expected_tokens


@dataclass(frozen=True, slots=True)
class Costs:
    """What a micro-batch costs: multiplications for one token in all matrices of its layers, and for one pair of tokens
    of a sequence in attention. Both are the forward's in ordinary attention (scores and values, half of them masked).
    Latent attention counts for as many as its forward and backward take, at two of seven products forward."""

    token: float
    pair: float
    groups: tuple[int, ...] = (1,)  # numbers of workers that may share a micro-batch, ascending

    @classmethod
    def of(cls, spec: ModelSpec, cluster: ClusterConfig | None = None) -> Costs:
        """`cluster`: of a run whose workers may share a micro-batch."""
        groups = (1,) if cluster is None else _groups(spec, cluster)
        return cls(float(token_weights(spec)), pair_products(spec).computed / 7, groups)

    def micro_batch(self, micro_batch: MicroBatch) -> float:
        lengths_B = micro_batch.cu_seqlens_B1.diff().double()
        return float(self.token * lengths_B.sum() + self.pair * lengths_B.square().sum())


def _groups(spec: ModelSpec, cluster: ClusterConfig) -> tuple[int, ...]:
    """By `cluster.context_parallel`. With `auto` a group stays on one machine, if the recipe says how large that is."""
    if cluster.context_parallel != "auto":
        return (cluster.micro_batch_workers,)
    here = (cluster.per_node or 0) * cluster.workers_per_gpu or max(SHARING)
    most = min(here & -here, cluster.num_trainers)
    return 1, *(size for size in sharing_sizes(spec) if size <= most)


def deal(batch: PackedBatch, workers: int, costs: Costs) -> list[PackedBatch]:
    """The part of each worker: the micro-batches that it shares, largest groups first, then its own in their order;
    with the whole batch's denominators."""
    parts: list[list[tuple[MicroBatch, ...]]] = [[] for _ in range(workers)]
    for minibatch in batch.minibatches:
        tokens = [one.token_ids_T.numel() for one in minibatch]
        places = placed([costs.micro_batch(one) for one in minibatch], tokens, workers, costs.groups)
        in_order = sorted(zip(minibatch, places, strict=True), key=lambda pair: -pair[1].size)
        for worker, part in enumerate(parts):
            part.append(tuple(_part_of(one, place, worker) for one, place in in_order if place.has(worker)))
    return [replace(batch, minibatches=tuple(part)) for part in parts]


class WorkerPlace(NamedTuple):
    """The workers that run a micro-batch: `size` of them from `first` on."""

    first: int
    size: int = 1

    def has(self, worker: int) -> bool:
        return self.first <= worker < self.first + self.size


def placed(
    costs: Sequence[float], tokens: Sequence[int], workers: int, groups: Sequence[int] = (1,)
) -> list[WorkerPlace]:
    """The workers of each micro-batch. A costly one goes to the smallest group that brings it below half of a fair
    share; groups begin at multiples of their size. `groups`: their sizes, ascending. If 1 is one of them, groups are
    formed only where the last worker ends earlier."""
    alone = [WorkerPlace(owner) for owner in shared_out(costs, workers)]
    if groups == (1,):
        return alone
    half, count = sum(costs) / workers / 2, len(costs)
    sizes = [_group_size(*each, half, groups) for each in zip(costs, tokens, strict=True)]
    places, loads = list(alone), [0.0] * workers
    for item in sorted(range(count), key=lambda item: (-sizes[item], -costs[item], item)):
        size = sizes[item]
        starts = range(0, workers - size + 1, size)
        first = min(starts, key=lambda start: (max(loads[start : start + size]), start))
        end = max(loads[first : first + size]) + costs[item] / size * (1.0 if size == 1 else EXCHANGES)
        loads[first : first + size] = [end] * size
        places[item] = WorkerPlace(first, size)
    plain = [sum(cost for cost, place in zip(costs, alone, strict=True) if place.first == at) for at in range(workers)]
    return alone if 1 in groups and max(plain) <= max(loads) else places


def _group_size(cost: float, tokens: int, half: float, groups: Sequence[int]) -> int:
    """Each worker of the group gets a block of tokens at least."""
    size = next((size for size in groups if cost / size <= half), groups[-1])
    while size > blocks_of(tokens):
        size //= 2
    return size


def _part_of(micro_batch: MicroBatch, place: WorkerPlace, worker: int) -> MicroBatch:
    if place.size == 1:
        return micro_batch
    tokens = micro_batch.token_ids_T.numel()
    blocks = blocks_of(tokens)
    rows = [min(TOKEN_BLOCK * (blocks * rank // place.size), tokens) for rank in range(place.size + 1)]
    trained = torch.searchsorted(micro_batch.predictor_N, torch.tensor(rows)).tolist()
    shared = SharedBy(place.first, tuple(rows), tuple(trained))
    return replace(micro_batch, shared=shared, reports=worker == place.first)


def blocks_of(tokens: int) -> int:
    return -(-tokens // TOKEN_BLOCK)


def shared_out(costs: Sequence[float], workers: int, loads: Sequence[float] | None = None) -> list[int]:
    """The worker of each item: the most expensive first, each to the worker with the least so far. `loads`: what each
    has already; None: nothing."""
    owners, loads = [0] * len(costs), [0.0] * workers if loads is None else list(loads)
    for item in sorted(range(len(costs)), key=lambda item: (-costs[item], item)):
        owner = min(range(workers), key=lambda worker: (loads[worker], worker))
        owners[item] = owner
        loads[owner] += costs[item]
    return owners
