"""The error for a number that is not finite and would otherwise enter a step."""

from __future__ import annotations

from octetrl.system.errors import RunFailed


class NonFiniteError(RunFailed, ValueError):
    """A loss, gradient, weight, KV scale or logit is not finite; a ValueError for the caller of a quantiser."""
