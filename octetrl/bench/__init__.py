"""What a user measures with `octetrl bench`: workloads, clocks, memory estimates and rows of results."""
