"""The base class of every section of a recipe. Sections are frozen and strict; docstrings describe their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in a recipe.

    Example: Problem(("rollout.top_p",), "rollout.top_p: 1.5 is out of range; it must be at most 1")
    """

    fields: tuple[str, ...]  # dotted names of the fields involved
    text: str
