"""The scripts behind this repository's own figures, and their results.

What a user measures on a GPU of their own is the command `octetrl bench`, whose room is `octetrl/bench/`. The scripts
here use that room's workloads, memory estimates and rates, and write to `lab/results/` as it does.
"""
