"""The peak memory of a worker's device, as a metric of the step."""

from __future__ import annotations

import torch


def peak_memory(device: torch.device) -> dict[str, float]:
    """`memory/peak_gb` since the last call, in GB; nothing on a CPU."""
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"memory/peak_gb": peak / 1e9}
