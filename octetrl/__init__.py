"""OctetRL: RL post-training of language models with FP8 end to end.

    import octetrl

    run = octetrl.train(model="models/Qwen3-0.6B", tasks="sums.jsonl", reward=right, precision="fp8_full", steps=200)
    print(run.evaluate().accuracy)
    run.export("models/mine")
    llm = octetrl.LLM("models/mine", precision="fp8_full")
    print(llm.generate(["2+2="], octetrl.SamplingParams(max_tokens=16))[0].text)

docs/library.md explains it. `reward`, `metric`, `log`, `tool`, `Conversation` and `ToolError` are for environments of
your own (docs/environments.md). Every name is imported when it is first used: `import octetrl` takes no time, and torch
is not imported before a model is needed.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octetrl.api.finished_run import FinishedRun
    from octetrl.api.llm import LLM, RequestOutput
    from octetrl.api.sampling import SamplingParams
    from octetrl.api.train import resume, train
    from octetrl.boxes.box import Box, BoxError
    from octetrl.environments.programs import AgentFailed, Model
    from octetrl.environments.scoring import log
    from octetrl.environments.tools.definition import ToolError, tool
    from octetrl.environments.turns import Conversation, metric, reward
    from octetrl.records import Task
    from octetrl.run.callbacks import Callback, EarlyStopping, RunView
    from octetrl.system.errors import RunFailed, UserError

from octetrl.system.host import short_waits
from octetrl.version import __version__

os.environ.update(short_waits(os.environ))  # before torch is loaded, which reads it then

__all__ = [
    "LLM",
    "AgentFailed",
    "Box",
    "BoxError",
    "Callback",
    "Conversation",
    "EarlyStopping",
    "FinishedRun",
    "Model",
    "RequestOutput",
    "RunFailed",
    "RunView",
    "SamplingParams",
    "Task",
    "ToolError",
    "UserError",
    "__version__",
    "log",
    "metric",
    "resume",
    "reward",
    "tool",
    "train",
]

_HOMES = {
    "AgentFailed": "octetrl.environments.programs",
    "Box": "octetrl.boxes.box",
    "BoxError": "octetrl.boxes.box",
    "Callback": "octetrl.run.callbacks",
    "Conversation": "octetrl.environments.turns",
    "EarlyStopping": "octetrl.run.callbacks",
    "FinishedRun": "octetrl.api.finished_run",
    "LLM": "octetrl.api.llm",
    "Model": "octetrl.environments.programs",
    "RequestOutput": "octetrl.api.llm",
    "RunFailed": "octetrl.system.errors",
    "RunView": "octetrl.run.callbacks",
    "SamplingParams": "octetrl.api.sampling",
    "Task": "octetrl.records",
    "ToolError": "octetrl.environments.tools.definition",
    "UserError": "octetrl.system.errors",
    "log": "octetrl.environments.scoring",
    "metric": "octetrl.environments.turns",
    "resume": "octetrl.api.train",
    "reward": "octetrl.environments.turns",
    "tool": "octetrl.environments.tools.definition",
    "train": "octetrl.api.train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octetrl' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
