"""AdamW over float32 gradients, whatever the weights are.

- **Gradients** are summed over micro-batches in float32: as autograd finishes a parameter's gradient, a hook adds it to
  a float32 buffer and frees it. BF16 sums would lose small contributions, and depend on how samples were packed.
- **Master weights**: `float32` keeps a float32 copy of each BF16 weight, updates that and rounds it to nearest into the
  weight; `stochastic_rounding` has no copy: the weight is widened, updated and rounded by chance (4 bytes a parameter
  less). A float32 weight is its own master.
- **Moments** are float32, bfloat16 or 8bit (optimizer_states.py), on the device or in the host's memory (`offload`,
  optimizer_offload.py; on a CPU they are there anyway).
- **Weight decay** falls on linears: not on vectors (norms, biases), not on the embedding, tied or not;
  `weight_decay_on` adds the embedding, or everything.

On a GPU, and on a CPU for narrow moments, the update is adamw.py, one pass a parameter. On a CPU with float32
moments it is torch's own fused AdamW, bucket by bucket so that temporaries stay small. Weights change in place: the
engine reads the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw as torch_adamw

from octetrl.config.errors import UserError
from octetrl.config.schema import OptimizerConfig
from octetrl.kernels.optimizer.adamw import AdamScalars, Moment, adamw
from octetrl.kernels.optimizer.add_gradient import add_gradient
from octetrl.kernels.parts import part
from octetrl.trainer.optimizer_offload import OffloadStream, Piece, pieces_of
from octetrl.trainer.optimizer_states import (
    HostMemory,
    aligned,
    check_format,
    meta_moment,
    named_tensors,
    zero_moment,
)
from octetrl.trainer.stochastic_rounding import chance_key, round_stochastically

BUCKET_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter with what belongs to it. Gradient and master are float32."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor
    exp_avg: Moment
    exp_avg_sq: Moment
    master: Tensor | None  # the parameter itself if it is float32; None: rounded by chance
    decays: bool

    @property
    def has_own_master(self) -> bool:
        return self.master is not None and self.master.data_ptr() != self.parameter.data_ptr()


class Optimizer:
    """Build it after the weights are loaded: the masters are copied from them."""

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig, *, seed: int = 0
    ) -> None:
        self.config, self.seed, self.step_count = config, seed, 0
        named = list(named_parameters)
        self._device = named[0][1].device if named else torch.device("cpu")
        self._host = self._host_memory(named) if config.offload and self._device.type == "cuda" else None
        self.slots = tuple(self._slot(name, parameter) for name, parameter in named)
        self._buckets = tuple(_buckets(self.slots))
        self._gradients = [slot.gradient for slot in self.slots]
        self._clip: Tensor | None = None  # what the next step multiplies gradients by; None: nothing
        self._pieces = [piece for slot in self.slots for piece in _pieces(slot)] if self._host is not None else []
        self._stream = OffloadStream(self._pieces, self._device) if self._pieces else None

    def _host_memory(self, named: Iterable[tuple[str, nn.Parameter]]) -> HostMemory:
        num_bytes = 0
        for _, parameter in named:
            moment = meta_moment(parameter, self.config.states)
            num_bytes += 2 * sum(aligned(tensor.nbytes) for tensor in moment if tensor is not None)
            if parameter.dtype != torch.float32 and self.config.master == "float32":
                num_bytes += aligned(4 * parameter.numel())
        return HostMemory(num_bytes, self._device)

    def _slot(self, name: str, parameter: nn.Parameter) -> Slot:
        gradient = torch.zeros_like(parameter, dtype=torch.float32)

        def accumulate(parameter: Tensor) -> None:
            assert parameter.grad is not None
            with part("gradients"):
                add_gradient(gradient, parameter.grad)
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        return Slot(
            name,
            parameter,
            gradient,
            exp_avg=zero_moment(parameter, self.config.states, self._host),
            exp_avg_sq=zero_moment(parameter, self.config.states, self._host),
            master=self._master(parameter),
            decays=_decays(name, parameter, self.config.weight_decay_on),
        )

    def _master(self, parameter: nn.Parameter) -> Tensor | None:
        if parameter.dtype == torch.float32:
            return parameter.detach()
        if self.config.master != "float32":
            return None
        if self._host is None:
            return parameter.detach().float()
        return self._host.take(torch.empty_like(parameter, dtype=torch.float32, device="meta")).copy_(
            parameter.detach()
        )

    def zero_grad(self) -> None:
        torch._foreach_zero_(self._gradients)

    @torch.no_grad()
    def clip_gradients(self) -> Tensor:
        """Has the next step scale all gradients so that their global norm is at most `max_grad_norm`; returns the norm
        as it is, float32 on the device. A norm that is not finite must not be stepped with: the caller looks."""
        norm = get_total_norm(self._gradients)
        self._clip = (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm

    def non_finite_gradients(self) -> list[str]:
        """Names of the parameters whose gradient is not finite; one host read each, for the failing path."""
        return [slot.name for slot in self.slots if not slot.gradient.isfinite().all()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every parameter, in place. The gradients are used up."""
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
                    slot.parameter.detach(),
                    slot.master if slot.has_own_master else None,
                    slot.gradient,
                    slot.exp_avg,
                    slot.exp_avg_sq,
                    clip,
                    self._scalars(lr, slot.decays),
                    key=self._key(slot.name),
                )
        torch.autograd.graph.increment_version([slot.parameter for slot in self.slots])  # a kernel's write is not seen

    def _scalars(self, lr: float, decays: bool) -> AdamScalars:
        decay = self.config.weight_decay if decays else 0.0
        return AdamScalars(lr, *self.config.betas, self.config.eps, decay, self.step_count + 1)

    def _key(self, name: str) -> int:
        return chance_key(seed=self.seed, step=self.step_count, name=name)

    def _step_by_torch(self, lr: float) -> None:
        if self._clip is not None:
            torch._foreach_mul_(self._gradients, self._clip)
        for bucket in self._buckets:
            masters = [slot.parameter.detach().float() if slot.master is None else slot.master for slot in bucket]
            steps_done = torch.full((len(bucket),), float(self.step_count), device=masters[0].device)
            torch_adamw(
                masters,
                [slot.gradient for slot in bucket],
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
                    master = round_stochastically(master, seed=self.seed, step=self.step_count, name=slot.name)
                if slot.master is None or slot.has_own_master:
                    slot.parameter.copy_(master)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything the next step depends on, less the weights themselves; live tensors, not copies."""
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
        """The inverse of `state_tensors`, in place. UserError when the tensors are not this optimizer's."""
        check_format(tensors, self.config.states)
        own = self.state_tensors()
        copy_all(own, tensors, what="optimizer state")
        self.step_count = int(tensors["step_count"])


@torch.no_grad()
def copy_all(own: Mapping[str, Tensor], given: Mapping[str, Tensor], *, what: str) -> None:
    """Copies each tensor of `given` into its namesake, bit for bit; or changes nothing and raises UserError."""
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


def _decays(name: str, parameter: Tensor, where: Literal["linears", "matrices", "all"]) -> bool:
    is_matrix = parameter.dim() >= 2
    return where == "all" or (is_matrix and (where == "matrices" or "embedding" not in name))


def _pieces(slot: Slot) -> Iterator[Piece]:
    master = slot.master if slot.has_own_master else None
    weight = slot.parameter.detach()
    return pieces_of(slot.name, weight, slot.gradient, slot.exp_avg, slot.exp_avg_sq, master, slot.decays)


def _buckets(slots: Iterable[Slot]) -> Iterator[tuple[Slot, ...]]:
    """Slots of one decay together, at most BUCKET_ELEMENTS a bucket (a larger tensor is alone)."""
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
