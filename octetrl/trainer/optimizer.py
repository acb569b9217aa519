"""AdamW over float32, whatever the weights are.

- **Gradients** are summed over micro-batches in float32: as autograd finishes a parameter's gradient, a hook adds it to
  a float32 buffer and frees it. BF16 sums would lose small contributions, and depend on how samples were packed.
- **Master weights**: `float32` keeps a float32 copy of each BF16 weight, updates that and rounds it to nearest into the
  weight; `stochastic_rounding` has no copy: the weight is widened, updated and rounded by chance (4 bytes a parameter
  less). A float32 weight is its own master.
- **Weight decay** falls on matrices only: not on vectors (norms, biases), not on the embedding, tied or not.

The arithmetic is torch's own fused AdamW, called bucket by bucket so that temporaries stay small. Weights change in
place: the engine reads the same tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw

from octetrl.config.errors import UserError
from octetrl.config.schema import OptimizerConfig
from octetrl.trainer.stochastic_rounding import round_stochastically

BUCKET_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter with what belongs to it. All tensors but `parameter` are float32."""

    name: str
    parameter: nn.Parameter
    gradient: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor | None  # None: made for the update and rounded by chance afterwards
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
        self.slots = tuple(self._slot(name, parameter) for name, parameter in named_parameters)
        self._buckets = tuple(_buckets(self.slots))
        self._gradients = [slot.gradient for slot in self.slots]

    def _slot(self, name: str, parameter: nn.Parameter) -> Slot:
        gradient = torch.zeros_like(parameter, dtype=torch.float32)

        def accumulate(parameter: Tensor) -> None:
            gradient.add_(parameter.grad)  # type: ignore[arg-type]
            parameter.grad = None

        parameter.register_post_accumulate_grad_hook(accumulate)
        master: Tensor | None = parameter.detach()
        if parameter.dtype != torch.float32:
            master = parameter.detach().float() if self.config.master == "float32" else None
        return Slot(
            name,
            parameter,
            gradient,
            exp_avg=torch.zeros_like(gradient),
            exp_avg_sq=torch.zeros_like(gradient),
            master=master,
            decays=parameter.dim() >= 2 and "embedding" not in name,
        )

    def zero_grad(self) -> None:
        torch._foreach_zero_(self._gradients)

    @torch.no_grad()
    def clip_gradients(self) -> Tensor:
        """Scales all gradients so that their global norm is at most `max_grad_norm`; returns the norm before, float32
        on the device. A norm that is not finite must not be stepped with: the caller looks."""
        norm = get_total_norm(self._gradients)
        torch._foreach_mul_(self._gradients, (self.config.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def non_finite_gradients(self) -> list[str]:
        """Names of the parameters whose gradient is not finite; one host read each, for the failing path."""
        return [slot.name for slot in self.slots if not slot.gradient.isfinite().all()]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every parameter, in place."""
        for bucket in self._buckets:
            masters = [slot.parameter.detach().float() if slot.master is None else slot.master for slot in bucket]
            steps_done = torch.full((len(bucket),), float(self.step_count), device=masters[0].device)
            adamw(
                masters,
                [slot.gradient for slot in bucket],
                [slot.exp_avg for slot in bucket],
                [slot.exp_avg_sq for slot in bucket],
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
        self.step_count += 1

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything the next step depends on, less the weights themselves; live tensors, not copies."""
        tensors = {"step_count": torch.tensor(self.step_count, dtype=torch.int64)}
        for slot in self.slots:
            tensors[f"exp_avg/{slot.name}"] = slot.exp_avg
            tensors[f"exp_avg_sq/{slot.name}"] = slot.exp_avg_sq
            if slot.master is not None and slot.has_own_master:
                tensors[f"master/{slot.name}"] = slot.master
        return tensors

    @torch.no_grad()
    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of `state_tensors`, in place. UserError when the tensors are not this optimizer's."""
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
