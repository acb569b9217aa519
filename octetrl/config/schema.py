"""The recipe: every section, every field, what it means, its unit and when to change it.

Frozen, torch-free, and strict: an unknown key is an error with the nearest known name (`config/load.py`), a wrong
type or range is an error here, an impossible combination is an error in `config/validate.py`; all problems of a
recipe are reported together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from octetrl.config.algorithm import AlgorithmConfig as AlgorithmConfig
from octetrl.config.data import DataConfig, DataSource
from octetrl.config.environment import EnvironmentConfig
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
    """PEFT folder to begin from (adapter_config.json, adapter_model.safetensors); None: A random, B zero."""


class ModelConfig(Section):
    path: str | None = None
    """Hugging Face folder with config.json, tokenizer and safetensors (BF16 or block-FP8). None with `preset`."""
    preset: Literal["tiny", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "llama-3.1-8b"] | None = None
    """A known shape, used with `init: random` where there are no weights. Exclusive with `path`."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` draws weights from `seed`; it needs `preset`, or `path` for its config.json."""
    tokenizer: str | None = None
    """Folder of the tokenizer; None: `path`."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the weights, the residual stream and everything that is not FP8. float32 is for comparisons."""
    context_length: int = Field(default=4096, ge=16, le=1 << 24)
    """Longest prompt + answer, in tokens. The KV cache and the checks are sized by it."""
    lora: LoraConfig | None = None
    """Train adapters alone, over weights that stay as they are; `{}` takes the defaults, null trains the weights."""


class Fp8Config(Section):
    """All of it follows from the one-line `precision:`; a field given here overrides that line."""

    rollout: bool = False
    """FP8 block-scaled linears in the engine."""
    train: bool = False
    """FP8 block-scaled linears in the trainer: forward, dgrad and wgrad."""
    kv_cache: Literal["none", "calibrated", "dynamic"] = "none"
    """E4M3 pages with one scale per layer and KV head (calibrated) or per token and KV head (dynamic)."""
    calibration: Literal["fused", "exact"] = "fused"
    """When `calibrated`: amax from the training forward that runs anyway, or one extra forward with the new weights."""
    calibration_margin: float = Field(default=1.05, ge=1.0, le=4.0)
    """scale = margin * amax / 448. Raise it when `fp8/kv_saturation` is not 0."""
    kv_replay: bool = True
    """The trainer's attention reads K and V through the rollout's quantiser (straight-through gradient)."""
    saturation_warn: Fraction = 0.001
    """Share of clamped K and V values above which the run says so."""
    power_of_two: bool = False
    """Scales rounded up to powers of two, as Blackwell wants them. Hopper has more exact float32 scales."""
    wgrad_blocks: Literal["square", "tokens"] = "square"
    """Blocks of the activations in wgrad: 128 tokens x 128 channels, whose GEMM is the faster, or 128 tokens x 1."""
    bf16_first_layers: int = Field(default=0, ge=0, le=1_000)
    bf16_last_layers: int = Field(default=0, ge=0, le=1_000)
    """Layers whose linears stay BF16, on both sides."""
    ignore: tuple[str, ...] = ()
    """Names of linears that stay BF16, on both sides; `*` matches any part: `layers.0.mlp.*`, `*.o_proj`."""
    emulate: bool | None = None
    """None: emulate FP8 on a CPU, use the tensor cores on Hopper. True: emulate anywhere (right numbers, slow)."""


class RolloutConfig(Section):
    prompts_per_step: int = Field(default=32, ge=1, le=1_000_000)
    group_size: int = Field(default=8, ge=1, le=100_000)
    """Siblings drawn from each prompt; advantages are relative to them."""
    max_prompt_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    """A longer prompt is not generated from: it is recorded as `prompt_too_long` and counted."""
    max_new_tokens: int = Field(default=1024, ge=1, le=1 << 24)
    temperature: float = Field(default=1.0, ge=0.0, le=10.0)
    top_k: int = Field(default=0, ge=0, le=1 << 24)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    min_p: Fraction = 0.0
    """Training refuses top_k, top_p and min_p: the trainer's log-probs could not follow. Evaluation takes them."""
    stop: tuple[str, ...] = ()
    system_prompt: str | None = None


class EngineConfig(Section):
    page_size: Literal[16, 32, 64, 128] = 128
    """Tokens in one page of the KV cache; a prompt is shared by its siblings in whole pages."""
    kv_cache_tokens: int | None = Field(default=None, ge=16, le=1 << 40)
    """Capacity of the cache; None: `kv_memory_fraction` of the free device memory (CPU: what a step needs)."""
    kv_memory_fraction: Fraction = 0.85
    """Of what is free when the cache is taken. With `release_for_training: false` leave room for training: 0.35."""
    prefix_cache: Literal["drop_on_publish", "keep", "off"] = "drop_on_publish"
    """Whether a prompt that begins like an earlier one takes over its pages. `keep` does so across new weights too: the
    answers are then no longer those of one policy. Only for a cache that is not calibrated."""
    release_for_training: bool = True
    """On a GPU: give the cache's memory back while training, and take what is free then for the next rollout."""
    max_batch: int = Field(default=256, ge=1, le=65_536)
    """Most sequences decoded together."""
    prefill_chunk: int = Field(default=2048, ge=16, le=1 << 24)
    """Most prompt tokens of one forward; a longer prompt is prefilled in chunks."""


class OptimizerConfig(Section):
    lr: float = Field(default=1e-6, gt=0.0, le=1.0)
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    weight_decay_on: Literal["linears", "matrices", "all"] = "linears"
    """What `weight_decay` falls on. linears: matrices other than the embedding. matrices: the embedding too, as Hugging
    Face's Trainer and TRL do. all: norms and biases too, as verl does."""
    master: Literal["float32", "stochastic_rounding"] = "float32"
    """float32 master weights (4 more bytes a parameter), or BF16 weights updated with stochastic rounding."""
    states: Literal["float32", "bfloat16", "8bit"] = "float32"
    """Of the two moments: 8, 4 or 2 bytes a parameter. Narrow ones are rounded stochastically; 8bit has blocks of 128
    that share a window of exponents."""
    offload: bool = False
    """Keep moments and masters in the host's memory and stream them over the GPU at each update: no device memory for
    them but two buffers, and the bus is crossed both ways, 2 s a step for 8 billion parameters with float32 states and
    masters, 0.3 s with 8bit and stochastic rounding."""
    max_grad_norm: float = Field(default=1.0, gt=0.0)
    warmup_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_fraction: Fraction = 0.0


class TrainerConfig(Section):
    optimizer: OptimizerConfig = OptimizerConfig()
    tokens_per_micro_batch: int = Field(default=16384, ge=16, le=1 << 30)
    """Token budget of one forward and backward. Neither loss nor gradient depends on it."""
    minibatches: int = Field(default=1, ge=1, le=1_000_000)
    """Optimizer steps a batch is split into."""
    epochs: int = Field(default=1, ge=1, le=1_000_000)
    """Passes over the batch. With more than one, or more than one minibatch, proximal log-probs are computed first."""
    activation_checkpointing: Literal["none", "attention", "layer"] = "layer"
    """What the backward finds kept: everything; each layer's input and attention's output, so that attention is not run
    again; or each layer's input alone."""
    checkpointed_layers: int | None = Field(default=None, ge=0, le=1_000)
    """How many layers, from the first, `activation_checkpointing` is for; the others keep everything. None: all.
    `octetrl check` says how few the memory allows: each layer less is a layer's forward less."""
    weight_codes: Literal["kept", "remade"] = "kept"
    """The FP8 codes of trained weights while they are updated. kept: in both orientations, 2 bytes a weight. remade:
    given back, and made anew, to the same bytes, for each product: FP8 then trains in the memory of BF16."""
    logprob_chunk: int = Field(default=1024, ge=1, le=1 << 24)
    """Trained tokens whose logits exist at one time."""


class CriticConfig(Section):
    """PPO's value model. Its precision, activation checkpointing and micro-batches are the policy's."""

    path: str | None = None
    """Hugging Face folder it begins with: a causal model, whose value head begins at zero, or a reward model of the
    same tokenizer. None: the policy's own weights."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Commonly ten times the policy's rate: values must follow a policy that moves."""
    pretrain_steps: int = Field(default=0, ge=0, le=1_000_000_000)
    """Steps at the beginning that train the critic alone; the policy's schedule begins after them."""
    value_clip: float | None = Field(default=0.2, gt=0.0)
    """How far several updates on one batch may move a value towards its return, in units of reward; null: any way."""


class EvaluationConfig(Section):
    every: int = Field(default=0, ge=0, le=1_000_000_000)
    """Evaluate on the held-out tasks each so many steps; 0: never during training."""
    samples: int = Field(default=1, ge=1, le=100_000)
    """Completions a task."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Estimate pass@k (one of k is right) and maj@k (the majority is) for these k, each at most `samples`."""
    right_from: float = 1.0
    """The reward from which a completion counts as right, for accuracy, pass@k and maj@k. Lower it where rewards come
    in degrees and less than 1 will do."""
    temperature: float = Field(default=0.0, ge=0.0)
    max_new_tokens: int | None = Field(default=None, ge=1, le=1 << 24)
    """None: rollout.max_new_tokens."""


class CheckpointConfig(Section):
    every: int = Field(default=50, ge=0, le=1_000_000_000)
    """Save each so many steps and at the end; 0: only at the end."""
    keep_last: int = Field(default=2, ge=1, le=1_000_000_000)
    """With 1, the one before stays too until a step has shown that the last one's weights are sound (`collapse`)."""
    keep_best: int = Field(default=0, ge=0, le=1_000_000_000)
    best_metric: str = "eval/accuracy"


class MismatchConfig(Section):
    fail_above: float | None = Field(default=None, gt=1.0)
    """Stop the run when `mismatch/token_mult_prob_error` exceeds this."""
    warn_above: float = Field(default=1.03, gt=1.0)
    fail_on_difference: Literal["auto", True, False] = "auto"
    """Stop the run when a log-prob that parity promises to be equal on both sides differs, in any bit
    (`mismatch/unequal_tokens`). auto: stop wherever parity is promised. true: the same, and a recipe for which parity
    is not promised is refused. false: warn."""


class ClusterConfig(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    cpu_threads: int | None = Field(default=None, ge=1, le=4_096)
    """Threads of torch on a CPU; None: torch's choice."""


class LoggingConfig(Section):
    console: Literal["auto", "plain", "quiet"] = "auto"
    console_every: int = Field(default=1, ge=1, le=1_000_000_000)
    """Steps between what the console shows; files get every step."""
    tensorboard: bool = True
    wandb_project: str | None = None
    """Needs the `wandb` extra."""
    rollouts: bool = True
    """Write every rollout to rollouts/step_NNNNNN.jsonl."""


class Recipe(Section):
    """A whole run. `steps` counts optimizer-visible steps: produce, learn, publish."""

    precision: Precision | None = None
    """Sets fp8.rollout, fp8.train and fp8.kv_cache together: bf16 (none), fp8_rollout (rollout), fp8 (both),
    fp8_full (both and a calibrated FP8 KV cache)."""
    numerics: Numerics = "parity"
    """`parity`: every op on the way to a log-prob keeps one order of sums, so the trainer's log-probs are the engine's,
    bit for bit. `fast`: ops that pay for it take their faster form, and both sides agree to rounding."""
    model: ModelConfig
    fp8: Fp8Config = Fp8Config()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    data: DataConfig = DataConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mismatch: MismatchConfig = MismatchConfig()
    collapse: Literal["warn", "fail", "off"] = "warn"
    """When reward, entropy, gradient norm or loss leave the run's own past for good (docs/collapse.md): say so and keep
    the last checkpoint from before, also end the run with exit code 1, or do not look."""
    cluster: ClusterConfig = ClusterConfig()
    logging: LoggingConfig = LoggingConfig()
    seed: int = Field(default=0, ge=0)
    steps: int = Field(default=100, ge=1, le=1_000_000_000)
    output_dir: str = "runs/run"

    @property
    def sources(self) -> dict[str, DataSource]:
        """What is learnt from, by name: `data.sources`, or `algorithm.conversations` as the only one."""
        if self.algorithm.conversations is None:
            return self.data.sources
        return {"conversations": DataSource(path=self.algorithm.conversations)}
