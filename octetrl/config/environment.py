"""The recipe's `environment` section: where tasks come from and what scores them (docs/environments.md)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator

from octetrl.config.box import BoxConfig
from octetrl.config.limits import LEAST_OWN_TEMPERATURE, MOST_COMPLETIONS, MOST_TEMPERATURE
from octetrl.config.sandbox import SandboxConfig
from octetrl.config.section import Fraction, Section
from octetrl.system.errors import nearest
from octetrl.system.names import HOW, is_address

TEMPLATE = """You grade an answer to a question. Be strict: what is not shown is not known.

Question:
{prompt}

Reference answer (may be missing):
{answer}

Answer to grade:
{completion}

Say in a sentence or two what is right and wrong with it. Then write, on the last line, "Score: " and a number from 0
(useless) to 10 (perfect)."""


class JudgeConfig(Section):  # a model behind an OpenAI-compatible endpoint (docs/environment_tools.md)
    base_url: str
    """Address including /v1, such as http://localhost:8000/v1. It must not contain a user or a key."""
    model: str
    """The model's name at the endpoint."""
    kind: Literal["chat", "reward_model"] = "chat"
    """chat: the model gets `template` and replies with a text that contains the score. reward_model: the model gets
    prompt and completion as messages at `path`, and returns a number."""
    template: str = TEMPLATE
    """Question to the judge. {prompt} and {answer} stand for the task's, {completion} for the policy's."""
    pattern: str = r"(?i)score[\s:=*_]{0,8}(-?\d+(?:\.\d+)?)"
    """Regular expression with one group, which captures the score. The last match in the judge's reply counts. The
    judge's thoughts are not searched."""
    json_key: str | None = None
    """Key of the score in the reply's last JSON object with this key. null: `pattern` finds the score."""
    lowest: float = 0.0
    """Score that maps to reward 0, for kind chat. A lower score is an error and is not clipped."""
    highest: float = 10.0
    """Score that maps to reward 1, for kind chat."""
    path: str = "/pooling"
    """For kind reward_model: path on the server. With a leading slash it replaces /v1."""
    value_at: str = "data.0.data"
    """For kind reward_model: place of the number in the response, as keys and positions joined by dots."""
    api_key_variable: str | None = None
    """Environment variable that holds the key, such as OPENAI_API_KEY; null: no key is sent."""
    temperature: float = Field(default=0.0, ge=0.0)
    """Sampling temperature of the judge. At 0, equal completions are judged only once."""
    max_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """Token limit of the judge's reply."""
    timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit of each attempt, in seconds, for the whole answer. An attempt that exceeds it counts as failed and is
    retried."""
    retries: int = Field(default=3, ge=0, le=1_000)
    """Number of retries if the endpoint cannot be reached, exceeds `timeout_seconds`, is busy, or fails (status 408,
    409, 429, 5xx)."""
    backoff_seconds: float = Field(default=1.0, ge=0.0, le=1e6)
    """Wait before the first retry, in seconds. It doubles with each retry, up to a minute."""
    concurrency: int = Field(default=16, ge=1, le=4_096)
    """Number of requests in flight at once."""

    @field_validator("base_url")
    @classmethod
    def _is_address(cls, base_url: str) -> str:
        if not is_address(base_url):
            raise ValueError(f"it is not an address; {HOW}")
        return base_url

    @field_validator("template")
    @classmethod
    def _shows_the_completion(cls, template: str) -> str:
        if "{completion}" not in template:
            raise ValueError("it has no {completion}, so every completion would look the same")
        return template

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        if groups != 1:
            raise ValueError(f"it has {groups} groups; it needs exactly one, around the score")
        return pattern

    @field_validator("highest")
    @classmethod
    def _is_above_lowest(cls, highest: float, info: object) -> float:
        lowest = getattr(info, "data", {}).get("lowest", 0.0)
        if highest <= lowest:
            raise ValueError(f"it must be above lowest, which is {lowest:g}")
        return highest


class RewardConfig(Section):  # one of several reward functions (docs/environments.md)
    function: str
    """Python function `module:name`."""
    weight: float = Field(default=1.0, ge=-1e6, le=1e6)
    """Factor in the sum that is the reward. 0: the function is measured and has no part in it."""
    of: Literal["completion", "group"] = "completion"
    """What the function is called with. completion: (task, text), as a single `reward`. group: (task, texts) with the
    texts of all siblings, in the run's process; it returns a list with a number for each."""
    max_concurrent: int | None = Field(default=None, ge=1, le=10_000)
    """Largest number of its calls at once, for a function that waits, such as for a judge's endpoint. With it or
    `per_minute` the function is called in the run's process, an async one on its event loop. null: no limit."""
    per_minute: int | None = Field(default=None, ge=1, le=1_000_000)
    """Largest number of its calls that begin within 60 s. null: no limit."""
    only: Literal["training", "evaluation"] | None = None
    """training: the function has no part in evaluations. evaluation: it has none in training, and evaluations measure
    it (`eval/component/NAME`) without a part in their reward. null: it is called in both."""

    @property
    def in_run(self) -> bool:
        """Whether the run's process calls it, and not a reward process."""
        return self.of == "group" or self.max_concurrent is not None or self.per_minute is not None

    @property
    def in_sum(self) -> float:
        """Its factor in the reward."""
        return 0.0 if self.only == "evaluation" else self.weight


EnvironmentName = Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")]
RewardFunctions = Annotated[
    Annotated[str, Tag("[one]")] | Annotated[dict[EnvironmentName, RewardConfig], Tag("[several]")],
    Discriminator(lambda given: "[several]" if isinstance(given, Mapping) else "[one]"),
]


class EvalSetConfig(Section):  # one of several evaluation sets (docs/evaluation.md)
    dataset: str
    """File of tasks or data set of the Hugging Face hub, as `environment.dataset`."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Subset of a Hugging Face data set. None: the default subset."""
    columns: dict[Literal["prompt", "answer", "id"], str] | None = None
    """As those of `environment.columns`, which None stands for."""
    reference_marker: str | None = None
    """As `environment.reference_marker`, which None stands for."""
    size: int | None = Field(default=None, ge=1, le=1_000_000)
    """Number of its tasks, chosen at random by `environment.seed`. None: all."""
    samples: int | None = Field(default=None, ge=1, le=MOST_COMPLETIONS)
    """Number of completions per task. None: evaluation.samples."""
    k: tuple[Annotated[int, Field(ge=1)], ...] | None = None
    """Numbers k for pass@k and maj@k. None: evaluation.k."""
    temperature: float | None = Field(default=None, ge=0.0, le=MOST_TEMPERATURE)
    """Sampling temperature; 0: greedy. None: evaluation.temperature."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    """Largest length of an answer, in tokens. None: evaluation.max_new_tokens."""


class CurriculumConfig(Section):  # which training tasks come when (docs/environments.md)
    order_by: str | None = None
    """Column of the tasks whose values order them, the smallest first, in every epoch: numbers or texts. A dot selects
    a key inside an object. row: the order of the file, without shuffling. None: shuffled."""
    pass_rate: tuple[Fraction, Fraction] | None = None
    """Window of a task's running pass rate, such as [0.1, 0.9]. A task below it is hard, above it easy: it rests. Each
    group of a task counts half of its rate, the groups before the other half; an answer passes from
    evaluation.right_from. None: no task rests."""
    retry_hard: Fraction = 0.05
    """Probability that a hard task is drawn all the same when its turn comes."""
    retry_easy: Fraction = 0.05
    """The same of an easy task."""
    unseen: float = Field(default=1.0, gt=0.0, le=1.0)
    """With `pass_rate`: share of the draws that are tasks never drawn before, while there are any. 1: all of these come
    first."""

    @property
    def text(self) -> str:
        """In few words."""
        by = [] if self.order_by is None else [f"ordered by {self.order_by}"]
        window = self.pass_rate
        return "; ".join(
            by + ([] if window is None else [f"resting outside of pass rates {window[0]:g} to {window[1]:g}"])
        )


EvalDataset = Annotated[
    Annotated[str, Tag("[one]")] | Annotated[dict[EnvironmentName, EvalSetConfig], Tag("[several]")],
    Discriminator(lambda given: "[several]" if isinstance(given, Mapping) else "[one]"),
]
Kind = Literal["reasoning_gym", "math", "jsonl", "code", "verifiers", "gymnasium", "openenv", "harbor", "python"]


PLACEHOLDERS = ("prompt", "task_id", "model")  # of `environment.agent.command`


class AgentConfig(Section):  # a command that calls the policy (docs/agents.md)
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments. {prompt}, {task_id} and {model} stand for the task's prompt and id, and the
    policy's name. It runs in an empty folder, or in a box (`environment.box`). What it prints is its result, and an
    exit code other than 0 a failure without a reward."""
    prompt_on_stdin: bool = False
    """Also give the prompt as standard input."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""

    @field_validator("command")
    @classmethod
    def _can_be_run(cls, command: tuple[str, ...]) -> tuple[str, ...]:
        if not command[0].strip():
            raise ValueError("its program is empty")
        for word in command:
            for name in re.findall(r"(?<!\$)\{([a-z_]\w*)\}", word):  # ${name} is a shell's; other code may have braces
                if name not in PLACEHOLDERS and (near := nearest(name, PLACEHOLDERS)):
                    raise ValueError(f"{{{name}}} stands for nothing{near}")
                if name not in PLACEHOLDERS and not re.search(r"\s", word):
                    raise ValueError(f"{{{name}}} stands for nothing; {{prompt}}, {{task_id}} and {{model}} do")
        return command


class TurnsConfig(Section):  # limits of rollouts with several turns (docs/environments.md)
    max_turns: int = Field(default=16, ge=1, le=100_000)
    """Largest number of the model's answers in one rollout. A longer rollout gets the status `unfinished` and keeps its
    reward. The same holds for one that reaches model.context_length. Each answer has at most rollout.max_new_tokens."""
    reply_timeout_seconds: float = Field(default=60.0, gt=0.0, le=1e6)
    """Time limit in seconds for the environment's start, each reply and finish. A rollout that exceeds it gets the
    status `environment_timeout`. For rewards see environment.reward_timeout_seconds."""
    tool_timeout_seconds: float = Field(default=30.0, gt=0.0, le=1e6)
    """Time limit of each tool call, in seconds."""
    agent_timeout_seconds: float = Field(default=600.0, gt=0.0, le=1e6)
    """Time limit of an environment's `agent` for one rollout, in seconds. The rollout then gets the status `unfinished`
    and the reward of the state that is left. `max_turns` limits its calls."""
    tool_failure: Literal["end", "tell"] = "end"
    """What to do if a tool raises or hangs. end: end the rollout with the status `tool_error`. tell: report the failure
    to the model and continue. A ToolError and a wrong call are always reported to the model."""
    max_in_flight: int | None = Field(default=None, ge=1, le=10_000_000)
    """Largest number of rollouts in flight at once. Groups start only as a whole. None: all rollouts of a step, or 64
    with commands of `environment.agent` or boxes."""


class EnvironmentConfig(Section):
    kind: Kind = "reasoning_gym"
    """Kind of environment. It decides what `dataset` means."""
    agent: AgentConfig | None = None
    """A command that takes each rollout in place of the policy's single answer, and calls the policy. None: the policy
    answers itself, or the environment has an agent of its own."""
    box: BoxConfig | None = None
    """Where the command of `agent` runs, and what an agent in Python gets by `model.box()`. None: commands run on this
    machine."""
    dataset: str | None = None
    """reasoning_gym: the dataset's name. math and jsonl: path of a JSONL file of {"prompt", "answer"}, or with other
    keys (`columns`), or a data set of the Hugging Face hub, owner/name (docs/data.md). code: path of a JSONL file of
    {"prompt", "tests"} (docs/sandbox.md). verifiers and gymnasium: the environment's name
    (docs/environment_tools.md). openenv: the server's address, ws://host:port. harbor: a folder of tasks. python:
    your own environment, `module:name` (docs/environments.md)."""
    split: str = "train"
    """Split of a Hugging Face data set that the tasks come from."""
    subset: str | None = None
    """Subset of a Hugging Face data set. None: the default subset."""
    eval_split: str | None = None
    """Split of a Hugging Face data set that the held-out tasks come from; its prompts never occur in training. None:
    they are taken from `split`."""
    eval_dataset: EvalDataset | None = None
    """For files: another file or data set with the held-out tasks; `eval_split` is then its split. Or several by name,
    {aime: {dataset: aime.jsonl, samples: 16}, easy: {dataset: easy.jsonl}}, each with metrics of its own
    (`eval/aime/accuracy`). All their tasks are held out, whatever `eval_size` is, and training skips them."""
    columns: dict[Literal["prompt", "answer", "id", "temperature", "group_size"], str] = Field(default_factory=dict)
    """For files: our key -> the file's key. A dot selects a key inside an object: {prompt: question, answer:
    reward.ground_truth}. temperature, group_size: of a task's training answers; null: those of the recipe."""
    reference_marker: str | None = None
    """For files: the reference answer is the text after the last such marker in the answer's column, for example
    "####". None: the whole column."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Parameters of the dataset or environment (kinds reasoning_gym, verifiers, gymnasium, openenv,
    harbor)."""
    reward: RewardFunctions | None = None
    """Python function `module:name` that replaces the kind's own scorer. It is called as reward(task, text) -> float.
    Or several by name, {accuracy: {function: module:name}, polite: {function: module:name, weight: 0.2}}: the reward is
    their weighted sum, and each is a metric."""
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
    curriculum: CurriculumConfig | None = None
    """Order of the training tasks, and which of them rest. None: all of them, shuffled again in each epoch."""
    train_size: int = Field(default=10_000, ge=1, le=10_000_000)
    """Number of tasks generated for training (reasoning_gym, gymnasium, openenv, and endless
    tasksets of verifiers). A file gives all its tasks except the
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

    @property
    def eval_sets(self) -> dict[str, EvalSetConfig]:
        """The files of held-out tasks by name; a single one has the empty name. None: they come from `dataset`."""
        if isinstance(self.eval_dataset, str):
            return {"": EvalSetConfig(dataset=self.eval_dataset, split=self.eval_split or "train")}
        return dict(self.eval_dataset or {})

    @property
    def holds_out(self) -> bool:
        """Whether there are tasks to evaluate on."""
        return self.eval_size > 0 or self.eval_dataset is not None

    @property
    def held_out_text(self) -> str:
        """The tasks of evaluations in few words."""
        if self.eval_dataset is None:
            return f"{self.eval_size} tasks held out"
        sets = self.eval_sets.items()
        return f"evaluated on {', '.join(f'{name} ({one.dataset})' if name else one.dataset for name, one in sets)}"

    def rewarded_in(self, purpose: Literal["training", "evaluation"]) -> Self:
        """Only with the rewards that are called in training, or in evaluations."""
        if self.reward is None or isinstance(self.reward, str):
            return self
        kept = {name: each for name, each in self.reward.items() if each.only in (None, purpose)}
        return self if kept == self.reward else self.model_copy(update={"reward": kept})


def reward_names(reward: str | Mapping[str, RewardConfig] | None) -> tuple[str, ...]:
    """The functions, `module:name`, of `environment.reward`."""
    if reward is None or isinstance(reward, str):
        return () if reward is None else (reward,)
    return tuple(each.function for each in reward.values())


class MixedEnvironmentConfig(EnvironmentConfig):
    """One environment of several (`environments`)."""

    weight: float = Field(default=1.0, gt=0.0, le=1e6)
    """Share of the tasks, relative to the other environments' weights."""
    temperature: float | None = Field(default=None, ge=LEAST_OWN_TEMPERATURE, le=MOST_TEMPERATURE)
    """Sampling temperature of its training answers, as rollout.temperature, which None stands for."""
    group_size: int | None = Field(default=None, ge=1, le=MOST_COMPLETIONS)
    """Number of answers sampled for each of its prompts, as rollout.group_size, which None stands for."""
