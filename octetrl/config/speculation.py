"""Settings of speculation: `engine.speculation`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octetrl.config.section import Section


class SpeculationConfig(Section):
    """Drafts of next tokens, verified several at a time. No token and no log-prob depends on it (docs/parity.md)."""

    name: Literal["none", "ngram"] = "none"
    """Where drafts come from. none: no drafts. ngram: what followed the last tokens earlier, in the answer itself, its
    prompt, its siblings, and earlier answers to the same prompt."""
    max_draft_tokens: int = Field(default=8, ge=1, le=16)
    """Largest number of drafts for one sequence in a forward."""
    max_sequences: int = Field(default=64, ge=1, le=65_536)
    """Largest number of running sequences at which drafts are made. Drafts take places of `engine.max_batch` that are
    free."""
    ngrams: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(8, 5, 3), min_length=1, max_length=8)
    """Numbers of last tokens that are looked up, longest first. Shorter ones find more drafts, of which fewer are
    right."""
    min_gain: float = Field(default=0.03, ge=0.0, le=16.0)
    """Smallest gain in tokens/s, as measured in recent forwards with drafts and without. 0.03 is 3%. Below it drafting
    pauses for some forwards. 0: always draft, without measuring."""
    memory_tokens: int = Field(default=4_000_000, ge=0, le=1 << 34)
    """Number of tokens of ended answers and of their prompts that are kept for later steps. A prompt counts once for
    all its answers. A token takes 4 bytes, and each answer and each prompt about 250 bytes more. The prompts that were
    answered longest ago are dropped first."""
