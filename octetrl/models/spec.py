"""Kept for one import path while the rooms settle."""

from octetrl.config.spec import ModelSpec, RopeScaling  # noqa: F401
