"""The recipe: every section and every field, with its meaning, its unit and when to change it.

The classes are frozen, strict and free of torch. An unknown key is an error that names the nearest known key
(`config/load.py`). A wrong type or range is an error here. An impossible combination is an error in
`config/validate.py`. All problems of a recipe are reported together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from octetrl.config.algorithm import ChosenAlgorithm, GrpoConfig
from octetrl.config.cluster import ClusterConfig
from octetrl.config.environment import EnvironmentConfig, EnvironmentName, MixedEnvironmentConfig
from octetrl.config.fp8_settings import Fp8Config
from octetrl.config.limits import MISMATCH_LIMIT, MOST_COMPLETIONS, MOST_TEMPERATURE
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.section import Fraction, Section

MOST_STOPS = 4  # stop strings that OpenAI's API takes


class OpenaiConfig(Section):
    """The server of `engine.backend: openai`. It answers with weights of its own: nothing is published to it."""

    base_url: str
    """Address including /v1, such as http://localhost:8000/v1. It must not contain a user, a key or a query."""
    model: str = Field(min_length=1)
    """The model's name at the server."""
    answers: Literal["tokens", "text"] = "tokens"
    """What the server gives. tokens: token ids and log-probs (`octetrl serve`, vLLM); `model.path` has its tokenizer.
    text: messages in, text out (any server with OpenAI's chat API); the recipe's model is not used."""
    api_key_variable: str | None = None
    """Environment variable that holds the key, such as OPENAI_API_KEY; null: no key is sent. The key itself is written
    nowhere."""
    concurrency: int = Field(default=64, ge=1, le=4_096)
    """Number of requests in flight at once. Each asks for one answer."""
    timeout_seconds: float = Field(default=600.0, gt=0.0, le=1e6)
    """Time limit of each attempt, in seconds, for the whole answer. An attempt that exceeds it counts as failed and is
    retried."""
    retries: int = Field(default=5, ge=0, le=1_000)
    """Number of retries if the server cannot be reached, exceeds `timeout_seconds`, breaks off an answer, is busy (408,
    409, 429), or fails (5xx)."""
    backoff_seconds: float = Field(default=1.0, ge=0.0, le=1e6)
    """Wait before the first retry, in seconds. It doubles with each retry, up to a minute. A server's Retry-After is
    respected."""

    @property
    def name(self) -> str:
        """How results name what was evaluated."""
        return f"{self.model} at {self.base_url}"


class SpeculationConfig(Section):
    """Drafts of next tokens, verified several at a time. No token and no log-prob depends on it (docs/parity.md)."""

    name: Literal["none", "ngram"] = "none"
    """Where drafts come from. none: no drafts. ngram: what followed the last tokens earlier, in the answer itself, its
    prompt, its siblings, and earlier answers to the same prompt."""
    max_draft_tokens: int = Field(default=8, ge=1, le=16)
    """Largest number of drafts for one sequence in a forward."""
    max_sequences: int = Field(default=64, ge=1, le=65_536)
    """Largest number of running sequences at which drafts are made. Drafts take places of `engine.max_batch` that are
    free."""
    ngrams: tuple[Annotated[int, Field(ge=1, le=64)], ...] = Field(default=(8, 5, 3), min_length=1, max_length=8)
    """Numbers of last tokens that are looked up, longest first. Shorter ones find more drafts, of which fewer are
    right."""
    min_gain: float = Field(default=0.03, ge=0.0, le=16.0)
    """Smallest gain in tokens/s, as measured in recent forwards with drafts and without. 0.03 is 3%. Below it drafting
    pauses for some forwards. 0: always draft, without measuring."""
    memory_tokens: int = Field(default=4_000_000, ge=0, le=1 << 34)
    """Number of tokens of ended answers and of their prompts that are kept for later steps. A prompt counts once for
    all its answers. A token takes 4 bytes, and each answer and each prompt about 250 bytes more. The prompts that were
    answered longest ago are dropped first."""


Precision = Literal["bf16", "fp8_rollout", "fp8", "fp8_full", "mxfp8"]


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights: y = W x + alpha / rank * B A x. See docs/lora.md."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rows of each A and columns of each B. Multiples of 8 are fastest on a GPU. Raise it if the adapters learn too
    little."""
    alpha: float = Field(default=32.0, gt=0.0)
    """Scale of the adapter: its output is multiplied by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Projections that get an adapter in every layer, by their names in a checkpoint, such as `[q_proj, v_proj]`. None:
    all projections of the model's layers, except `kv_a_proj_with_mqa`, which must be named."""
    experts: bool = False
    """Adapters on each expert of a mixture as well, for the targets that experts have. It multiplies the number of
    trained parameters; `octetrl check` prints it."""
    path: str | None = None
    """PEFT folder to start from (adapter_config.json, adapter_model.safetensors). None: A is random, B is zero."""


Preset = Literal[
    "tiny", "tiny-moe", "tiny-mla-moe", "tiny-delta", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
    "qwen3-30b-a3b", "qwen3.5-4b", "qwen3.5-35b-a3b", "gpt-oss-20b", "moonlight-16b-a3b", "llama-3.1-8b",
    "llama-3.1-70b",
]  # fmt: skip


class ModelConfig(Section):
    path: str | None = None
    """Hugging Face folder with config.json, tokenizer and safetensors (BF16 or block-FP8), a run, or a name of the hub
    such as Qwen/Qwen3-0.6B. Leave it out if `preset` is set."""
    preset: Preset | None = None
    """A known model shape, for `init: random` without weights. Set either `preset` or `path`."""
    implementation: Literal["auto", "octetrl", "transformers"] = "auto"
    """Whose modules compute the layers. auto: ours, and transformers' for families without blocks (docs/models.md)."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` initialises the weights from `seed`; it needs `preset`, or `path` for its config.json."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None: `path`."""
    chat_template: str | None = None
    """File with a Jinja chat template in place of the tokenizer's own. It is saved with the checkpoints and exported.
    None: the tokenizer's."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights, the residual stream and everything that is not FP8. float32 is for comparisons."""
    context_length: int = Field(default=4096, ge=16, le=1 << 24)
    """Largest length of prompt and answer together, in tokens. At most the model's number of positions, which is also
    the default if it is smaller."""
    lora: LoraConfig | None = None
    """Train only adapters and keep the weights frozen. `{}`: with the defaults. null: train the weights."""

    @property
    def value_bytes(self) -> int:
        """Bytes of a value in `dtype`."""
        return 2 if self.dtype == "bfloat16" else 4


LEAST_TEMPERATURE = 1e-8  # besides 0: smaller ones would overflow float32 in logits / temperature


ToolFormatName = Literal[
    "auto",
    "hermes",
    "llama3_json",
    "qwen3_coder",
    "glm45",
    "deepseek_v3",
    "kimi_k2",
    "minimax_m2",
    "mistral",
    "harmony",
    "response_template",
]


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=32, ge=1, le=1_000_000)
    """Number of prompts per step."""
    group_size: int = Field(default=8, ge=1, le=MOST_COMPLETIONS)
    """Number of answers sampled for each prompt (siblings). Advantages are relative to the group."""
    max_prompt_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """Largest length of a prompt, in tokens. A longer prompt gets no answer and is counted as `prompt_too_long`."""
    max_new_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """Largest length of an answer, in tokens."""
    temperature: float = Field(default=1.0, ge=0.0, le=MOST_TEMPERATURE)
    """Sampling temperature; above 0 in training. Log-probs, entropy, KL and a teacher's log-probs are those after the
    temperature. Objectives that learn from given data train at 1.0."""
    top_k: int = Field(default=0, ge=0, le=1 << 24)
    """Sample only from this number of most likely tokens. 0: from all. Only for evaluation: training refuses it,
    because the trainer could not reproduce the log-probs."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Sample only from the most likely tokens with this total probability. 1: from all. Only for evaluation, like
    top_k."""
    min_p: Fraction = 0.0
    """Sample only tokens with at least this share of the most likely token's probability. 0: all. Only for evaluation,
    like top_k."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer."""
    learn_beside_tail: bool = False
    """Train on complete groups while the last answers of a step are still sampled. The last answers continue on one
    worker, and the others train. Completions and log-probs stay the same bits. Gradients differ by the roundings of the
    backward, because samples are packed and the loss is divided in another way. Needs several workers that train and
    sample. See docs/scale.md."""
    system_prompt: str | None = None
    """System message before each prompt that does not begin with one. None: no system message."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}: in rollouts, evaluation, SFT, and `octetrl
    generate` and `serve` of the run. A row's own `chat_template_kwargs` are over them."""
    history: Literal["recorded", "template"] = "recorded"
    """What the policy sees of earlier turns. recorded: the tokens as they were sampled, and the replies after them.
    template: all messages as the chat template renders them again, as in a chat server, so thoughts may be left out.
    Tokens are kept up to the first change; a change begins a sample of its own, with the rollout's weight divided."""
    tool_format: ToolFormatName = "auto"
    """Format in which the model writes tool calls. auto: by the text of its chat template. response_template: by the
    tokenizer's own one. See docs/environment_tools.md."""


class EngineConfig(Section):
    backend: Literal["octetrl", "vllm", "openai"] = "octetrl"
    """What generates. octetrl: this project's engine. vllm: vLLM on each worker's GPU, with the trainer's codes and
    scales; equal log-probs are not promised. openai: a server by its address (`openai`), only for `octetrl eval`. See
    docs/engines.md."""
    page_size: Literal[16, 32, 64, 128] = 128
    """Number of tokens in one page of the KV cache. Siblings share whole pages of their prompt."""
    kv_cache_tokens: int | None = Field(default=None, ge=16, le=1 << 40)
    """Capacity of the KV cache, in tokens. None: `kv_memory_fraction` of the free device memory, or on a CPU enough for
    one step."""
    kv_memory_fraction: Fraction = 0.85
    """Share of the free device memory that the cache allocates. With `release_for_training: false` leave memory for
    training, for example with 0.35."""
    prefix_cache: Literal["drop_on_publish", "keep", "off"] = "drop_on_publish"
    """Whether a prompt reuses the pages of an earlier prompt with the same beginning. drop_on_publish: until the
    weights change. keep: also after that, so an answer mixes two policies; not allowed with a calibrated cache. off:
    never."""
    state_snapshots: int | None = Field(default=None, ge=0, le=1_000_000)
    """Number of states of linear attention that are kept for prompts with the same beginning, as the prefix cache keeps
    pages. None: a quarter of `max_batch`. Each takes what the state of a running sequence takes; `octetrl check` prints
    it. Raise it to the number of conversations that wait for their next turn."""
    release_for_training: bool = True
    """On a GPU: free the cache's memory for training, and allocate it again for the next rollout."""
    max_batch: int = Field(default=256, ge=1, le=65_536)
    """Largest number of sequences decoded together."""
    prefill_chunk: int | None = Field(default=None, ge=16, le=1 << 24)
    """Largest number of prompt tokens in one forward. A longer prompt is prefilled in chunks. None: 2,048, and 16,384
    for a mixture of experts, because each chunk reads all experts."""
    speculation: SpeculationConfig = SpeculationConfig()
    openai: OpenaiConfig | None = None

    @property
    def most_rows(self) -> int:
        """Largest number of rows of one sequence in a decode forward, with its drafts."""
        return 1 + (0 if self.speculation.name == "none" else self.speculation.max_draft_tokens)


class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(default=1e-6, ge=0.0, le=1.0)
    """Learning rate after the warm-up. 0 changes no weight, for measurements and tests."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """Decay rates of the first and the second moment. Each is below 1."""
    eps: float = Field(default=1e-8, gt=0.0)
    """Constant added to the denominator of an update."""
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay, multiplied by the learning rate."""
    weight_decay_on: Literal["linears", "matrices", "all"] = "linears"
    """Which parameters `weight_decay` applies to. linears: matrices except the embedding. matrices: the embedding too,
    as in Hugging Face's Trainer and TRL. all: norms and biases too, as in verl."""
    master: Literal["float32", "stochastic_rounding"] = "float32"
    """How BF16 weights are updated. float32: through float32 master weights, which take 4 more bytes per parameter.
    stochastic_rounding: directly, with stochastic rounding."""
    states: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Format of the two moments. Both together take 8, 4 or 2 bytes per parameter. bfloat16 and 8bit are rounded
    stochastically. In 8bit, blocks of 128 values share a window of exponents."""
    offload: bool = False
    """Keep moments and master weights in host memory and stream them through the GPU at each update. They then need
    only two buffers of device memory. For 8 billion parameters the transfers take 2 s per step with float32 states and
    masters, and 0.3 s with 8bit and stochastic rounding."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Largest global norm of the gradient. A longer gradient is scaled down to it."""
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of steps in which the learning rate rises linearly to `lr`."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after the warm-up, until the last step. It follows the steps, also those without an
    update. A run resumed with other `steps` continues on the curve that ends at the new last step."""
    min_lr_fraction: Fraction = 0.0
    """Learning rate of the last step of a linear or cosine decay, as a share of `lr`. 0: the rate would be 0 at the
    step after the last."""


class RouterConfig(Section):
    """How the routers of a mixture of experts are trained besides the objective. All of it is off by default, as
    commonly in RL."""

    balance_loss: float = Field(default=0.0, ge=0.0)
    """Coefficient of the loss that balances the experts' loads in each micro-batch; in pretraining commonly 0.001."""
    z_loss: float = Field(default=0.0, ge=0.0)
    """Coefficient of the loss on the square of the logits' log-sum-exp; commonly 0.001."""
    bias_rate: float = Field(default=0.0, ge=0.0)
    """Step of the correction bias of each expert towards a balanced load, after each optimizer step; in pretraining
    commonly 0.001. Only for models that have the bias (Moonlight, DeepSeek-V3, GLM-4.7-Flash, dots.llm1)."""


class TrainerConfig(Section):
    optimizer: OptimizerConfig = OptimizerConfig()
    router: RouterConfig = RouterConfig()
    tokens_per_micro_batch: int = Field(default=16384, ge=16, le=1 << 30)
    """Largest number of tokens in one forward and backward. It does not change loss or gradient. Lower it to save
    memory."""
    minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Number of optimizer steps per pass over the batch."""
    epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Number of passes over the batch. With several passes or minibatches, proximal log-probs are computed first."""
    activation_checkpointing: Literal["none", "attention", "layer"] = "layer"
    """What the forward keeps for the backward. none: everything. attention: each layer's input and attention's output,
    so attention is not recomputed. layer: only each layer's input."""
    checkpointed_layers: int | None = Field(default=None, ge=0, le=1_000)
    """Number of first layers that `activation_checkpointing` applies to. The others keep everything. None: all layers.
    Each layer less saves recomputing one layer's forward. `octetrl check` prints the smallest number that fits."""
    weight_codes: Literal["kept", "remade"] = "kept"
    """FP8 codes of trained weights during an update. kept: in memory in both orientations, 2 bytes per weight. remade:
    freed, and quantised again for each GEMM, with the same result. FP8 training then needs no more memory than BF16."""
    gradients: Literal["float32", "bfloat16"] = "float32"
    """Format of gradient sums. float32: 4 bytes per weight. bfloat16: 2 bytes, with stochastic rounding; its error is
    the metric `gradients/rounding_error`. Use it if the sums do not fit. `cluster.gradients: sharded` saves more."""
    logprob_chunk: int = Field(default=1024, ge=1, le=1 << 24)
    """Number of trained tokens whose logits are in memory at the same time. Lower it to save memory."""

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a weight's gradient sum."""
        return 4 if self.gradients == "float32" else 2


class CriticConfig(Section):
    """PPO's value model. It has the policy's precision, activation checkpointing and micro-batches."""

    path: str | None = None
    """Hugging Face folder of the critic's initial weights: a causal model, which gets a value head of zeros, or a
    reward model with the same tokenizer. None: the policy's own weights."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """The critic's optimizer. Its learning rate is commonly ten times the policy's, because values must follow a policy
    that changes."""
    pretrain_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of first steps that train only the critic. The policy's schedule starts after them."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Largest change of a value by several updates on one batch, in units of reward. null: no limit."""


class HeldOutSource(Section):
    """Conversations or preference pairs: docs/data.md has the formats."""

    path: str
    """A JSONL or Parquet file, a folder that Hugging Face `datasets` reads, or owner/name on the hub."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    subset: str | None = None
    """Subset of a Hugging Face data set. None: the default subset."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Our key -> the file's key. Set it if the file uses other keys: {prompt: question, answer: solution}. A dot
    selects a key inside an object: {prompt: problem.text}."""


class DataSource(HeldOutSource):
    """One source of conversations or preference pairs: docs/data.md has the formats."""

    weight: float = Field(default=1.0, gt=0.0)
    """Share of the examples, relative to the other sources' weights."""


SourceName = Annotated[str, Field(pattern=r"^[a-z0-9_.-]+$")]
HeldOutData = Annotated[
    Annotated[str, Tag("[one]")] | Annotated[dict[SourceName, HeldOutSource], Tag("[several]")],
    Discriminator(lambda given: "[several]" if isinstance(given, Mapping) else "[one]"),
]


class DataConfig(Section):
    """The training data of SFT and of preference objectives."""

    sources: dict[SourceName, DataSource] = Field(default_factory=dict)
    """Sources by name: {chat: {path: chat.jsonl, weight: 2}, ...}. Choose the names, in lower case. Metrics use
    them."""
    too_long: Literal["refuse", "drop"] = "refuse"
    """What to do with examples longer than model.context_length. refuse: end with an error. drop: leave them out and
    count them in `data/too_long`."""
    eval_dataset: HeldOutData | None = None
    """Held-out examples, whose loss is measured every `evaluation.every` steps and after the last one: a file or data
    set in the sources' form. Or several by name, {chat: {path: chat.jsonl}, code: {path: code.jsonl}}, each with
    metrics of its own (`eval/chat/loss`)."""
    eval_split: str | None = None
    """Split of the held-out examples: of `eval_dataset`, or else of the sources, which are Hugging Face data sets."""
    eval_size: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of the sources' examples that are held out, chosen at random by `seed`. Equal examples are left out of
    training too. 0: none."""

    @property
    def holds_out(self) -> bool:
        """Whether there are held-out examples."""
        return self.eval_dataset is not None or self.eval_split is not None or self.eval_size > 0


class EvaluationConfig(Section):
    every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of steps between evaluations on the held-out tasks, or on the held-out examples of `data`. 0: never during
    training."""
    on_start: bool = False
    """Also evaluate before the first step. The result is step 0 of `metrics.jsonl`."""
    samples: int = Field(default=1, ge=1, le=MOST_COMPLETIONS)
    """Number of completions per task."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Numbers k for which pass@k (one of k is right) and maj@k (the majority of k is right) are estimated. Each is at
    most `samples`."""
    right_from: float = 1.0
    """Lowest reward of a completion that counts as right, for accuracy, pass@k and maj@k. Lower it if a reward below 1
    is good enough."""
    temperature: float = Field(default=0.0, ge=0.0, le=MOST_TEMPERATURE)
    """Sampling temperature of evaluations. 0: greedy."""
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    """Largest length of an answer in evaluations, in tokens. None: rollout.max_new_tokens."""


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=0, le=1_000_000_000)
    """Number of steps between checkpoints. A run always writes one at its end. 0: only that one."""
    keep_last: int = Field(default=2, ge=1, le=1_000_000_000)
    """Number of latest checkpoints to keep. The last sound one also stays while later steps are not known to be sound
    (`collapse`), and so does one to whose folder you have added a file."""
    keep_best: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of further checkpoints to keep: those with the best `best_metric`; of equal ones, the earliest."""
    keep_every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Also keep the checkpoints of steps that are multiples of this. 0: none."""
    best_metric: str = "eval/accuracy"
    """Metric that ranks checkpoints, for `keep_best`, the report and `RUN@best`. More is better, except of a loss."""
    batches_ahead: Literal["drawn_again", "saved"] = "drawn_again"
    """Batches that were generated ahead (`cluster.max_staleness`) when the checkpoint was written. drawn_again: a
    resumed run generates them again, from the same tasks with the checkpoint's weights. saved: they are in the
    checkpoint, which waits for the next step's batch; with `max_staleness: 1` the resumed run repeats the bits."""
    store: str | None = None
    """URL of fsspec that gets a copy of the run with each checkpoint, such as s3://bucket/runs/mine. The copies are
    kept as those in output_dir. `octetrl train URL --resume` continues the run on any machine. null: none."""


class MismatchConfig(Section):
    fail_above: float | None = Field(default=None, gt=1.0)
    """Stop the run if `mismatch/token_mult_prob_error` exceeds this. null: never."""
    warn_above: float = Field(default=MISMATCH_LIMIT, gt=1.0)
    """Warn if `mismatch/token_mult_prob_error` exceeds this."""
    fail_on_difference: Literal["auto", True, False] = "auto"
    """What to do if parity is promised and a log-prob differs in any bit (`mismatch/unequal_tokens`). auto: stop the
    run. true: stop it, and refuse a recipe that does not promise parity. false: warn."""


class FailuresConfig(Section):
    max_empty_steps: int = Field(default=3, ge=0, le=1_000_000_000)
    """Number of steps in a row without a trained token after which the run ends. Steps whose tasks a trained model
    solves do not count. A first step without any reward ends the run at once. 0: never end it."""


class NotifyConfig(Section):  # messages to a person (docs/commands.md)
    webhook: str | None = Field(default=None, min_length=1)
    """Address that gets each message by POST, or the environment variable that has it: an address may be a secret."""
    command: tuple[str, ...] = ()
    """Program with its arguments that gets each message on its standard input."""
    events: tuple[Literal["warning", "failure", "end"], ...] = ("warning", "failure", "end")
    """What is sent: a warning of the console, an error that ends the run, any other end."""
    timeout_seconds: float = Field(default=10.0, gt=0.0, le=600.0)
    """Limit for sending one message."""


class LoggingConfig(Section):
    console: Literal["auto", "plain", "quiet"] = "auto"
    """Output on the console. auto: lines and progress bars on a terminal, otherwise as plain. plain: one line per
    step. quiet: only warnings."""
    console_every: int = Field(default=1, ge=1, le=1_000_000_000)
    """Number of steps between lines on the console. Files get every step."""
    tensorboard: bool = True
    """Write the metrics to TensorBoard files too."""
    report_to: tuple[Literal["wandb", "mlflow", "trackio", "swanlab"], ...] = ()
    """Experiment trackers that get the metrics. Each has an extra of its name, and its own environment variables set
    server, key and offline mode (WANDB_MODE, MLFLOW_TRACKING_URI)."""
    project: str = Field(default="octetrl", min_length=1)
    """Project of the run in trackers; MLflow's experiment."""
    run_name: str | None = Field(default=None, min_length=1)
    """Name of the run in trackers. null: the last part of output_dir."""
    group: str | None = Field(default=None, min_length=1)
    """Group of the run in trackers. null: none."""
    tags: tuple[str, ...] = ()
    """Tags of the run in trackers."""
    wandb_project: str | None = None
    """As wandb in `report_to`, in this project. null: `project`."""
    notify: NotifyConfig | None = None
    """Sends warnings, a failure and the end of the run to a webhook or a program. null: nothing."""
    rollouts: bool = True
    """Write every rollout to rollouts/step_NNNNNN.jsonl, and those of evaluations to evaluations/step_NNNNNN.jsonl."""


class EarlyStoppingConfig(Section):  # ends a run that no longer improves (docs/evaluation.md)
    metric: str = "eval/accuracy"
    """Metric that has to improve. Steps without it do not count."""
    patience: int = Field(default=3, ge=1, le=1_000_000_000)
    """Number of values in a row without an improvement that end the run, with a checkpoint."""
    min_delta: float = Field(default=0.0, ge=0.0, le=1e9)
    """Smallest improvement that counts."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Whether more or less of the metric is better. auto: less of a loss, more of any other metric."""


class Recipe(Section):
    """All settings of a run."""

    precision: Precision | None = None
    """Sets fp8.rollout, fp8.train and fp8.kv_cache together. bf16: no FP8. fp8_rollout: FP8 rollout. fp8: FP8 rollout
    and training. fp8_full: both, and a calibrated FP8 KV cache. mxfp8: rollout and training in MXFP8."""
    model: ModelConfig
    fp8: Fp8Config = Fp8Config()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: ChosenAlgorithm = GrpoConfig()
    """The objective and the settings of its loss. `name` chooses the objective and so the fields of the section."""
    critic: CriticConfig = CriticConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    environments: dict[EnvironmentName, MixedEnvironmentConfig] = Field(default={})
    """Several environments by name, in place of `environment`: {sums: {dataset: chain_sum, weight: 2}, ...}. Choose the
    names: small letters, digits, '_' and '-'. Each has the fields of `environment`, and `weight`: its share of the
    tasks, relative to the others (default 1). See docs/environments.md."""
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mismatch: MismatchConfig = MismatchConfig()
    collapse: Literal["warn", "fail", "off"] = "warn"
    """What to do if reward, entropy, gradient norm or loss leave the range of earlier steps (docs/collapse.md). warn:
    warn, and keep the last checkpoint from before. fail: also end the run with exit code 1. off: do not check."""
    failures: FailuresConfig = FailuresConfig()
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()
    early_stopping: EarlyStoppingConfig | None = None
    """Ends the run when a metric no longer improves. null: never."""
    callbacks: tuple[str, ...] = ()
    """Your own code beside the loop: classes or objects of `octetrl.Callback` as `module:name` (docs/library.md)."""
    seed: int = Field(default=0, ge=0)
    """Seed of random weights, of sampling and of the order of the data."""
    steps: int = Field(default=100, ge=1, le=1_000_000_000)
    """Number of steps. Each step produces data, trains on it and publishes the new weights to the engine."""
    epochs: float | None = Field(default=None, gt=0.0, le=1e9)
    """For SFT and preferences, in place of `steps`: number of passes over all examples of the sources together. The
    number of steps follows from it and `algorithm.batch_size`, rounded up. null: `steps` counts."""
    output_dir: str = "runs/run"
    """Folder that the run writes its metrics, rollouts and checkpoints to."""

    @property
    def each_environment(self) -> dict[str, EnvironmentConfig]:
        """All environments by name. A single one (`environment`) has the empty name."""
        return dict(self.environments) or {"": self.environment}

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Answers to a prompt, of each environment."""
        own = tuple(one.group_size or self.rollout.group_size for one in self.environments.values())
        return own or (self.rollout.group_size,)

    @property
    def most_answers(self) -> int:
        """Largest number of a step's answers, without refills."""
        return self.rollout.prompts_per_step * max(self.group_sizes)

    def answers_at_once(self, engines: int = 1) -> int:
        """Largest number of answers that each of `engines` samples at once. Tasks of a file may have group sizes of
        their own, which are not known before they are read."""
        if any("group_size" in one.columns for one in self.each_environment.values()):
            return self.engine.max_batch
        return min(-(-self.most_answers // engines), self.engine.max_batch)

    @property
    def model_scores(self) -> bool:
        """Whether the workers hold a reward model that scores. Workers that train one draw nothing to score."""
        return self.environment.reward_model is not None and self.algorithm.name != "reward_model"

    @property
    def holds_out_rows(self) -> bool:
        """Whether evaluations measure the loss of held-out examples, and draw no tasks."""
        return self.algorithm.learns_from != "rollouts" and self.data.holds_out

    @property
    def draws_evaluations(self) -> bool:
        """Whether evaluations during the run sample answers to held-out tasks."""
        return (self.evaluation.every > 0 or self.evaluation.on_start) and not self.holds_out_rows

    @property
    def training_temperature(self) -> float:
        """Temperature of the distribution that is trained: the rollout's (0 of one that only evaluates counts as 1)
        or 1 for given data."""
        return self.rollout.temperature or 1.0 if self.algorithm.learns_from == "rollouts" else 1.0

    @property
    def sources(self) -> dict[str, DataSource]:
        """Training data by name: `data.sources`, or `algorithm.conversations` as the only source."""
        algorithm = self.algorithm
        if not isinstance(algorithm, DatasetSettings) or algorithm.conversations is None:
            return self.data.sources
        return {"conversations": DataSource(path=algorithm.conversations)}

    @property
    def held_out_sources(self) -> dict[str, HeldOutSource]:
        """Files or splits of held-out examples, by name; a single `data.eval_dataset` has the empty name."""
        given, split = self.data.eval_dataset, self.data.eval_split
        if isinstance(given, Mapping):
            return dict(given)
        if given is not None:
            columns = next((source.columns for source in self.sources.values()), {})
            return {"": HeldOutSource(path=given, split=split or "train", columns=columns)}
        if split is None:
            return {}
        names = [""] if len(self.sources) == 1 else self.sources
        splits = (source.model_copy(update={"split": split}) for source in self.sources.values())
        return dict(zip(names, splits, strict=True))
