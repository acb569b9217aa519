"""Warns of rows whose times compare nothing: work that happens once, and times that contradict each other. No torch.

A step captures a CUDA graph of each batch size that it reaches, because training frees the graphs. The first capture of
a size also compiles kernels, so a timed step that reaches new sizes is longer than later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_CAPTURE = 0.02  # share of a step
NOISE = 0.02  # share of a time


def capture_warnings(rows: Sequence[Mapping[str, Any]], names: Sequence[str], remedy: str) -> Iterator[str]:
    """A line for each row whose steps captured CUDA graphs. `names`: keys that tell the rows apart."""
    for row in rows:
        share = float(row.get("time/capture", 0.0)) / float(row["time/step"])
        if share > MOST_CAPTURE:
            arm = ", ".join(str(row[name]) for name in names)
            captured = f"{share:.0%} of its timed steps captured CUDA graphs"
            yield f"warning: {arm}: {captured}; new sizes compile once; {remedy}"


def drain_warnings(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each row with roles apart whose step is shorter than its generation. Every step needs a batch, so
    batches that were generated before the timed steps have shortened them."""
    for row in rows:
        step, generate = float(row["time/step"]), float(row.get("time/rollout", 0.0))
        is_apart = row["cluster/trainers"] + row["cluster/engines"] == row["cluster/workers"]
        if is_apart and step < generate * (1 - NOISE):
            yield (
                f"warning: {row['precision']}, {row['arm']}: a step of {step:.2f} s cannot be"
                f" shorter than the {generate:.2f} s of its own generation; batches that were generated before had"
                " shortened it; give more --steps or longer answers"
            )
