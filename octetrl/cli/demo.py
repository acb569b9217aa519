"""`octetrl demo`: the main job on a laptop, from a random model to a table (run/demo.py)."""

from __future__ import annotations


def demo() -> None:
    """Train a tiny model by SFT and GRPO in emulated FP8, in runs/demo of the working directory, and print a table."""
    from octetrl.run.demo import main

    main()
