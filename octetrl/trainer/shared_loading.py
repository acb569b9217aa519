"""Loads one model on several workers, each of which reads and quantises some of its rows.

    a matrix     each worker reads the rows that it owns (trainer/shards.py), and quantises them if it is FP8; all then
                 gather codes and scales from their owners, or BF16 rows, as after an update (trainer/shared_weights.py)
    a vector     every worker reads all of it: norms, biases

Owned rows are whole blocks of the FP8 scales, so codes and scales have the bits that one worker computes. A worker that
updates a weight keeps its rows in BF16. Of a weight that nobody updates it keeps the codes alone.

Workers that train nothing load together too, and then end their connection. One worker alone reads the whole model.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import nn

from octetrl.layers.many_linears import adopt_codes
from octetrl.layers.weight_memory import LoadCount, Loading
from octetrl.models.decoder import Decoder
from octetrl.system.errors import UserError
from octetrl.trainer.optimizer import owned_rows
from octetrl.trainer.peers import Peers, PeersLost
from octetrl.trainer.shards import Cut, Rows
from octetrl.trainer.shared_weights import cuts_of_codes, units_of

PHASE = "load"

Load = Callable[[Decoder, Loading], None]


def load_shared(model: Decoder, peers: Peers, load: Load, count: LoadCount | None = None) -> None:
    """Fills `model` on all workers, which call this together. `load` fills the rows that it is given; filling more is
    allowed. `count` is added to.

    UserError, on all workers, is the first that `load` raised on any of them. Any other error is raised where it
    happened; the other workers raise PeersLost with its text.
    """
    began = time.perf_counter()
    table = _rows_to_share(model, peers)
    rows = {name: (own[peers.share.rank].start, own[peers.share.rank].stop) for name, own in table.items()}
    loading = Loading(rows, count or LoadCount())
    error: str | None = None
    failure: Exception | None = None
    try:
        load(model, loading)
    except UserError as found:
        error = str(found)
    except Exception as found:  # the others must not wait for this worker
        failure = found
    error = peers.agree(error, PHASE)
    text = None if failure is None else f"a worker failed in loading: {type(failure).__name__}: {failure}"
    told = peers.agree(text, PHASE)
    if failure is not None:
        raise failure
    if told is not None:
        raise PeersLost(told)
    if error is not None:
        raise UserError(error)
    _gather(model, table, peers)
    loading.count.seconds += time.perf_counter() - began


def _rows_to_share(model: Decoder, peers: Peers) -> dict[str, tuple[Rows, ...]]:
    """The rows of each worker of all matrices. Those of a trained one are the rows that the worker updates."""
    count = peers.share.count
    if count == 1:
        return {}
    linears = {f"{name}.weight": linear for name, linear in model.float8_linears() if linear.weight is not None}
    units, trained = units_of(linears), dict(model.trained_parameters())
    frozen = {name: one for name, one in model.named_parameters() if name not in trained and ".lora." not in name}
    table = owned_rows(trained, count, units) | (owned_rows(frozen, count, units) if frozen else {})
    whole = {name for name, linear in linears.items() if linear.has_weight}  # quantised whole, at the end of loading
    return {name: table[name] for name in _matrices(model) if name not in whole}


def _matrices(model: Decoder) -> Mapping[str, nn.Parameter]:
    return {name: one for name, one in model.named_parameters() if one.dim() > 1 and ".lora." not in name}


def _gather(model: Decoder, table: Mapping[str, tuple[Rows, ...]], peers: Peers) -> None:
    if not table:
        return
    matrices = _matrices(model)
    linears = {f"{name}.weight": linear for name, linear in model.float8_linears() if f"{name}.weight" in table}
    cuts: list[Cut] = []
    for name, rows in table.items():
        cuts += cuts_of_codes(linears[name], rows) if name in linears else [Cut(matrices[name].detach(), rows)]
    peers.gather_from_owners(cuts, PHASE)
    adopt_codes(linears.values())
