"""What the study compares: arms (changes of a recipe), models, and tables of a model and a task.

An arm changes precision, corrections or the optimizer, and nothing else. `precision` and `corrections` are named in
every arm, so no arm depends on a recipe's default. Where engine and trainer have the same bits, the ratio that
corrections use is 1 in a step's first update, and these recipes make one update a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from lab.study import remainders
from octetrl.run.demo import Answers

Changes = tuple[str, ...]
TIS = "algorithm.corrections=[tis]"
NONE = "algorithm.corrections=[]"


@dataclass(frozen=True, slots=True)
class Arm:
    """`first`, `last`: share of the layers whose linears stay BF16."""

    changes: Changes
    means: str
    first: float = 0.0
    last: float = 0.0

    def for_layers(self, layers: int) -> Changes:
        kept = {"bf16_first_layers": self.first, "bf16_last_layers": self.last}
        return (
            *self.changes,
            *(f"fp8.{name}={max(1, round(share * layers))}" for name, share in kept.items() if share),
        )


def _arm(
    precision: str, means: str, *changes: str, correction: str = TIS, first: float = 0.0, last: float = 0.0
) -> Arm:
    return Arm((f"precision={precision}", correction, *changes), means, first, last)


MIS = (
    "algorithm.corrections=[sequence_tis,sequence_mask]",
    "algorithm.sequence_tis_cap=2.0",
    "algorithm.sequence_mask_range=[0.0,2.0]",
)
ARMS: Mapping[str, Arm] = {
    "bf16": _arm("bf16", "BF16 everywhere: what all arms are compared with"),
    "fp8_rollout": _arm("fp8_rollout", "FP8 linears in the rollout, BF16 training, no correction", correction=NONE),
    "fp8_rollout_tis": _arm("fp8_rollout", "the same with truncated importance sampling"),
    "fp8_rollout_mis": _arm("fp8_rollout", "the same with masked importance sampling", *MIS[1:], correction=MIS[0]),
    "fp8": _arm("fp8", "FP8 linears in rollout and training"),
    "fp8_full": _arm("fp8_full", "FP8 linears and a calibrated FP8 KV cache"),
    "fp8_full_dynamic": _arm("fp8_full", "FP8 linears and a dynamic FP8 KV cache", "fp8.kv_cache=dynamic"),
    "fp8_full_int8": _arm("fp8_full", "FP8 linears and an int8 KV cache", "fp8.kv_cache=int8"),
    "fp8_full_k": _arm("fp8_full", "fp8_full, K alone in FP8, V in BF16", "fp8.kv_cache_tensors=k"),
    "fp8_full_v": _arm("fp8_full", "fp8_full, V alone in FP8, K in BF16", "fp8.kv_cache_tensors=v"),
    "bf16_kv_calibrated": _arm("bf16", "BF16 linears and a calibrated FP8 KV cache", "fp8.kv_cache=calibrated"),
    "bf16_kv_dynamic": _arm("bf16", "BF16 linears and a dynamic FP8 KV cache", "fp8.kv_cache=dynamic"),
    "bf16_kv_int8": _arm("bf16", "BF16 linears and an int8 KV cache", "fp8.kv_cache=int8"),
    "all_rollout_tis": _arm(
        "fp8_rollout",
        "FP8 linears and KV cache in the rollout, BF16 training without KV replay, TIS",
        "fp8.kv_cache=calibrated",
        "fp8.kv_replay=false",
    ),
    "fp8_full_no_replay": _arm("fp8_full", "fp8_full without KV replay in training", "fp8.kv_replay=false"),
    "fp8_full_margin2": _arm("fp8_full", "fp8_full, calibration margin 2", "fp8.calibration_margin=2.0"),
    "fp8_full_exact": _arm("fp8_full", "fp8_full, calibration by a forward of its own", "fp8.calibration=exact"),
    "fp8_full_last": _arm("fp8_full", "fp8_full, linears of the last eighth of the layers in BF16", last=0.125),
    "fp8_full_first": _arm("fp8_full", "fp8_full, linears of the first eighth of the layers in BF16", first=0.125),
    "fp8_wgrad_tokens": _arm("fp8", "fp8 with wgrad's blocks by tokens, not square", "fp8.wgrad_blocks=tokens"),
    "bf16_8bit": _arm("bf16", "BF16, moments of 8 bits", "trainer.optimizer.states=8bit"),
    "bf16_stochastic": _arm(
        "bf16", "BF16, weights rounded stochastically", "trainer.optimizer.master=stochastic_rounding"
    ),
    "fp8_full_8bit_stochastic": _arm(
        "fp8_full",
        "fp8_full, moments of 8 bits, weights rounded stochastically",
        "trainer.optimizer.states=8bit",
        "trainer.optimizer.master=stochastic_rounding",
    ),
}
NINE = (
    *("bf16", "fp8_rollout", "fp8_rollout_tis", "fp8", "fp8_full", "fp8_full_dynamic", "fp8_full_int8"),
    *("bf16_kv_calibrated", "all_rollout_tis"),
)
HEADLINE = ("bf16", "fp8_full", "fp8_full_int8", "all_rollout_tis")
FOUR = ("bf16", "fp8_rollout_tis", "fp8", "fp8_full")

WIDE = {  # Qwen3-0.6B's width in 8 layers: 126 million parameters besides the embedding
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
}

Kind = Literal["tiny", "wide", "pretrained"]


@dataclass(frozen=True, slots=True)
class StudyTable:
    """One model and one task: recipes, what is changed in all arms, and the usual arms.

    start: the cold start's recipe, made once for each seed and shared by all arms; None: the model is pretrained, its
    folder is `--model`, and all seeds share it. answers: a task's bare and worked answer in the cold start's examples;
    None: those of sums. experts: the cold start becomes a mixture, its experts copies of its MLPs. job_seconds: a first
    guess, until a job has ended.
    """

    kind: Kind
    layers: int
    recipe: str
    common: Changes
    start: str | None
    start_changes: Changes
    steps: int
    arms: tuple[str, ...] = tuple(ARMS)
    job_seconds: float = 60.0
    shape: Mapping[str, int] = field(default_factory=dict)  # changes of the preset `tiny`
    answers: Answers | None = None
    experts: bool = False


TWO_TERMS = "environment.parameters={min_terms: 2, max_terms: 3, min_digits: 1, max_digits: 2}"
# a fixed size of the cache: many jobs share a GPU, and each would take its share of what is free
SMALL_COMMON = ("environment.eval_size=1024", "evaluation.every=15", "engine.kv_cache_tokens=131072")
WIDE_LENGTHS = (
    "model.context_length=512",
    "rollout.max_prompt_tokens=64",
    "environment.parameters={min_terms: 8, max_terms: 12, min_digits: 1, max_digits: 1}",
    "environment.train_size=31000",
)
REMAINDERS = (
    "environment.kind=python",
    "environment.dataset=lab.study.remainders:Remainders",
    "environment.parameters={}",
    "environment.answer_marker=null",
)
WORDS = (
    "environment.kind=python",
    "environment.dataset=lab.study.word_problems:WordProblems",
    "environment.parameters={}",
    "environment.reward=null",
)
PRETRAINED_COMMON = (
    "environment.eval_size=1024",
    "evaluation.every=20",
    "engine.kv_cache_tokens=80000",
    "engine.max_batch=512",
    "rollout.prompts_per_step=32",
    "trainer.tokens_per_micro_batch=8192",
    "trainer.optimizer.lr=1.5e-5",
)
SMOLLM2 = "grpo_chain-sum_smollm2-135m_1gpu_fp8-full"
TABLES: Mapping[str, StudyTable] = {
    "tiny-sums": StudyTable("tiny", 4, "demo_grpo", SMALL_COMMON, "demo_sft", (), 45),
    "tiny-remainders": StudyTable(
        "tiny",
        4,
        "demo_grpo",
        (*SMALL_COMMON, *REMAINDERS),
        "demo_sft",
        REMAINDERS,
        45,
        NINE,
        answers=(remainders.bare_answer, remainders.worked_answer),
    ),
    "moe-sums": StudyTable("tiny", 4, "demo_moe", SMALL_COMMON, "demo_sft", (), 45, HEADLINE, 90.0, experts=True),
    "wide-sums": StudyTable(
        "wide",
        8,
        "demo_grpo",
        (
            *SMALL_COMMON,
            *WIDE_LENGTHS,
            "rollout.max_new_tokens=192",
            "engine.page_size=128",
            "trainer.tokens_per_micro_batch=32768",
            "trainer.optimizer.lr=2e-6",
        ),
        "demo_sft",
        (*WIDE_LENGTHS, "trainer.tokens_per_micro_batch=32768", "trainer.optimizer.lr=4e-4", "steps=150"),
        60,
        FOUR,
        150.0,
        WIDE,
    ),
    "smollm2-sums": StudyTable(
        "pretrained", 30, SMOLLM2, (*PRETRAINED_COMMON, TWO_TERMS), None, (), 40, NINE, job_seconds=300.0
    ),
    "smollm2-sums-150": StudyTable(
        "pretrained",
        30,
        SMOLLM2,
        (*PRETRAINED_COMMON, TWO_TERMS, "environment.eval_size=2048", "evaluation.every=50"),
        None,
        (),
        150,
        HEADLINE,
        job_seconds=600.0,
    ),
    "smollm2-words": StudyTable(
        "pretrained",
        30,
        SMOLLM2,
        (*PRETRAINED_COMMON, *WORDS, "environment.eval_size=2048", "evaluation.every=40"),
        None,
        (),
        120,
        HEADLINE,
        job_seconds=400.0,
    ),
}
