"""The recipe's `environment` section: where tasks come from and what scores them (docs/environments.md)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from octetrl.config.judge import JudgeConfig
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.section import Fraction, Section

EnvironmentName = Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")]
Kind = Literal["reasoning_gym", "math", "jsonl", "code", "verifiers", "gymnasium", "python"]


class TurnsConfig(Section):  # limits of rollouts with several turns (docs/environments.md)
    max_turns: int = Field(default=16, ge=1, le=100_000)
    """Largest number of the model's answers in one rollout. A longer rollout gets the status `unfinished` and keeps its
    reward. The same holds for one that reaches model.context_length. Each answer has at most rollout.max_new_tokens."""
    reply_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit in seconds for the environment's start, each reply and finish. A rollout that exceeds it gets the
    status `environment_timeout`. For rewards see environment.reward_timeout_seconds."""
    tool_timeout_seconds: float = Field(default=30.0, gt=0.0, le=1e6)
    """Time limit of each tool call, in seconds."""
    tool_failure: Literal["end", "tell"] = "end"
    """What to do if a tool raises or hangs. end: end the rollout with the status `tool_error`. tell: report the failure
    to the model and continue. A ToolError and a wrong call are always reported to the model."""
    max_in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    """Largest number of rollouts in flight at once. Groups start only as a whole. None: all rollouts of a step."""


class EnvironmentConfig(Section):
    kind: Kind = "reasoning_gym"
    """Kind of environment. It decides what `dataset` means."""
    dataset: str | None = None
    """reasoning_gym: the dataset's name. math and jsonl: path of a JSONL file of {"prompt", "answer"}, or with other
    keys (`columns`), or a data set of the Hugging Face hub, owner/name (docs/data.md). code: path of a JSONL file of
    {"prompt", "tests"} (docs/sandbox.md). verifiers and gymnasium: the environment's name
    (docs/environment_tools.md). python: your own environment, `module:name` (docs/environments.md)."""
    split: str = "train"
    """Split of a Hugging Face data set that the tasks come from."""
    subset: str | None = None
    """Subset of a Hugging Face data set. None: the default subset."""
    eval_split: str | None = None
    """Split of a Hugging Face data set that the held-out tasks come from; its prompts never occur in training. None:
    they are taken from `split`."""
    columns: dict[Literal["prompt", "answer", "id"], str] = Field(default_factory=dict)
    """For files: our key -> the file's key. A dot selects a key inside an object: {prompt: question, answer:
    reward.ground_truth}. A prompt may be a list of one user message."""
    reference_marker: str | None = None
    """For files: the reference answer is the text after the last such marker in the answer's column, for example
    "####". None: the whole column."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the dataset or environment (kinds reasoning_gym, verifiers, gymnasium)."""
    reward: str | None = None
    """Python function `module:name` that replaces the kind's own scorer. It is called as reward(task, text) ->
    float."""
    reward_model: str | None = None
    """Folder of an exported reward model (algorithm reward_model) that replaces the kind's own scorer. It runs in the
    trainer's process, on its device, with its own tokenizer."""
    judge: JudgeConfig | None = None
    """A model behind an OpenAI-compatible endpoint that replaces the kind's own scorer."""
    tools: tuple[str, ...] = ()
    """Tools that the policy may call before it answers (kinds reasoning_gym, math, jsonl, code). calculator; python, in
    `sandbox`; search, over `corpus`; or your own tool as `module:name`."""
    corpus: str | None = None
    """Texts for the tool search: a JSONL file of {"text", "title"}, a text file, or a folder of *.txt and *.md."""
    prompt_template: str = "{prompt}"
    """Text of every prompt; {prompt} stands for the task's own prompt."""
    answer_marker: str | None = None
    """The answer is the text after the last such marker in a completion. None: the whole completion."""
    answer_tolerance: float = Field(default=1e-6, ge=0.0, le=0.1)
    """Kind math: largest relative difference between a right answer and its reference, where one of them is a decimal.
    Whole numbers, fractions, roots and symbols are compared exactly (docs/environment_tools.md)."""
    train_size: int = Field(default=10_000, ge=1, le=10_000_000)
    """Number of tasks generated for training (reasoning_gym, gymnasium). A file gives all its tasks except the
    held-out ones."""
    eval_size: int = Field(default=128, ge=0, le=1_000_000)
    """Number of held-out tasks. Their prompts do not occur in training."""
    seed: int = 0
    """Seed of generated tasks and of the choice of held-out tasks."""
    reward_timeout_seconds: float = Field(default=10.0, gt=0.0, le=1e6)
    """Time limit of each reward, in seconds. A rollout whose reward takes longer gets the status `reward_timeout`, and
    the process is replaced."""
    reward_memory_mib: int = Field(default=8192, ge=128, le=1 << 24)
    """Memory limit in MiB of each reward process and the processes that it starts. A rollout whose reward needs more
    gets the status `reward_memory`, and the process is replaced."""
    reward_workers: int | None = Field(default=None, ge=1, le=1_024)
    """Number of processes that compute rewards. Each computes one at a time. None: one, and more while completions
    wait for their rewards, up to one per core."""
    load_timeout_seconds: float = Field(default=120.0, gt=0.0, le=1e6)
    """Time limit in seconds for importing a reward, environment or tool `module:name`, in a separate process."""
    task_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit in seconds for creating one task (reasoning_gym). When it is exceeded, the process is replaced and
    the task is tried again."""
    turns: TurnsConfig = TurnsConfig()
    """Limits for environments with replies, tools or decorated rewards."""
    code_reward: Literal["all", "share"] = "all"
    """Reward of kind code. all: 1 if all tests pass, otherwise 0. share: the share of tests that pass."""
    sandbox: SandboxConfig = SandboxConfig()
    """Limits for code that the model writes."""
    max_failure_share: Fraction = 0.5
    """Share of a step's or an evaluation's rollouts that may fail in the environment. A rollout fails if the
    environment raises or exceeds a time limit. If more fail, the run stops with the first traceback of each kind. 1:
    never stop."""


class MixedEnvironmentConfig(EnvironmentConfig):
    """One environment of several (`environments`)."""

    weight: float = Field(default=1.0, gt=0.0, le=1e6)
    """Share of the tasks, relative to the other environments' weights."""
