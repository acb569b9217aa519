"""What the tables of `octetrl bench rollout` show, and the sentences below them."""

from __future__ import annotations

COLUMNS = {  # key of a row: heading, format
    "rollout/tokens_per_second": ("tokens/s", ",.0f"),
    "rollout/speedup_over_bf16": ("to\nbf16", ".2f"),
    "rollout/step_ms_p50": ("step ms\np50", ".2f"),
    "rollout/step_ms_p99": ("step ms\np99", ".2f"),
    "rollout/floor_tokens_per_second": ("bandw. model\ntokens/s", ",.0f"),
    "rollout/floor_share": ("of bandw.\nmodel", ".1%"),
    "rollout/kv_capacity_tokens": ("KV cache\ntokens", ",d"),
    "rollout/batch_occupancy": ("occupancy", ".1%"),
    "rollout/tail_share": ("tail", ".1%"),
    "rollout/preemptions": ("preempted", "d"),
    "time/capture": ("capture\ns", ".2f"),
    "time/startup": ("start s", ".1f"),
    "time/first_token": ("warm s", ".3f"),
    "memory/peak_gb": ("peak GB", ".1f"),
}
DRAFT_COLUMNS = {
    "rollout/tokens_per_second": ("tokens/s", ",.0f"),
    "rollout/speedup": ("of none", ".2f"),
    "rollout/steps": ("forwards", ",d"),
    "rollout/drafted_tokens": ("drafted", ",.0f"),
    "rollout/accepted_tokens": ("accepted", ",.0f"),
    "time/capture": ("capture\ns", ".2f"),
    "rollout/unequal_answers": ("unequal\nanswers", "d"),
}
DRAFT_LEGEND = (
    "of none: speed relative to no drafts. capture: part of the time that captured graphs, 0 in a fair comparison."
    " unequal answers: 0 where speculation keeps all bits."
)
LEGEND = (
    (
        "rollout/floor_share",
        "bandw. model: decoding at 4.3 TB/s (H200). A step reads the weights of linears and lm_head once (of a mixture,"
        " the experts that have a row), and the live keys and values once for each sequence. It is no lower bound: L2"
        " serves some reads of a shared prompt. of bandw. model: the model's time as a share of the measured one.",
    ),
    ("rollout/tail_share", "tail: share of the decode time with less than half of the batch running."),
    ("time/capture", "capture: CUDA graphs, a part of the timed call; a run captures them again in each step."),
    (
        "time/startup",
        "start: from an initialised CUDA to the first token: build the model, create or read its weights, quantise,"
        " calibrate, allocate the cache, compile or load kernels, capture one graph. warm: the same again.",
    ),
)
