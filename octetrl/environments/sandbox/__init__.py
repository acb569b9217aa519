"""Runs code that a model wrote, with limits: start with `sandbox.run_python` and docs/sandbox.md."""
