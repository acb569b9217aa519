"""AdamW over gradient sums, for weights of any dtype.

- **Gradients** are summed over micro-batches in float32, or in BF16 (gradients.py).
- **Master weights**: `float32` keeps a float32 copy of each BF16 weight, updates the copy and rounds it to nearest into
  the weight. `stochastic_rounding` keeps no copy, which saves 4 bytes a parameter: the weight is widened to float32,
  updated and rounded stochastically. A float32 weight is its own master.
- **Moments** are float32, bfloat16 or 8bit (optimizer_states.py). They are on the device, or with `offload` in the
  host's memory (optimizer_states.py). On a CPU `offload` changes nothing.
- **Weight decay** applies to linears. `weight_decay_on` adds the embedding, or everything. By default vectors (norms,
  biases) and the embedding, tied or not, do not decay.
- **Shards**: one of several workers updates only the rows that it owns (shards.py). With the same clip factor, all
  workers together compute the bits that one worker would.

The update is kernels/optimizer/adamw.py, one pass a parameter, on a GPU, and on a CPU if the moments are narrow. On a
CPU with float32 moments it is torch's own fused AdamW, in buckets that keep temporaries small. Weights change in place:
the engine reads the same tensors.

**Schedule.** The learning rate as a pure function of the run's step. A resumed run needs no state for it.

    warm-up   lr * (step + 1) / warmup_steps          the first step already has a positive rate
    after     lr * (min + (1 - min) * f(progress))    progress from 0 after the warm-up to 1 at the end
              f = 1 (constant), 1 - progress (linear), (1 + cos(pi * progress)) / 2 (cosine)

The end is the last step: its rate is lr * min_lr_fraction. If min_lr_fraction is 0, the end is one step later, because
an update with the rate 0 would change nothing. Steps without an update count too. `constant` ignores min_lr_fraction.
The only step of a run has the rate lr.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw as torch_adamw

from octetrl.config.schema import OptimizerConfig
from octetrl.kernels.optimizer.adamw import STATE_BLOCK, AdamScalars, Moment, adamw
from octetrl.records import PackedBatch
from octetrl.system.errors import UserError
from octetrl.trainer.gradients import GradientRounding, chance_key, gradient_sums, round_stochastically
from octetrl.trainer.optimizer_states import (
    HostMemory,
    OffloadStream,
    StatePiece,
    aligned,
    check_format,
    meta_moment,
    named_tensors,
    pieces_of,
    zero_moment,
)
from octetrl.trainer.peers import ALONE, Peers
from octetrl.trainer.shards import BLOCK_ROWS, Rows, cut_rows

NORM_PART = 1 << 20  # elements that are copied to float64 at a time
BUCKET_ELEMENTS = 1 << 26
GradientFormat = Literal["float32", "bfloat16"]  # of the sums, `trainer.gradients`


@dataclass(frozen=True, slots=True)
class Slot:
    """The owned rows of one parameter with what belongs to them. The master is float32."""

    name: str
    parameter: nn.Parameter  # whole
    rows: Rows  # the owned ones
    weight: Tensor  # these rows: a view of the parameter, or their only copy
    first: int  # number of their first element in the whole parameter
    gradient: Tensor
    exp_avg: Moment
    exp_avg_sq: Moment
    master: Tensor | None  # the weight itself if it is float32; None: the weight is rounded stochastically
    decays: bool

    @property
    def has_own_master(self) -> bool:
        return self.master is not None and self.master.data_ptr() != self.weight.data_ptr()


class Optimizer:
    """Updates the rows that this worker owns. Build it after the weights are loaded: the masters are copied from them.

    `rows[name]`: the rows of each worker (`owned_rows`). `copied[name]`: the owned rows of a parameter whose whole
    tensor has no memory (trainer/shared_weights.py). Tensor-parallel workers have different rows of the parameters
    `cut`, and all others whole. `units`: rows of a block of some parameters, if not 128.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        seed: int = 0,
        peers: Peers = ALONE,
        copied: Mapping[str, Tensor] | None = None,
        cut: Collection[str] = (),
        units: Mapping[str, int] | None = None,
        gradients: GradientFormat = "float32",
    ) -> None:
        self.config, self.seed, self.step_count = config, seed, 0
        self.parameters, self._peers, self._cut = dict(named_parameters), peers, cut
        named, share = self.parameters, peers.owners
        self.rows = owned_rows(named, share.count, units or {})
        self._device = next(iter(named.values())).device if named else torch.device("cpu")
        rounding = GradientRounding(seed, self._device) if gradients == "bfloat16" else None
        self.gradients = gradient_sums(named, list(self.rows.values()), peers, rounding)
        owned = [(name, rows[share.rank]) for name, rows in self.rows.items()]
        owned = [(name, own) for name, own in owned if own.stop > own.start]
        on_host = config.offload and self._device.type == "cuda"
        copied = copied or {}
        weights = [copied[name] if name in copied else own.of(named[name].detach()) for name, own in owned]
        self._host = self._host_memory(weights) if on_host else None
        self.slots = tuple(self._slot(*one, weight) for one, weight in zip(owned, weights, strict=True))
        self._buckets = tuple(_buckets(self.slots))
        self._clip: Tensor | None = None  # the next step multiplies gradients by it; None: by 1
        self._pieces = [piece for slot in self.slots for piece in _pieces(slot)] if self._host is not None else []
        self._stream = OffloadStream(self._pieces, self._device) if self._pieces else None

    def _host_memory(self, weights: Iterable[Tensor]) -> HostMemory:
        num_bytes = 0
        for weight in weights:
            moment = meta_moment(weight, self.config.states)
            num_bytes += 2 * sum(aligned(tensor.nbytes) for tensor in moment if tensor is not None)
            if weight.dtype != torch.float32 and self.config.master == "float32":
                num_bytes += aligned(4 * weight.numel())
        return HostMemory(num_bytes, self._device)

    def _slot(self, name: str, own: Rows, weight: Tensor) -> Slot:
        parameter = self.parameters[name]
        return Slot(
            name,
            parameter,
            own,
            weight,
            own.start * prod(parameter.shape[1:]),
            self.gradients.owned[name],
            exp_avg=zero_moment(weight, self.config.states, self._host),
            exp_avg_sq=zero_moment(weight, self.config.states, self._host),
            master=self._master(weight),
            decays=_decays(name, parameter, self.config.weight_decay_on),
        )

    def _master(self, weight: Tensor) -> Tensor | None:
        if weight.dtype == torch.float32:
            return weight
        if self.config.master != "float32":
            return None
        if self._host is None:
            return weight.float()
        return self._host.take(torch.empty_like(weight, dtype=torch.float32, device="meta")).copy_(weight)

    def zero_grad(self) -> None:
        """Begin the gradient sums of a step."""
        self.gradients.zero(self.step_count)

    @torch.no_grad()
    def clip_gradients(self) -> Tensor:
        """Make the next step scale all gradients so that their global norm is at most `max_grad_norm`.

        Returns the norm before scaling, a float32 scalar on the device. It is that of all workers' rows, after their
        sums. The caller must check it: a step with a norm that is not finite destroys the weights.
        """
        self.gradients.finish()
        counted = [slot for slot in self.slots if slot.name in self._cut or self._peers.group.rank == 0]
        norm = self._norm(counted)
        if self._peers.share.count > 1 or self._peers.group.size > 1:
            square = norm.double().square().reshape(1).to(self._device)
            if self._peers.share.rank >= self._peers.owners.count:  # the first group owns the same rows
                square.zero_()
            square = self._peers.sum_in_group(self._peers.sum(square, "gradient norm"), "gradient norm")
            norm = square[0].sqrt().float()
        if self.gradients.rounding is not None:
            self.gradients.rounding.end(norm, self._peers)
        self._clip = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def _norm(self, slots: Sequence[Slot]) -> Tensor:
        """The norm of the owned rows' gradients, float32."""
        sums = [slot.gradient for slot in slots]
        if sums and self._device.type == "cpu":
            return torch.stack([norm_by_parts(one) for one in sums]).norm().float()
        if self.gradients.rounding is None or not sums:
            return get_total_norm(sums)
        return torch.stack([torch.linalg.vector_norm(one, dtype=torch.float32) for one in sums]).norm()

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every owned row in place, with learning rate `lr`. The gradient sums are not valid afterwards."""
        if self._device.type == "cpu" and self.config.states == "float32":
            self._step_by_torch(lr)
        else:
            self._step_by_kernel(lr)
        self._clip = None
        self.step_count += 1

    def _step_by_kernel(self, lr: float) -> None:
        clip = torch.ones((), device=self._device) if self._clip is None else self._clip
        if self._stream is not None:
            scalars = [self._scalars(lr, piece.decays) for piece in self._pieces]
            self._stream.step(self._pieces, clip, scalars, [self._key(piece.name) for piece in self._pieces])
        else:
            for slot in self.slots:
                adamw(
                    slot.weight,
                    slot.master if slot.has_own_master else None,
                    slot.gradient,
                    slot.exp_avg,
                    slot.exp_avg_sq,
                    clip,
                    self._scalars(lr, slot.decays),
                    key=self._key(slot.name),
                    first=slot.first,
                )
        # Autograd does not notice a kernel's write.
        torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])

    def _scalars(self, lr: float, decays: bool) -> AdamScalars:
        decay = self.config.weight_decay if decays else 0.0
        return AdamScalars(lr, *self.config.betas, self.config.eps, decay, self.step_count + 1)

    def _key(self, name: str) -> int:
        return chance_key(seed=self.seed, step=self.step_count, name=name)

    def _step_by_torch(self, lr: float) -> None:
        is_wide = self.gradients.rounding is None
        if self._clip is not None and self.slots and is_wide:  # a worker may own no rows
            torch._foreach_mul_([slot.gradient for slot in self.slots], self._clip)
        clip = 1.0 if self._clip is None else self._clip
        for bucket in self._buckets:
            masters = [slot.weight.float() if slot.master is None else slot.master for slot in bucket]
            steps_done = torch.full((len(bucket),), float(self.step_count), device=masters[0].device)
            torch_adamw(
                masters,
                [slot.gradient if is_wide else slot.gradient.float() * clip for slot in bucket],
                [slot.exp_avg.values for slot in bucket],
                [slot.exp_avg_sq.values for slot in bucket],
                [],
                list(steps_done.unbind()),
                fused=True,
                amsgrad=False,
                beta1=self.config.betas[0],
                beta2=self.config.betas[1],
                lr=lr,
                weight_decay=self.config.weight_decay if bucket[0].decays else 0.0,
                eps=self.config.eps,
                maximize=False,
            )
            for slot, master in zip(bucket, masters, strict=True):
                if slot.master is None:
                    key = self._key(slot.name)
                    slot.weight.copy_(round_stochastically(master, key=key, first=slot.first))
                elif slot.has_own_master:
                    slot.weight.copy_(master)

    def state_tensors(self) -> dict[str, Tensor]:
        """All that the next step depends on, for the owned rows, except the weights. Live tensors, not copies."""
        if self._stream is not None:
            torch.cuda.synchronize(self._device)
        tensors = {"step_count": torch.tensor(self.step_count, dtype=torch.int64)}
        for slot in self.slots:
            tensors |= named_tensors("exp_avg", slot.name, slot.exp_avg)
            tensors |= named_tensors("exp_avg_sq", slot.name, slot.exp_avg_sq)
            if slot.master is not None and slot.has_own_master:
                tensors[f"master/{slot.name}"] = slot.master
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `state_tensors` returned, in place. UserError if the tensors are not this optimizer's."""
        check_format(tensors, self.config.states)
        own = self.state_tensors()
        copy_all(own, tensors, what="optimizer state")
        self.step_count = int(tensors["step_count"])


@torch.no_grad()
def copy_all(own: Mapping[str, Tensor], given: Mapping[str, Tensor], *, what: str) -> None:
    """Copy each tensor of `given` into the tensor of that name in `own`, bit for bit.

    UserError if names, shapes or dtypes differ; nothing is changed then. `what` is named in the message.
    """
    wrong = [f"'{name}' is missing" for name in own if name not in given]
    wrong += [f"'{name}' is not known" for name in given if name not in own]
    for name in own.keys() & given.keys():
        mine, theirs = own[name], given[name]
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            wrong.append(f"'{name}' is {theirs.dtype} {list(theirs.shape)}, not {mine.dtype} {list(mine.shape)}")
    if wrong:
        raise UserError(
            f"{what} of another model or optimizer: {'; '.join(sorted(wrong)[:3])} ({len(wrong)} such tensors);"
            f" resume with the recipe that the checkpoint was written by"
        )
    for name, tensor in own.items():
        tensor.copy_(given[name])


def owned_rows(named: Mapping[str, Tensor], count: int, units: Mapping[str, int]) -> dict[str, tuple[Rows, ...]]:
    """The rows of each of `count` workers, by parameter. Each begins where a block of 8-bit moments begins. `units`:
    rows of a block of some parameters, if not 128."""
    rows = [units.get(name, BLOCK_ROWS) for name in named]
    for place, one in enumerate(named.values()):
        width = prod(one.shape[1:])
        rows[place] *= STATE_BLOCK // gcd(STATE_BLOCK, rows[place] * width)
    return dict(zip(named, cut_rows([one.shape for one in named.values()], count, rows), strict=True))


def _decays(name: str, parameter: Tensor, where: Literal["linears", "matrices", "all"]) -> bool:
    is_matrix = parameter.dim() >= 2
    return where == "all" or (is_matrix and (where == "matrices" or "embedding" not in name))


def _pieces(slot: Slot) -> Iterator[StatePiece]:
    master = slot.master if slot.has_own_master else None
    moments = slot.exp_avg, slot.exp_avg_sq
    return pieces_of(slot.name, slot.weight, slot.gradient, *moments, master, slot.decays, first=slot.first)


def norm_by_parts(values: Tensor) -> Tensor:
    """The norm in float64. On a CPU torch adds the float32 squares of a tensor one by one. It loses 3e-4 of the norm of
    a million values and 2% of 150 million, so that workers with a part each would clip otherwise than one."""
    parts = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in values.flatten().split(NORM_PART)]
    return torch.stack(parts).norm()


def _buckets(slots: Iterable[Slot]) -> Iterator[tuple[Slot, ...]]:
    """Buckets of slots with equal decay, at most BUCKET_ELEMENTS each. A larger tensor has its own bucket."""
    for decays in (True, False):
        bucket: list[Slot] = []
        elements = 0
        for slot in slots:
            if slot.decays is not decays:
                continue
            if bucket and elements + slot.gradient.numel() > BUCKET_ELEMENTS:
                yield tuple(bucket)
                bucket, elements = [], 0
            bucket.append(slot)
            elements += slot.gradient.numel()
        if bucket:
            yield tuple(bucket)


def learning_rate(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """The rate of step number `step` (from 0) of `total_steps`. After the end it keeps its last value."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    end = total_steps - 1 if config.min_lr_fraction > 0 else total_steps
    rest = end - config.warmup_steps  # 0: the last step is the only one after the warm-up
    progress = min(1.0, (step - config.warmup_steps) / rest) if rest > 0 else float(rest == 0 < step)
    fraction = 1.0 - progress if config.decay == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * fraction)


def rate_after(first: int, step: int, config: OptimizerConfig, total_steps: int) -> float | None:
    """The rate of step number `step` where the schedule begins after `first` steps; None before."""
    return None if step < first else learning_rate(step - first, config, total_steps - first)


def place_of(batch: PackedBatch, updates: int) -> int:
    """The number of steps before the batch's. `updates`: of the trainer, if the batch has no step."""
    return updates if batch.step is None else batch.step - 1
