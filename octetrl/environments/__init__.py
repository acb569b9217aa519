"""Tasks and their rewards. No torch: a reward runs in a process of its own, which must start fast."""
