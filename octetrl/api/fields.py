"""The fields of a recipe, for annotations. Written by `python -m octetrl.config.recipe_page`."""
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict


class AgentFields(TypedDict, total=False):
    command: Sequence[str]
    prompt_on_stdin: bool
    env: Mapping[str, str]


class AlgorithmFields(TypedDict, total=False):
    name: str
    ratio_base: Literal["auto", "proximal", "generator"]
    corrections: Sequence[Literal["tis", "sequence_tis", "token_mask", "sequence_mask", "geometric_mask", "veto", "self_normalize"]]
    tis_cap: float
    sequence_tis_cap: float
    token_mask_range: Sequence[float]
    sequence_mask_range: Sequence[float]
    geometric_mask_range: Sequence[float]
    veto_floor: float
    veto_by: Literal["probability", "ratio"]
    masked_tokens: Literal["in_denominator", "left_out"]
    entropy_coefficient: float
    overlong: Literal["keep", "mask"]
    overlong_buffer: float
    drop_zero_variance: bool
    max_refills: int
    kl_coefficient: float
    kl_estimator: Literal["k1", "k2", "k3"]
    kl_gradient: Literal["auto", "estimator", "k2"]
    kl_in: Literal["loss", "reward", "reward_before_baseline"]
    kl_target: float | None
    reference_every: int
    token_weighting: Literal["token", "sequence", "constant"]
    constant_length: int
    clip_low: float
    clip_high: float
    normalize_advantages: bool
    dual_clip: float
    sapo_tau_positive: float
    sapo_tau_negative: float
    rloo_ratio: Literal["token", "sequence"]
    discount: float
    gae_lambda: float
    return_lambda: float | None
    truncated: Literal["terminal", "bootstrap"]
    conversations: str | None
    batch_size: int
    preference_beta: float
    preference_logprobs: Literal["sum", "mean"]
    label_smoothing: float
    reward_center: float
    best_of_group: int
    reward_threshold: float
    teacher: str | None
    teacher_precision: Literal["bf16", "fp8"]
    distillation: Literal["sampled", "reverse_kl", "forward_kl"]
    teacher_top_k: int


class BoxFields(TypedDict, total=False):
    kind: Literal["docker", "podman", "bubblewrap"]
    image: str | None
    cpus: float | None
    memory_mib: int
    network: Literal["off", "bridge", "host"]
    env: Mapping[str, str]
    program: Sequence[str] | None
    options: Sequence[str]


class CheckpointFields(TypedDict, total=False):
    every: int
    keep_last: int
    keep_best: int
    keep_every: int
    best_metric: str
    batches_ahead: Literal["drawn_again", "saved"]
    store: str | None


class ClusterFields(TypedDict, total=False):
    device: Literal["auto", "cpu", "cuda"]
    cpu_threads: int | None
    gpus: int | None
    cpus: int | None
    trainer_gpus: int | None
    engine_gpus: int | None
    trainer_cpus: int | None
    engine_cpus: int | None
    max_staleness: int
    weights_in_flight: Literal["off", "recompute_cache", "keep_cache"]
    weight_buffer: Literal["auto", "double", "single"]
    address: str | None
    nodes: int | None
    gpus_per_node: int | None
    cpus_per_node: int | None
    workers_per_gpu: int
    tensor_parallel: int
    gradients: Literal["local", "sharded"]
    context_parallel: Literal["auto", "off", 2, 4, 8]
    max_restarts: int
    deadlines: DeadlineFields


class CriticFields(TypedDict, total=False):
    path: str | None
    optimizer: OptimizerFields
    pretrain_steps: int
    value_clip: float | None


class CurriculumFields(TypedDict, total=False):
    order_by: str | None
    pass_rate: Sequence[float] | None
    retry_hard: float
    retry_easy: float
    unseen: float


class DataFields(TypedDict, total=False):
    sources: Mapping[str, DataSourceFields]
    too_long: Literal["refuse", "drop"]
    eval_dataset: str | Mapping[str, HeldOutSourceFields] | None
    eval_split: str | None
    eval_size: int


class DataSourceFields(TypedDict, total=False):
    path: str
    split: str
    subset: str | None
    columns: Mapping[str, str]
    weight: float


class DeadlineFields(TypedDict, total=False):
    silent_seconds: float
    first_seconds: float
    times_usual: float
    least_seconds: float
    machines_seconds: float


class EarlyStoppingFields(TypedDict, total=False):
    metric: str
    patience: int
    min_delta: float
    mode: Literal["auto", "max", "min"]


class EngineFields(TypedDict, total=False):
    backend: Literal["octetrl", "vllm", "openai"]
    page_size: Literal[16, 32, 64, 128]
    kv_cache_tokens: int | None
    kv_memory_fraction: float
    prefix_cache: Literal["drop_on_publish", "keep", "off"]
    state_snapshots: int | None
    release_for_training: bool
    max_batch: int
    prefill_chunk: int | None
    speculation: SpeculationFields
    openai: OpenaiFields | None


class EnvironmentFields(TypedDict, total=False):
    kind: Literal["reasoning_gym", "math", "jsonl", "code", "verifiers", "gymnasium", "openenv", "harbor", "python"]
    agent: AgentFields | None
    box: BoxFields | None
    dataset: str | None
    split: str
    subset: str | None
    eval_split: str | None
    eval_dataset: str | Mapping[str, EvalSetFields] | None
    columns: Mapping[str, str]
    reference_marker: str | None
    parameters: Mapping[str, Any]
    reward: str | Mapping[str, RewardFields] | None
    reward_model: str | None
    judge: JudgeFields | None
    tools: Sequence[str]
    corpus: str | None
    prompt_template: str
    answer_marker: str | None
    answer_tolerance: float
    curriculum: CurriculumFields | None
    train_size: int
    eval_size: int
    seed: int
    reward_timeout_seconds: float
    reward_memory_mib: int
    reward_workers: int | None
    load_timeout_seconds: float
    task_timeout_seconds: float
    turns: TurnsFields
    code_reward: Literal["all", "share"]
    sandbox: SandboxFields
    max_failure_share: float


class EvalSetFields(TypedDict, total=False):
    dataset: str
    split: str
    subset: str | None
    columns: Mapping[str, str] | None
    reference_marker: str | None
    size: int | None
    samples: int | None
    k: Sequence[int] | None
    temperature: float | None
    max_new_tokens: int | None


class EvaluationFields(TypedDict, total=False):
    every: int
    on_start: bool
    samples: int
    k: Sequence[int]
    right_from: float
    temperature: float
    max_new_tokens: int | None


class FailuresFields(TypedDict, total=False):
    max_empty_steps: int


class Fp8Fields(TypedDict, total=False):
    rollout: bool
    train: bool
    format: Literal["block", "mxfp8"]
    kv_cache: Literal["none", "calibrated", "dynamic", "int8"]
    kv_cache_tensors: Literal["both", "k", "v"]
    calibration: Literal["fused", "exact"]
    calibration_margin: float
    kv_replay: bool
    saturation_warn: float
    power_of_two: bool | None
    wgrad_blocks: Literal["square", "tokens"]
    bf16_first_layers: int
    bf16_last_layers: int
    ignore: Sequence[str]
    emulate: bool | None


class HeldOutSourceFields(TypedDict, total=False):
    path: str
    split: str
    subset: str | None
    columns: Mapping[str, str]


class JudgeFields(TypedDict, total=False):
    base_url: str
    model: str
    kind: Literal["chat", "reward_model"]
    template: str
    pattern: str
    json_key: str | None
    lowest: float
    highest: float
    path: str
    value_at: str
    api_key_variable: str | None
    temperature: float
    max_tokens: int
    timeout_seconds: float
    retries: int
    backoff_seconds: float
    concurrency: int


class LoggingFields(TypedDict, total=False):
    console: Literal["auto", "plain", "quiet"]
    console_every: int
    tensorboard: bool
    report_to: Sequence[Literal["wandb", "mlflow", "trackio", "swanlab"]]
    project: str
    run_name: str | None
    group: str | None
    tags: Sequence[str]
    wandb_project: str | None
    notify: NotifyFields | None
    rollouts: bool


class LoraFields(TypedDict, total=False):
    rank: int
    alpha: float
    targets: Sequence[str] | None
    experts: bool
    path: str | None


class MismatchFields(TypedDict, total=False):
    fail_above: float | None
    warn_above: float
    fail_on_difference: Literal["auto", True, False]


class MixedEnvironmentFields(TypedDict, total=False):
    kind: Literal["reasoning_gym", "math", "jsonl", "code", "verifiers", "gymnasium", "openenv", "harbor", "python"]
    agent: AgentFields | None
    box: BoxFields | None
    dataset: str | None
    split: str
    subset: str | None
    eval_split: str | None
    eval_dataset: str | Mapping[str, EvalSetFields] | None
    columns: Mapping[str, str]
    reference_marker: str | None
    parameters: Mapping[str, Any]
    reward: Any
    reward_model: str | None
    judge: JudgeFields | None
    tools: Sequence[str]
    corpus: str | None
    prompt_template: str
    answer_marker: str | None
    answer_tolerance: float
    curriculum: CurriculumFields | None
    train_size: int
    eval_size: int
    seed: int
    reward_timeout_seconds: float
    reward_memory_mib: int
    reward_workers: int | None
    load_timeout_seconds: float
    task_timeout_seconds: float
    turns: TurnsFields
    code_reward: Literal["all", "share"]
    sandbox: SandboxFields
    max_failure_share: float
    weight: float
    temperature: float | None
    group_size: int | None
    tasks: Any
    eval_tasks: Any


class ModelFields(TypedDict, total=False):
    path: str | None
    preset: Literal["tiny", "tiny-moe", "tiny-mla-moe", "tiny-delta", "qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3.5-4b", "qwen3.5-35b-a3b", "gpt-oss-20b", "moonlight-16b-a3b", "llama-3.1-8b", "llama-3.1-70b"] | None
    implementation: Literal["auto", "octetrl", "transformers"]
    init: Literal["pretrained", "random"]
    tokenizer: str | None
    chat_template: str | None
    dtype: Literal["bfloat16", "float32"]
    context_length: int
    lora: LoraFields | None


class NotifyFields(TypedDict, total=False):
    webhook: str | None
    command: Sequence[str]
    events: Sequence[Literal["warning", "failure", "end"]]
    timeout_seconds: float


class OpenaiFields(TypedDict, total=False):
    base_url: str
    model: str
    answers: Literal["tokens", "text"]
    api_key_variable: str | None
    concurrency: int
    timeout_seconds: float
    retries: int
    backoff_seconds: float


class OptimizerFields(TypedDict, total=False):
    lr: float
    betas: Sequence[float]
    eps: float
    weight_decay: float
    weight_decay_on: Literal["linears", "matrices", "all"]
    master: Literal["float32", "stochastic_rounding"]
    states: Literal["float32", "bfloat16", "8bit"]
    offload: bool
    max_grad_norm: float
    warmup_steps: int
    decay: Literal["constant", "linear", "cosine"]
    min_lr_fraction: float


class RewardFields(TypedDict, total=False):
    function: str
    weight: float
    of: Literal["completion", "group"]
    max_concurrent: int | None
    per_minute: int | None
    only: Literal["training", "evaluation"] | None


class RolloutFields(TypedDict, total=False):
    prompts_per_step: int
    group_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    stop: Sequence[str]
    learn_beside_tail: bool
    system_prompt: str | None
    chat_template_kwargs: Mapping[str, Any]
    history: Literal["recorded", "template"]
    tool_format: Literal["auto", "hermes", "llama3_json", "qwen3_coder", "glm45", "deepseek_v3", "kimi_k2", "minimax_m2", "mistral", "harmony", "response_template"]


class RouterFields(TypedDict, total=False):
    balance_loss: float
    z_loss: float
    bias_rate: float


class SandboxFields(TypedDict, total=False):
    level: Literal["landlock", "bubblewrap"]
    python: str | None
    wall_seconds: float
    cpu_seconds: int
    memory_mib: int
    disk_mib: int
    processes: int
    output_kib: int


class SpeculationFields(TypedDict, total=False):
    name: Literal["none", "ngram"]
    max_draft_tokens: int
    max_sequences: int
    ngrams: Sequence[int]
    min_gain: float
    memory_tokens: int


class TrainerFields(TypedDict, total=False):
    optimizer: OptimizerFields
    router: RouterFields
    tokens_per_micro_batch: int
    minibatches: int
    epochs: int
    activation_checkpointing: Literal["none", "attention", "layer"]
    checkpointed_layers: int | None
    weight_codes: Literal["kept", "remade"]
    gradients: Literal["float32", "bfloat16"]
    logprob_chunk: int


class TurnsFields(TypedDict, total=False):
    max_turns: int
    reply_timeout_seconds: float
    tool_timeout_seconds: float
    agent_timeout_seconds: float
    tool_failure: Literal["end", "tell"]
    max_in_flight: int | None


class OtherFields(TypedDict, total=False):
    fp8: Fp8Fields
    rollout: RolloutFields
    engine: EngineFields
    trainer: TrainerFields
    algorithm: AlgorithmFields
    critic: CriticFields
    data: DataFields
    environment: EnvironmentFields
    environments: Mapping[str, MixedEnvironmentFields]
    evaluation: EvaluationFields
    checkpoint: CheckpointFields
    mismatch: MismatchFields
    collapse: Literal["warn", "fail", "off"]
    failures: FailuresFields
    cluster: ClusterFields
    logging: LoggingFields
    early_stopping: EarlyStoppingFields | None
    seed: int
    epochs: float | None


class ChangedFields(OtherFields, total=False):
    steps: int
