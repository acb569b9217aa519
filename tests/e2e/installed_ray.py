"""Ray, for the tests that start it. Without it, the tests that import it from here say so and do not run."""

from __future__ import annotations

from tests.required import missing

try:
    import ray
except ModuleNotFoundError:
    missing("ray", "ray is not installed; it is among the packages for development", whole_module=True)

__all__ = ["ray"]
