"""Gradient sums: where a parameter's gradient goes when autograd has finished it.

A hook on each parameter passes its gradient on and frees it, micro-batch by micro-batch. Sums are float32, or BF16 with
stochastic rounding (below). The optimizer reads the rows that its worker owns (trainer/shards.py). With
several workers there are two ways to add their gradients:

    local     a worker sums whole gradients; `finish` adds the sums of all workers, once an optimizer step
    sharded   a worker sums only the rows that it owns; each micro-batch's gradients are added over all workers during
              its backward, a layer at a time

`local` takes 4 bytes a parameter (BF16: 2) on every worker, `sharded` only for its own rows. `sharded` exchanges the
gradients of every micro-batch. All workers must then end the same number of micro-batches: one without adds zeros.

**Gradient rounding.** BF16 gradient sums (`trainer.gradients: bfloat16`): how a contribution is added, and the error
that this makes.

Each addition rounds stochastically (kernels/optimizer/add_gradient_rounded.py). A compensated sum would need a second
BF16 number for each weight, as much memory as float32. Error of the sum, relative to it, of M micro-batches' gradients
with a common part and 4 times, or a tenth, as much noise of their own (tests/unit/trainer/test_gradient_rounding.py):

    M                               4        16       64       256      1,024
    stochastic, either kind         0.3%     0.6%     1.1%     2.2%     4.3%
    to nearest, mostly noise        0.3%     0.5%     0.8%     1.5%     6.0%
    to nearest, nearly equal        0.2%     0.4%     1.3%     7.2%     60%

To nearest, small contributions to a large sum are lost, all in one direction. Stochastic rounding has no bias, so that
its errors average out over steps.

The random bits of an addition depend only on seed, optimizer step, worker, parameter, the number of the addition within
the step, and the element's number in the whole parameter. The same number of workers repeats its bits, also after a
resume. Workers that sum whole gradients draw different bits, so that their errors do not add up.

**Stochastic rounding.** Rounds float32 to BF16 stochastically: up with a probability equal to the fraction cut off. The
mean is exact.

BF16 numbers near 1 are 1/128 apart. Rounding to nearest loses an update of 1e-6 every time; stochastic rounding applies
it in one of some thousand steps. BF16 is the upper half of a float32. The method adds 16 random bits to the lower half
and cuts it off (Gupta et al., arXiv 1502.02551). Values that BF16 represents exactly, infinities and NaN do not change.
Narrow moments of the optimizer are rounded in the same way (kernels/optimizer/adamw.py).

The random bits depend only on (seed, step, name) and the number of the element in its tensor. Nothing has to be saved,
and a resumed run rounds like an uninterrupted one. CPU and GPU use the same bits.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from statistics import fmean

import torch
from torch import Tensor, nn

from octetrl.kernels.optimizer.adamw import chance_noise, round_by_chance
from octetrl.kernels.optimizer.add_gradient import add_gradient
from octetrl.kernels.optimizer.add_gradient_rounded import add_gradient_rounded
from octetrl.kernels.profiler_parts import part
from octetrl.trainer.peers import Peers
from octetrl.trainer.shards import Cut, Rows, buckets

PHASE = "gradient sums"


class GradientSums(ABC):
    """Sums of the gradients of some parameters since `zero`.

    `owned[name]` has the rows of a parameter that this worker owns, for all parameters. Read it after `finish`.
    """

    owned: Mapping[str, Tensor]

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rows: Sequence[tuple[Rows, ...]],
        peers: Peers,
        rounding: GradientRounding | None = None,
    ) -> None:
        """`rows`: the rows of each worker, for each parameter. `rounding`: of BF16 sums; None: they are float32."""
        self._peers, self._rank, self.rounding = peers, peers.owners.rank, rounding
        self._is_counted = peers.share.rank < peers.owners.count  # else the first group owns the same rows
        self._dtype = torch.float32 if rounding is None else rounding.dtype
        self._rows = dict(zip(parameters, rows, strict=True))
        self._found: set[str] | None = None  # of `inspect`
        self.on_micro_batch: Callable[[], None] | None = None  # called when one has ended, to show progress
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(self._receiver(name))

    def _receiver(self, name: str) -> Callable[[Tensor], None]:
        def receive(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if self._found is None:
                with part("gradients"):
                    self._add(name, parameter.grad)
            elif not parameter.grad.isfinite().all():
                self._found.add(name)
            parameter.grad = None

        return receive

    @abstractmethod
    def _add(self, name: str, gradient: Tensor) -> None:
        """Take the gradient of one parameter and one micro-batch, [rows, ...] in any dtype."""

    def end_micro_batch(self) -> None:
        """Call it after the backward of each micro-batch."""
        self._end_micro_batch()
        if self.on_micro_batch is not None:
            self.on_micro_batch()

    @abstractmethod
    def _end_micro_batch(self) -> None: ...

    @abstractmethod
    def finish(self) -> None:
        """Add the sums of all workers. Call it once, before the optimizer reads `owned`."""

    def scale(self, factor: float) -> None:
        """Multiply the sums by `factor`, before `finish`. All workers do so."""
        assert self.rounding is None, "BF16 sums would be rounded once more"
        torch._foreach_mul_(list(self._own_sums), factor)

    @property
    @abstractmethod
    def _own_sums(self) -> Collection[Tensor]:
        """What this worker has added up."""

    def zero(self, step: int = 0) -> None:
        """Begin a new sum, of this optimizer step."""
        if self.rounding is not None:
            self.rounding.begin(step)
        self._zero()

    def _zero(self) -> None:
        torch._foreach_zero_(list(self._own_sums))

    @contextmanager
    def inspect(self) -> Iterator[list[str]]:
        """Within, gradients are checked instead of summed, without other workers.

        Yields a list that has, afterwards, the names of parameters with non-finite gradients, in the model's order.
        """
        names: list[str] = []
        self._found = set()
        try:
            yield names
        finally:
            names += [name for name in self._rows if name in self._found]
            self._found = None


class LocalGradients(GradientSums):
    """Whole sums on every worker, added over the workers at the end."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rows: Sequence[tuple[Rows, ...]],
        peers: Peers,
        rounding: GradientRounding | None = None,
    ) -> None:
        super().__init__(parameters, rows, peers, rounding)
        self._sums = {name: torch.zeros_like(one, dtype=self._dtype) for name, one in parameters.items()}
        self.owned = {name: cut[self._rank].of(self._sums[name]) for name, cut in self._rows.items()}

    def _add(self, name: str, gradient: Tensor) -> None:
        if self.rounding is None:
            add_gradient(self._sums[name], gradient)
        else:
            self.rounding.add(self._sums[name], gradient, name, worker=str(self._peers.share.rank))

    def _end_micro_batch(self) -> None:
        pass

    def finish(self) -> None:
        if self._peers.share.count == 1:
            return
        names = {self._sums[name].data_ptr(): name for name in self._rows}
        for bucket in buckets([Cut(self._sums[name], rows) for name, rows in self._rows.items()]):
            for cut, total in zip(bucket, self._peers.sum_to_owners(bucket, PHASE), strict=True):
                own = cut.part(self._rank)
                if self.rounding is None:
                    own.copy_(total)
                else:  # other random bits than those of this worker's micro-batches
                    name, first = f"{names[cut.tensor.data_ptr()]}/all workers", int(own.storage_offset())
                    self.rounding.add(
                        own.zero_(), total, name, first=first, worker=str(self._rank), is_counted=self._is_counted
                    )

    @property
    def _own_sums(self) -> Collection[Tensor]:
        return self._sums.values()


class ShardedGradients(GradientSums):
    """Sums of the owned rows only. The gradients of a layer leave when all of them have come.

    Layers leave in the order of the backward, from the last to the first, on every worker.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        rows: Sequence[tuple[Rows, ...]],
        peers: Peers,
        rounding: GradientRounding | None = None,
    ) -> None:
        super().__init__(parameters, rows, peers, rounding)
        self._parameters = parameters
        self.owned = {}
        for name, one in parameters.items():  # some have no memory of their own
            start, stop = self._rows[name][self._rank]
            self.owned[name] = torch.zeros(stop - start, *one.shape[1:], dtype=self._dtype, device=one.device)
        layers = groupby(reversed(list(parameters)), key=lambda name: name.split(".")[:2])
        self._layers = [list(names) for _, names in layers]
        self._waiting: dict[str, Tensor] = {}
        self._next = 0  # of the layers, in this micro-batch

    def _add(self, name: str, gradient: Tensor) -> None:
        assert name not in self._waiting, f"'{name}' has two gradients in one micro-batch"
        self._waiting[name] = gradient
        while self._next < len(self._layers) and all(one in self._waiting for one in self._layers[self._next]):
            self._send_layer()

    def _end_micro_batch(self) -> None:
        while self._next < len(self._layers):
            self._send_layer()
        self._next = 0

    def _send_layer(self) -> None:
        names = self._layers[self._next]
        gradients = [self._waiting.pop(name, None) for name in names]
        cuts, owner = [], dict[int, str]()
        for name, gradient in zip(names, gradients, strict=True):
            whole = torch.zeros_like(self._parameters[name]) if gradient is None else gradient.contiguous()
            owner[whole.data_ptr()] = name
            cuts.append(Cut(whole, self._rows[name]))
        for bucket in buckets(cuts):
            for cut, total in zip(bucket, self._peers.sum_to_owners(bucket, PHASE), strict=True):
                name = owner[cut.tensor.data_ptr()]
                first = self._rows[name][self._rank].start
                start, stop = cut.rows[self._rank]
                own = self.owned[name][start - first : stop - first]
                if self.rounding is None:
                    own += total
                else:
                    first = start * cut.tensor[:1].numel()
                    self.rounding.add(own, total, name, first=first, is_counted=self._is_counted)
        self._next += 1

    def finish(self) -> None:
        assert not self._waiting and self._next == 0, "`end_micro_batch` comes before `finish`"

    @property
    def _own_sums(self) -> Collection[Tensor]:
        return self.owned.values()


def gradient_sums(
    parameters: Mapping[str, nn.Parameter],
    rows: Sequence[tuple[Rows, ...]],
    peers: Peers,
    rounding: GradientRounding | None = None,
) -> GradientSums:
    """The sums in the mode `peers.gradients`. With one worker both modes are the same."""
    if peers.gradients == "local" or peers.share.count == 1:
        return LocalGradients(parameters, rows, peers, rounding)
    return ShardedGradients(parameters, rows, peers, rounding)


class GradientRounding:
    """Rounds the BF16 sums of one optimizer at random."""

    dtype = torch.bfloat16

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed, self._step = seed, 0
        self._additions: Counter[str] = Counter()  # of each parameter in this optimizer step
        self._squared_error = torch.zeros((), dtype=torch.float64, device=device)
        self._norms: list[Tensor] = []  # of error and gradient [2], of the optimizer steps since `take_metrics`

    def begin(self, step: int) -> None:
        """A new sum. `step`: number of the optimizer step."""
        self._step = step
        self._additions.clear()
        self._squared_error.zero_()

    def add(
        self, sum_: Tensor, gradient: Tensor, name: str, *, first: int = 0, worker: str = "", is_counted: bool = True
    ) -> None:
        """Add to the sum of parameter `name`, or of a part whose first element has number `first`. `worker`: whose
        random bits; "" if an element has the same on all. `is_counted` false: another worker counts the same error."""
        part = f"{name}/{first}"
        self._additions[part] += 1
        label = f"gradient/{worker}/{name}/{self._additions[part]}"
        key = chance_key(seed=self._seed, step=self._step, name=label)
        error = self._squared_error if is_counted else torch.zeros_like(self._squared_error)
        add_gradient_rounded(sum_, gradient, error, key=key, first=first)

    def end(self, norm: Tensor, peers: Peers) -> None:
        """The sums are complete. norm: of the whole gradient."""
        squared = peers.sum(self._squared_error.reshape(1), "gradient error")[0]
        self._norms.append(torch.stack([squared.sqrt(), norm.double()]))

    def take_metrics(self) -> dict[str, float]:
        """`gradients/rounding_error`: expected norm of the error over the norm of the gradient, the mean of the
        optimizer steps since the last call whose gradient is not 0."""
        norms, self._norms = self._norms, []
        errors = [error / gradient for error, gradient in (both.tolist() for both in norms) if gradient != 0]
        return {"gradients/rounding_error": fmean(errors)} if errors else {}


def chance_key(*, seed: int, step: int, name: str) -> int:
    """A number of 31 bits for one update of one tensor. `name` identifies the tensor."""
    digest = hashlib.sha256(f"{seed}/{step}/{name}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1


def round_stochastically(value: Tensor, *, key: int, first: int = 0) -> Tensor:
    """BF16 tensor of the shape of `value`, float32 on a CPU. On a GPU the kernel of the update rounds.

    `key`: of `chance_key`. `first`: number of the first element in the whole tensor, if `value` is a part of it.
    """
    assert value.dtype == torch.float32, f"stochastic rounding takes float32, got {value.dtype}"
    noise, _, _ = chance_noise(key, first, value.numel())
    return round_by_chance(value.contiguous(), noise.view(value.shape))
