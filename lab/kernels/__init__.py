"""Benchmarks of single kernels: `python -m lab.kernels NAME` (__main__.py)."""
