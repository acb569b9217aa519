"""The recipe: every section and every field, with its meaning, its unit and when to change it.

The classes are frozen, strict and free of torch. An unknown key is an error that names the nearest known key
(`config/load.py`). A wrong type or range is an error here. An impossible combination is an error in
`config/validate.py`. All problems of a recipe are reported together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octetrl.config.algorithm import ChosenAlgorithm, GrpoConfig
from octetrl.config.data import DataConfig, DataSource
from octetrl.config.environment import EnvironmentConfig
from octetrl.config.objective_settings import DatasetSettings
from octetrl.config.section import Fraction, Section

Precision = Literal["bf16", "fp8_rollout", "fp8", "fp8_full"]
Numerics = Literal["parity", "fast"]
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Section):
    """Low-rank adapters beside frozen weights: y = W x + alpha / rank * B A x. See docs/lora.md."""

    rank: int = Field(default=16, ge=1, le=1024)
    """Rows of each A and columns of each B. On a GPU multiples of 8 run best."""
    alpha: float = Field(default=32.0, gt=0.0)
    """The branch is scaled by alpha / rank."""
    targets: tuple[LoraTarget, ...] = LORA_TARGETS
    """Projections that get an adapter, in every layer; by default all of them."""
    path: str | None = None
    """PEFT folder to start from (adapter_config.json, adapter_model.safetensors); None: A random, B zero."""


class ModelConfig(Section):
    path: str | None = None
    """Hugging Face folder with config.json, tokenizer and safetensors (BF16 or block-FP8). None with `preset`."""
    preset: Literal["tiny", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "llama-3.1-8b"] | None = None
    """A known model shape, for `init: random` without weights. Set either `preset` or `path`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` initialises the weights from `seed`; it needs `preset`, or `path` for its config.json."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None: `path`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Dtype of the weights, the residual stream and everything that is not FP8. float32 is for comparisons."""
    context_length: int = Field(default=4096, ge=16, le=1 << 24)
    """Longest prompt + answer, in tokens. The sizes of the KV cache and of the checks follow from it."""
    lora: LoraConfig | None = None
    """Train only adapters, with frozen weights. `{}` uses the defaults; null trains the weights."""


class Fp8Config(Section):
    """FP8 settings. `precision:` sets the main ones together; a field given here overrides it."""

    rollout: bool = False
    """FP8 block-scaled linears in the engine."""
    train: bool = False
    """FP8 block-scaled linears in the trainer: forward, dgrad and wgrad."""
    kv_cache: Literal["none", "calibrated", "dynamic"] = "none"
    """E4M3 pages with one scale per layer and KV head (calibrated) or per token and KV head (dynamic)."""
    calibration: Literal["fused", "exact"] = "fused"
    """Where the amax of a calibrated cache comes from. fused: the training forward. exact: one more forward with the
    new weights."""
    calibration_margin: float = Field(default=1.05, ge=1.0, le=4.0)
    """scale = margin * amax / 448. Raise it if `fp8/kv_saturation` is not 0."""
    kv_replay: bool = True
    """The trainer's attention reads K and V through the rollout's quantiser (straight-through gradient)."""
    saturation_warn: Fraction = 0.001
    """The run warns if more than this share of K and V values is clamped."""
    power_of_two: bool = False
    """Round scales up to powers of two, as Blackwell needs them. Hopper's float32 scales are more accurate."""
    wgrad_blocks: Literal["square", "tokens"] = "square"
    """Blocks of the activations in wgrad. square: 128 tokens x 128 channels, with a faster GEMM. tokens: 128 tokens x
    1."""
    bf16_first_layers: int = Field(default=0, ge=0, le=1_000)
    bf16_last_layers: int = Field(default=0, ge=0, le=1_000)
    """Number of first and last layers whose linears stay BF16, on both sides."""
    ignore: tuple[str, ...] = ()
    """Names of linears that stay BF16, on both sides. `*` matches any part: `layers.0.mlp.*`, `*.o_proj`."""
    emulate: bool | None = None
    """None: emulate FP8 on a CPU, use the tensor cores on Hopper. True: emulate on any device (correct, but slow)."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=32, ge=1, le=1_000_000)
    group_size: int = Field(default=8, ge=1, le=100_000)
    """Answers sampled for each prompt (siblings). Advantages are relative to the group."""
    max_prompt_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """A longer prompt gets no answer. It is recorded as `prompt_too_long` and counted."""
    max_new_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_k: int = Field(default=0, ge=0, le=1 << 24)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: Fraction = 0.0
    """Training refuses top_k, top_p and min_p, because the trainer could not reproduce the log-probs. Evaluation
    accepts them."""
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None


class EngineConfig(Section):
    page_size: Literal[16, 32, 64, 128] = 128
    """Tokens in one page of the KV cache. Siblings share whole pages of their prompt."""
    kv_cache_tokens: int | None = Field(default=None, ge=16, le=1 << 40)
    """Capacity of the cache; None: `kv_memory_fraction` of the free device memory (CPU: what a step needs)."""
    kv_memory_fraction: Fraction = 0.85
    """Share of the free device memory that the cache allocates. With `release_for_training: false` leave room for
    training: 0.35."""
    prefix_cache: Literal["drop_on_publish", "keep", "off"] = "drop_on_publish"
    """Whether a prompt reuses the pages of an earlier prompt with the same beginning. `keep` does so across new weights
    too; the answers are then not those of one policy. `keep` needs a cache that is not calibrated."""
    release_for_training: bool = True
    """On a GPU: free the cache's memory for training, and allocate the cache again for the next rollout."""
    max_batch: int = Field(default=256, ge=1, le=65_536)
    """Largest number of sequences decoded together."""
    prefill_chunk: int = Field(default=2048, ge=16, le=1 << 24)
    """Largest number of prompt tokens in one forward. A longer prompt is prefilled in chunks."""


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0.0, le=1.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    weight_decay_on: Literal["linears", "matrices", "all"] = "linears"
    """Which parameters `weight_decay` applies to. linears: matrices except the embedding. matrices: the embedding too,
    as in Hugging Face's Trainer and TRL. all: norms and biases too, as in verl."""
    master: Literal["float32", "stochastic_rounding"] = "float32"
    """float32 master weights (4 more bytes a parameter), or BF16 weights updated with stochastic rounding."""
    states: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Format of the two moments: 8, 4 or 2 bytes a parameter for both. Formats below float32 are rounded
    stochastically. 8bit has blocks of 128 that share a window of exponents."""
    offload: bool = False
    """Keep moments and masters in host memory and stream them through the GPU at each update. They then need only two
    buffers of device memory. The transfers take 2 s a step for 8 billion parameters with float32 states and masters,
    0.3 s with 8bit and stochastic rounding."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_fraction: Fraction = 0.0


class TrainerConfig(Section):
    optimizer: OptimizerConfig = OptimizerConfig()
    tokens_per_micro_batch: int = Field(default=16384, ge=16, le=1 << 30)
    """Token budget of one forward and backward. Neither loss nor gradient depends on it."""
    minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Number of optimizer steps per pass over the batch."""
    epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Passes over the batch. With several passes or several minibatches, proximal log-probs are computed first."""
    activation_checkpointing: Literal["none", "attention", "layer"] = "layer"
    """What the forward keeps for the backward. none: everything. attention: each layer's input and attention's output,
    so that attention is not run again. layer: only each layer's input."""
    checkpointed_layers: int | None = Field(default=None, ge=0, le=1_000)
    """`activation_checkpointing` applies to this number of first layers; the others keep everything. None: all layers.
    `octetrl check` prints the smallest number that fits. Each layer fewer saves one layer's forward."""
    weight_codes: Literal["kept", "remade"] = "kept"
    """The FP8 codes of trained weights during an update. kept: in both orientations, 2 bytes a weight. remade: freed,
    and quantised again for each product, with the same bytes. FP8 then trains in the memory of BF16."""
    logprob_chunk: int = Field(default=1024, ge=1, le=1 << 24)
    """Number of trained tokens whose logits exist at the same time."""


class CriticConfig(Section):
    """PPO's value model. Its precision, activation checkpointing and micro-batches are the policy's."""

    path: str | None = None
    """Hugging Face folder of its initial weights: a causal model, to which a value head of zeros is added, or a reward
    model with the same tokenizer. None: the policy's own weights."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Commonly ten times the policy's learning rate, because values must follow a policy that changes."""
    pretrain_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of first steps that train only the critic. The policy's schedule starts after them."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """Largest change of a value by several updates on one batch, in units of reward; null: no limit."""


class EvaluationConfig(Section):
    every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Number of steps between evaluations on the held-out tasks; 0: never during training."""
    samples: int = Field(default=1, ge=1, le=100_000)
    """Completions per task."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Estimate pass@k (one of k is right) and maj@k (the majority is right) for these k. Each is at most `samples`."""
    right_from: float = 1.0
    """Lowest reward of a completion that counts as right, for accuracy, pass@k and maj@k. Lower it if a reward below 1
    is good enough."""
    temperature: float = Field(default=0.0, ge=0.0)
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    """None: rollout.max_new_tokens."""


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=0, le=1_000_000_000)
    """Number of steps between checkpoints, besides one at the end; 0: only at the end."""
    keep_last: int = Field(default=2, ge=1, le=1_000_000_000)
    """Number of last checkpoints to keep. The last sound one also stays until the next step has shown that newer
    weights are sound (`collapse`)."""
    keep_best: int = Field(default=0, ge=0, le=1_000_000_000)
    best_metric: str = "eval/accuracy"


class MismatchConfig(Section):
    fail_above: float | None = Field(default=None, gt=1.0)
    """Stop the run if `mismatch/token_mult_prob_error` exceeds this."""
    warn_above: float = Field(default=1.03, gt=1.0)
    fail_on_difference: Literal["auto", True, False] = "auto"
    """Whether the run stops if parity is promised and a log-prob differs in any bit (`mismatch/unequal_tokens`). auto:
    stop if parity is promised. true: the same, and refuse a recipe without that promise. false: warn."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int | None = Field(default=None, ge=1, le=4_096)
    """Number of torch's threads on a CPU; None: torch's choice."""


class LoggingConfig(Section):
    console: Literal["auto", "plain", "quiet"] = "auto"
    console_every: int = Field(default=1, ge=1, le=1_000_000_000)
    """Number of steps between lines on the console. Files get every step."""
    tensorboard: bool = True
    wandb_project: str | None = None
    """Needs the `wandb` extra."""
    rollouts: bool = True
    """Write every rollout to rollouts/step_NNNNNN.jsonl."""


class Recipe(Section):
    """A whole run. `steps` is the number of steps: produce, learn, publish."""

    precision: Precision | None = None
    """Sets fp8.rollout, fp8.train and fp8.kv_cache together. bf16: no FP8. fp8_rollout: the rollout. fp8: rollout and
    training. fp8_full: both, and a calibrated FP8 KV cache."""
    numerics: Numerics = "parity"
    """`parity`: every op before a log-prob keeps one order of sums, so the trainer's log-probs equal the engine's bit
    for bit. `fast`: some ops use a faster form, and the two sides agree up to rounding."""
    model: ModelConfig
    fp8: Fp8Config = Fp8Config()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: ChosenAlgorithm = GrpoConfig()
    """The objective and everything that shapes its loss. `name` chooses it, and with it the fields of the section."""
    critic: CriticConfig = CriticConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mismatch: MismatchConfig = MismatchConfig()
    collapse: Literal["warn", "fail", "off"] = "warn"
    """What to do if reward, entropy, gradient norm or loss leave the range of the run's past (docs/collapse.md). warn:
    warn, and keep the last checkpoint from before. fail: also end the run with exit code 1. off: do not check."""
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=100, ge=1, le=1_000_000_000)
    output_dir: str = "runs/run"

    @property
    def sources(self) -> dict[str, DataSource]:
        """The training data by name: `data.sources`, or `algorithm.conversations` as the only source."""
        algorithm = self.algorithm
        if not isinstance(algorithm, DatasetSettings) or algorithm.conversations is None:
            return self.data.sources
        return {"conversations": DataSource(path=algorithm.conversations)}
