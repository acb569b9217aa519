"""Limits above which a person should look at a metric: one for the console, the report and docs/metrics.md.

The limit of the mismatch is a field of the recipe, `mismatch.warn_above`; config/limits.py has its default.
"""

from __future__ import annotations

TRUNCATED_LIMIT = 0.1  # share of the answers that reach their token limit
UNFINISHED_LIMIT = 0.1  # share of the conversations that run out of turns or context
EQUAL_REWARDS_LIMIT = 0.8  # share of the groups
