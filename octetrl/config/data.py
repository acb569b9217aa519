"""The recipe's `data`: training data without rollouts. docs/data.md has the formats of the rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octetrl.config.section import Section


class DataSource(Section):
    """One source of conversations or preference pairs: docs/data.md has the formats."""

    path: str
    """A JSONL or Parquet file, a folder that Hugging Face `datasets` reads, or hf:owner/name on the hub."""
    weight: float = Field(default=1.0, gt=0.0)
    """Share of the examples, relative to the other sources' weights."""
    split: str = "train"
    subset: str | None = None
    """Subset of a data set; None: its default one."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our key -> the file's key: {prompt: question, answer: solution}."""


class DataConfig(Section):
    """The training data of SFT and of preference objectives."""

    sources: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], DataSource] = Field(default_factory=dict)
    """Sources by a name of your choice, in lower case: {chat: {path: chat.jsonl, weight: 2}, ...}. Metrics use the
    names."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with examples longer than model.context_length. drop: leave them out and count them in
    `data/too_long`."""
