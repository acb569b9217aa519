"""The commands that make what the shipped recipes start from. Their comments show the same commands."""

from __future__ import annotations

from pathlib import Path

_DEMO = "run `octetrl demo` first"
_CHECKOUT = "run `{}` first, in a checkout"
_EXPORTED = "octetrl train demo_tools_sft && octetrl export runs/tools/sft --to runs/tools/sft/export"
_SMOLLM2 = "models/SmolLM2-135M-Instruct"
_WAYS = {
    "runs/demo/model": _DEMO,
    "runs/demo/worked_examples.jsonl": _DEMO,
    "runs/demo/sft/export": _DEMO,
    "runs/demo/grpo/export": f"{_DEMO}, then `octetrl export runs/demo/grpo --to runs/demo/grpo/export`",
    "runs/demo/moe": f"{_DEMO}, then, in a checkout, `python -m examples.upcycle runs/demo/sft/export runs/demo/moe`",
    "runs/demo/pairs.jsonl": _CHECKOUT.format("python examples/preference_pairs.py runs/demo/pairs.jsonl"),
    "runs/demo/worked.jsonl": _CHECKOUT.format("python examples/conversations.py runs/demo"),
    "runs/demo/bare.jsonl": _CHECKOUT.format("python examples/conversations.py runs/demo"),
    "runs/tools/model": _CHECKOUT.format("python -m examples.tool_conversations runs/tools"),
    "runs/tools/conversations.jsonl": _CHECKOUT.format("python -m examples.tool_conversations runs/tools"),
    "runs/tools/sft/export": f"run `{_EXPORTED}` first",
    _SMOLLM2: f"run `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir {_SMOLLM2}` first;"
    f" without the hub, in a checkout: `bash setup/smollm2.sh {_SMOLLM2}`",
}


def way_to_make(path: str | Path) -> str | None:
    """What to do about a file or folder that a shipped recipe names and that is missing; None for any other."""
    return _WAYS.get(Path(path).as_posix())
