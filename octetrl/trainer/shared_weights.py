"""Weights after an update: quantised by their owners, and the same on every worker.

One worker quantises its FP8 weights in place (`Decoder.requantize`). With several workers

    an FP8 weight    every worker has its codes and scales; each row of the BF16 weight is only on its owner
    any other        every worker has the whole weight; its owner has updated some rows

After an optimizer step each owner quantises its rows, which are whole blocks of 128, and all workers gather codes,
scales and the other weights, in place. Engine and trainer read these tensors. Codes are half of the bytes of BF16.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor

from octetrl.config.schema import OptimizerConfig
from octetrl.fp8.non_finite import NonFiniteError
from octetrl.layers.linear import Float8Linear
from octetrl.layers.many_linears import LinearRows, adopt_codes, quantize_rows
from octetrl.layers.weight_memory import keep_rows, rows_per_unit, scale_row
from octetrl.models.decoder import Decoder
from octetrl.models.tensor_rows import cut_rows_of
from octetrl.trainer.optimizer import GradientFormat, Optimizer, owned_rows
from octetrl.trainer.peers import Peers
from octetrl.trainer.shards import Cut, Rows

PHASE = "new weights"


def sharded_linears(model: Decoder, peers: Peers) -> dict[str, Float8Linear]:
    """The trained FP8 linears by the name of their weight; none if there is only one worker."""
    if peers.share.count == 1:
        return {}
    linears = {f"{name}.weight": linear for name, linear in model.float8_linears()}
    trained = {name for name, _ in model.trained_parameters()}
    return {name: linear for name, linear in linears.items() if name in trained and linear.weight is not None}


def keep_owned_rows(model: Decoder, peers: Peers) -> dict[str, Tensor]:
    """Frees the `sharded_linears`' weights except for the rows that this worker owns, and returns these, by name.

    Before the model is loaded it never has all weights (layers/weight_memory.py). A second call changes nothing.
    """
    linears = sharded_linears(model, peers)
    if not linears:
        return {}
    table = owned_rows(dict(model.trained_parameters()), peers.owners.count, units_of(linears))
    return {name: keep_rows(linear, *table[name][peers.owners.rank]) for name, linear in linears.items()}


def optimizer_of(
    model: Decoder,
    config: OptimizerConfig,
    *,
    seed: int,
    peers: Peers,
    trains: bool = True,
    gradients: GradientFormat = "float32",
) -> tuple[Optimizer, SharedWeights]:
    """The optimizer of a loaded and quantised model, and what exchanges its weights.

    `trains` false: no parameter is trained, and no state is allocated.
    """
    parameters = model.trained_parameters() if trains else ()
    copied = keep_owned_rows(model, peers) if trains else {}
    units, cut = units_of(sharded_linears(model, peers)), cut_rows_of(model.spec, model.lora)
    optimizer = Optimizer(
        parameters, config, seed=seed, peers=peers, copied=copied, cut=cut, units=units, gradients=gradients
    )
    return optimizer, SharedWeights(model, optimizer, peers)


class SharedWeights:
    """Keeps a model's weights equal on all workers. With one worker it only quantises."""

    def __init__(self, model: Decoder, optimizer: Optimizer, peers: Peers) -> None:
        """`optimizer` has the owned rows of `sharded_linears`, whose whole weights have no memory."""
        self._model, self._optimizer, self._peers = model, optimizer, peers
        self._linears = sharded_linears(model, peers) if optimizer.parameters else {}
        self._received, self._seconds = 0, 0.0  # gathered since the last `take_exchange`

    def renew(self) -> None:
        """Quantise and exchange the weights that an optimizer step has changed.

        NonFiniteError, on all workers, names a weight that is not finite. The codes must not be used then.
        """
        if self._peers.share.count == 1:
            self._requantize_whole()
            return
        error = self._peers.agree(self._quantize_owned(), PHASE)
        if error is None:
            self._gather()
            error = self._first_non_finite()
        if error is not None:
            for linear in self._linears.values():
                linear.mark_codes_stale()
            raise NonFiniteError(error)
        adopt_codes(self._linears.values())

    def _gather(self) -> None:
        began, cuts = self._now(), self._cuts()
        self._peers.gather_from_owners(cuts, PHASE)
        owners = self._peers.owners
        others = [rank for rank in range(owners.count) if rank != owners.rank]
        self._received += sum(cut.num_bytes(rank) for cut in cuts for rank in others)
        self._seconds += self._now() - began

    def _now(self) -> float:
        device = self._model.lm_head_weight.device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def take_exchange(self) -> dict[str, float]:
        """Bytes received and seconds of gathering since the last call; nothing with one worker."""
        if self._peers.share.count == 1:
            return {}
        taken = {"publish/bytes": float(self._received), "time/gather": self._seconds}
        self._received, self._seconds = 0, 0.0
        return taken

    def _requantize_whole(self) -> None:
        if self._peers.group.size == 1:
            self._model.requantize()
            return
        error = None
        try:
            self._model.requantize()
        except NonFiniteError as found:
            error = str(found)
        error = self._peers.agree_in_group(error, PHASE)
        if error is not None:
            for _, linear in self._model.float8_linears():
                linear.mark_codes_stale()
            raise NonFiniteError(error)

    def _quantize_owned(self) -> str | None:
        slots = [slot for slot in self._optimizer.slots if slot.name in self._linears]
        try:
            quantize_rows({one.name: LinearRows(self._linears[one.name], one.rows.start, one.weight) for one in slots})
        except NonFiniteError as error:
            return str(error)
        return None

    def _cuts(self) -> list[Cut]:
        cuts = []
        for name, rows in self._optimizer.rows.items():
            if name in self._linears:
                cuts += cuts_of_codes(self._linears[name], rows)
            else:
                cuts.append(Cut(self._optimizer.parameters[name].detach(), rows))
        return cuts

    def _first_non_finite(self) -> str | None:
        if not self._linears:
            return None
        if not torch.cat([linear.scale.flatten() for linear in self._linears.values()]).isnan().any():
            return None
        return next(f"{name} is not finite" for name, linear in self._linears.items() if linear.scale.isnan().any())


def cuts_of_codes(linear: Float8Linear, rows: tuple[Rows, ...]) -> list[Cut]:
    """Codes and scales of the weight's rows of each worker."""
    blocks = tuple(Rows(scale_row(linear, start), scale_row(linear, stop)) for start, stop in rows)
    return [Cut(linear.codes, rows), Cut(linear.scale, blocks)]


def units_of(linears: Mapping[str, Float8Linear]) -> dict[str, int]:
    """By weight: how many rows are quantised together at least."""
    return {name: rows_per_unit(linear) for name, linear in linears.items()}
