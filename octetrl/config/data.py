"""The recipe's `data` section: training data for objectives without rollouts. docs/data.md has the row formats."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octetrl.config.section import Section


class DataSource(Section):
    """One source of conversations or preference pairs: docs/data.md has the formats."""

    path: str
    """A JSONL or Parquet file, a folder that Hugging Face `datasets` reads, or owner/name on the hub."""
    weight: float = Field(default=1.0, gt=0.0)
    """Share of the examples, relative to the other sources' weights."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Subset of a Hugging Face data set. None: the default subset."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our key -> the file's key. Set it if the file uses other keys: {prompt: question, answer: solution}. A dot
    selects a key inside an object: {prompt: problem.text}."""


class DataConfig(Section):
    """The training data of SFT and of preference objectives."""

    sources: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], DataSource] = Field(default_factory=dict)
    """Sources by name: {chat: {path: chat.jsonl, weight: 2}, ...}. Choose the names, in lower case. Metrics use
    them."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with examples longer than model.context_length. refuse: end with an error. drop: leave them out and
    count them in `data/too_long`."""
