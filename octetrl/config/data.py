"""The recipe's section for what is learnt from without rollouts; docs/data.md has the formats of the rows."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octetrl.config.section import Section


class DataSource(Section):
    """One source of conversations or preference pairs: docs/data.md has the formats."""

    path: str
    """A JSONL or Parquet file, a folder that Hugging Face `datasets` reads, or hf:owner/name of the hub."""
    weight: float = Field(default=1.0, gt=0.0)
    """Share of the examples, relative to the other sources' weights."""
    split: str = "train"
    subset: str | None = None
    """Of a data set; None: its default one."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our key -> the file's: {prompt: question, answer: solution}."""


class DataConfig(Section):
    """What SFT and preferences learn from."""

    sources: dict[Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")], DataSource] = Field(default_factory=dict)
    """By a name of your choice, in lower case, which metrics use: {chat: {path: chat.jsonl, weight: 2}, ...}."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What becomes of examples longer than model.context_length; what is dropped is counted in `data/too_long`."""
