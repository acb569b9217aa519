"""The recipe's `environment`: where tasks come from and what scores them (docs/environments.md)."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from octetrl.config.judge import JudgeConfig
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.section import Fraction, Section
from octetrl.config.turns import TurnsConfig

Kind = Literal["reasoning_gym", "math", "jsonl", "code", "game", "verifiers", "gymnasium", "python"]


class EnvironmentConfig(Section):
    kind: Kind = "reasoning_gym"
    dataset: str | None = None
    """reasoning_gym: the dataset's name. math and jsonl: path of a JSONL file of {"prompt", "answer"}, or of other keys
    (`columns`). code: of {"prompt", "tests"} (docs/sandbox.md). game, verifiers and gymnasium: which one
    (docs/environment_tools.md). python: an environment of your own, `module:name`, with `tasks` and rewards, and
    whatever else it has (docs/environments.md)."""
    columns: dict[Literal["prompt", "answer", "id"], str] = Field(default_factory=dict)
    """Of files: our key -> the file's, dots leading into objects: {prompt: question, answer: reward.ground_truth}.
    A prompt may be a list of one user message."""
    reference_marker: str | None = None
    """Of files: the reference answer is what follows the last of these in its column, such as "####"; None: all of
    it."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The dataset's, game's or environment's own (kinds reasoning_gym, game, verifiers, gymnasium)."""
    reward: str | None = None
    """A Python function `module:name`, called as reward(task, text) -> float, instead of the kind's own scorer."""
    reward_model: str | None = None
    """Folder of a trained reward model (algorithm reward_model, exported), which scores completions in the trainer's
    process, on its device and with its own tokenizer, instead of the kind's own scorer."""
    judge: JudgeConfig | None = None
    """A model behind an OpenAI-compatible endpoint scores, instead of the kind's own scorer."""
    tools: tuple[str, ...] = ()
    """What the policy may call before it answers (kinds reasoning_gym, math, jsonl, code): calculator, python (in
    `sandbox`), search (over `corpus`), or a tool of yours as `module:name`."""
    corpus: str | None = None
    """Of the tool search: a JSONL file of {"text", "title"}, a text file, or a folder of *.txt and *.md."""
    prompt_template: str = "{prompt}"
    answer_marker: str | None = None
    """The answer is the text after the last marker; None: the whole completion."""
    train_size: int = Field(default=10_000, ge=1, le=10_000_000)
    """Tasks generated for training (reasoning_gym, game, gymnasium); files are used whole less `eval_size`."""
    eval_size: int = Field(default=128, ge=0, le=1_000_000)
    """Held-out tasks, disjoint from the training ones by prompt."""
    seed: int = 0
    reward_timeout_seconds: float = Field(default=10.0, gt=0.0, le=1e6)
    """Of each reward. A rollout that gets none in time is `reward_timeout`, and its process is replaced."""
    reward_memory_mib: int = Field(default=8192, ge=128, le=1 << 24)
    """Of each reward process with all that it starts. A rollout whose reward takes more is `reward_memory`, and its
    process is replaced."""
    reward_workers: int = Field(default=1, ge=1, le=1_024)
    """Processes that compute rewards, each one at a time."""
    load_timeout_seconds: float = Field(default=120.0, gt=0.0, le=1e6)
    """Of importing a reward, an environment or a tool that is named as `module:name`, in a process of its own."""
    task_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Of making one task (reasoning_gym). The process that makes them is then replaced, and the task tried again."""
    turns: TurnsConfig = TurnsConfig()
    """Of an environment that answers, calls tools or decorates its rewards."""
    code_reward: Literal["all", "share"] = "all"
    """code: 1 when all tests pass and else 0, or the share that pass."""
    sandbox: SandboxConfig = SandboxConfig()
    max_failure_share: Fraction = 0.5
    """Share of a step's rollouts, or of an evaluation's, that may fail in the environment: raise, or give no reward in
    time. Where more do, the run stops with the first traceback of each kind. 1 never stops it."""
