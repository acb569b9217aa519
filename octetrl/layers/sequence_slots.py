"""What linear attention needs of the engine: an argument of a forward beside the pages (context.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from octetrl.kernels.delta_rule.state import DeltaState, SlotRows


class SequenceSlots(NamedTuple):
    """What sequences keep of linear attention, by layer, and whose slot each row of this forward has."""

    layers: Mapping[int, DeltaState]
    rows: SlotRows
