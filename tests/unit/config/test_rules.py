"""Every rule of the tables refuses an example by the fields that it names. All messages are in refusals.txt, to be read
as text: `python -m tests.unit.config.test_rules` writes the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.config.rules import Rule
from octetrl.config.rules_environment import DATASET, ENVIRONMENT, MIXTURE, ONE_OF_SEVERAL, SEVERAL_TURNS
from octetrl.config.rules_running import BESIDE_TAIL, RUNNING, SERVER_TRAINS
from octetrl.config.rules_training import MODEL, RUN, TRAINING
from octetrl.config.schema import Recipe
from octetrl.config.section import Problem
from octetrl.config.validate import build_recipe
from tests.unit.config.test_validate import plain_tree

RULES = (*MODEL, *TRAINING, *DATASET, *ENVIRONMENT, *MIXTURE, *ONE_OF_SEVERAL, *RUNNING, *BESIDE_TAIL, *RUN)
MESSAGES = Path(__file__).with_name("refusals.txt")
Changes = dict[str, Any]

SFT = {"algorithm.name": "sft", "algorithm.conversations": "c.jsonl"}
RLOO = {"algorithm.name": "rloo", "algorithm.rloo_ratio": "sequence"}
KL = {"algorithm.kl_coefficient": 0.1}
BEFORE = {**KL, "algorithm.kl_in": "reward_before_baseline"}
ROLES = {"cluster.trainer_cpus": 1, "cluster.engine_cpus": 1}
AHEAD = {**ROLES, "cluster.max_staleness": 1}
FP8 = {"fp8.train": True, "fp8.rollout": True}
REMADE = {**FP8, "trainer.weight_codes": "remade"}
VLLM = {"engine.backend": "vllm"}
SERVER = {"engine.backend": "openai", "engine.openai.base_url": "http://host:8000/v1", "engine.openai.model": "m"}
TEXT = {**SERVER, "engine.openai.answers": "text"}
TAIL = {"rollout.learn_beside_tail": True, "cluster.cpus": 2}
SHARED = {"cluster.cpus": 2, "cluster.tensor_parallel": 2}
JUDGE = {"base_url": "http://localhost:8000/v1", "model": "m"}
PRESET = {"model.path": None, "model.preset": "tiny", "model.init": "random", "model.tokenizer": "t"}
CODE = {"environment.kind": "code", "environment.dataset": "tasks.jsonl"}

EXAMPLES: list[tuple[Changes, str]] = [  # what is asked; the fields of the problem
    # model
    ({"model.preset": "tiny"}, "model.path model.preset"),
    ({"model.path": None}, "model.path model.preset"),
    ({**PRESET, "model.init": "pretrained"}, "model.preset model.init"),
    ({**PRESET, "model.tokenizer": None}, "model.tokenizer model.preset"),
    ({"model.lora.targets": []}, "model.lora.targets"),
    ({"model.lora.targets": ["q_proj", "q_proj"]}, "model.lora.targets"),
    ({"model.dtype": "float32", **FP8}, "model.dtype fp8.rollout fp8.train fp8.kv_cache"),
    ({**FP8, "fp8.kv_cache_tensors": "k"}, "fp8.kv_cache_tensors fp8.kv_cache"),
    ({**FP8, "cluster.device": "cpu", "fp8.emulate": False}, "fp8.emulate cluster.device"),
    ({"rollout.prompts_per_step": 100_000, "rollout.group_size": 1000}, "rollout.prompts_per_step rollout.group_size"),
    ({"model.context_length": 1000}, "model.context_length rollout.max_prompt_tokens rollout.max_new_tokens"),
    (
        {**SFT, "model.context_length": 1000, "evaluation.every": 5},
        "model.context_length rollout.max_prompt_tokens rollout.max_new_tokens",
    ),
    (
        {"evaluation.max_new_tokens": 4000},
        "evaluation.max_new_tokens model.context_length rollout.max_prompt_tokens",
    ),
    # objective
    ({"algorithm.name": "my.losses:"}, "algorithm.name"),
    (
        {"algorithm.max_refills": 5, "algorithm.drop_zero_variance": False},
        "algorithm.max_refills algorithm.drop_zero_variance",
    ),
    ({"algorithm.kl_target": 0.1}, "algorithm.kl_target algorithm.kl_coefficient"),
    ({"algorithm.reference_every": 5}, "algorithm.reference_every algorithm.kl_coefficient"),
    ({"algorithm.kl_gradient": "k2"}, "algorithm.kl_gradient algorithm.kl_coefficient"),
    ({"algorithm.kl_in": "reward_before_baseline"}, "algorithm.kl_in algorithm.kl_coefficient"),
    ({**KL, "algorithm.kl_gradient": "k2", "algorithm.kl_in": "reward"}, "algorithm.kl_gradient algorithm.kl_in"),
    ({**BEFORE, "algorithm.overlong": "mask"}, "algorithm.overlong algorithm.kl_in"),
    ({**RLOO, "algorithm.token_weighting": "token"}, "algorithm.token_weighting algorithm.rloo_ratio"),
    ({**RLOO, **KL, "algorithm.kl_in": "reward"}, "algorithm.kl_in algorithm.rloo_ratio"),
    ({**SFT, "data.sources": {"a": {"path": "b"}}}, "algorithm.conversations data.sources"),
    ({"checkpoint.batches_ahead": "saved"}, "checkpoint.batches_ahead cluster.max_staleness"),
    ({**BEFORE, "algorithm.name": "reinforce_pp"}, "algorithm.kl_in algorithm.name"),
    ({"algorithm.corrections": ["tis", "sequence_tis"]}, "algorithm.corrections"),
    ({"algorithm.corrections": ["veto", "veto"]}, "algorithm.corrections"),
    (
        {"algorithm.corrections": ["token_mask"], "algorithm.ratio_base": "generator"},
        "algorithm.corrections algorithm.ratio_base",
    ),
    (
        {"algorithm.corrections": ["veto"], "algorithm.veto_by": "ratio", "algorithm.ratio_base": "generator"},
        "algorithm.corrections algorithm.ratio_base",
    ),
    ({"algorithm.token_mask_range": [1.1, 1.2]}, "algorithm.token_mask_range"),
    ({"algorithm.sequence_mask_range": [-0.1, 1.2]}, "algorithm.sequence_mask_range"),
    ({"algorithm.geometric_mask_range": [0.1, 0.9]}, "algorithm.geometric_mask_range"),
    ({"algorithm.veto_by": "ratio"}, "algorithm.veto_by algorithm.corrections"),
    ({"algorithm.masked_tokens": "left_out"}, "algorithm.masked_tokens algorithm.corrections"),
    ({"algorithm.name": "distill"}, "algorithm.teacher algorithm.name"),
    ({"algorithm.name": "sft"}, "algorithm.conversations data.sources algorithm.name"),
    ({"algorithm.name": "dpo"}, "algorithm.conversations data.sources algorithm.name"),
    ({**SFT, "fp8.kv_cache": "calibrated"}, "fp8.kv_cache algorithm.name"),
    ({"data.sources": {"chat": {"path": "nowhere.jsonl"}}}, "data.sources algorithm.name"),
    ({"algorithm.name": "rft", "algorithm.best_of_group": 9}, "algorithm.best_of_group rollout.group_size"),
    ({"rollout.group_size": 1}, "rollout.group_size algorithm.name"),
    ({"rollout.temperature": 1e-40}, "rollout.temperature"),
    ({"evaluation.temperature": 1e-40}, "evaluation.temperature"),
    ({"rollout.temperature": 0}, "rollout.temperature algorithm.name"),
    ({"rollout.top_k": 5}, "rollout.top_k algorithm.name"),
    ({"rollout.top_p": 0.9}, "rollout.top_p algorithm.name"),
    ({"rollout.min_p": 0.1}, "rollout.min_p algorithm.name"),
    ({"critic.pretrain_steps": 3}, "critic algorithm.name"),
    ({"algorithm.name": "ppo", "critic.pretrain_steps": 100}, "critic.pretrain_steps steps"),
    # memory of training
    ({"trainer.weight_codes": "remade"}, "trainer.weight_codes fp8.train"),
    ({**REMADE, "model.lora": {}}, "trainer.weight_codes model.lora"),
    (
        {**REMADE, "engine.release_for_training": False},
        "trainer.weight_codes engine.release_for_training",
    ),
    ({"trainer.gradients": "bfloat16", "model.dtype": "float32"}, "trainer.gradients model.dtype"),
    ({**SHARED, "trainer.gradients": "bfloat16"}, "trainer.gradients cluster.tensor_parallel"),
    (
        {"trainer.gradients": "bfloat16", "model.lora": {}},
        "trainer.gradients model.lora",
    ),
    (
        {"trainer.checkpointed_layers": 2, "trainer.activation_checkpointing": "none"},
        "trainer.checkpointed_layers trainer.activation_checkpointing",
    ),
    # the run
    ({"trainer.optimizer.betas": [0.9, 1.0]}, "trainer.optimizer.betas"),
    ({"algorithm.name": "ppo", "critic.optimizer.betas": [0.9, 1.0]}, "critic.optimizer.betas"),
    (
        {"trainer.optimizer.weight_decay_on": "all"},
        "trainer.optimizer.weight_decay_on trainer.optimizer.weight_decay",
    ),
    (
        {"algorithm.name": "ppo", "critic.optimizer.weight_decay_on": "matrices"},
        "critic.optimizer.weight_decay_on critic.optimizer.weight_decay",
    ),
    (
        {"model.dtype": "float32", "trainer.optimizer.master": "stochastic_rounding"},
        "trainer.optimizer.master model.dtype",
    ),
    (
        {"algorithm.name": "ppo", "model.dtype": "float32", "critic.optimizer.master": "stochastic_rounding"},
        "critic.optimizer.master model.dtype",
    ),
    ({"evaluation.samples": 4}, "evaluation.samples evaluation.temperature"),
    (
        {"trainer.minibatches": 257},
        "trainer.minibatches rollout.prompts_per_step rollout.group_size algorithm.batch_size",
    ),
    (
        {**SFT, "trainer.minibatches": 65},
        "trainer.minibatches rollout.prompts_per_step rollout.group_size algorithm.batch_size",
    ),
    ({"rollout.stop": [""]}, "rollout.stop"),
    ({"evaluation.every": 1, "environment.eval_size": 0}, "evaluation.every environment.eval_size"),
    ({"evaluation.k": [1, 4]}, "evaluation.k evaluation.samples"),
    ({"checkpoint.keep_best": 1}, "checkpoint.keep_best checkpoint.best_metric evaluation.every"),
    (
        {"checkpoint.keep_best": 1, "checkpoint.every": 7, "evaluation.every": 10, "steps": 69},
        "checkpoint.keep_best checkpoint.every evaluation.every steps",
    ),
    ({"seed": 2**63}, "seed environment.seed"),
    ({"output_dir": " "}, "output_dir"),
    ({"output_dir": "/"}, "output_dir"),
    ({"output_dir": "runs/\0"}, "output_dir"),
    # environment
    ({"environment.dataset": None}, "environment.dataset environment.kind"),
    ({**CODE, "environment.dataset": None}, "environment.dataset environment.kind"),
    ({"environment.parameters": {"a": 1}, "environment.kind": "math"}, "environment.parameters environment.kind"),
    ({"environment.answer_tolerance": 0.01}, "environment.answer_tolerance environment.kind"),
    ({"environment.columns": {"prompt": "question"}}, "environment.columns environment.kind"),
    ({"environment.reference_marker": "####"}, "environment.reference_marker environment.kind"),
    ({"environment.tools": ["calculator"], "environment.kind": "gymnasium"}, "environment.tools environment.kind"),
    ({"environment.reward": "a:b", "environment.judge": JUDGE}, "environment.judge environment.reward"),
    ({"environment.reward_model": "m", "environment.judge": JUDGE}, "environment.judge environment.reward_model"),
    ({"environment.reward_model": "m", "environment.reward": "a:b"}, "environment.reward_model environment.reward"),
    ({"environment.split": "test"}, "environment.split environment.dataset environment.kind"),
    ({"environment.subset": "main"}, "environment.subset environment.dataset environment.kind"),
    ({**CODE, "environment.eval_split": "test"}, "environment.eval_split environment.dataset environment.kind"),
    (
        {"environment.kind": "math", "environment.dataset": "a/b", "environment.eval_split": "train"},
        "environment.eval_split environment.split",
    ),
    ({"environment.reward": "rewards.py"}, "environment.reward"),
    ({"environment.tools": ["calculater"]}, "environment.tools"),
    ({"environment.tools": ["search"]}, "environment.corpus environment.tools"),
    ({"environment.corpus": "docs"}, "environment.corpus environment.tools"),
    ({"environment.prompt_template": "hello"}, "environment.prompt_template"),
    ({"environment.answer_marker": ""}, "environment.answer_marker"),
    ({"environment.kind": "math", "environment.reference_marker": ""}, "environment.reference_marker"),
    (
        {**CODE, "environment.sandbox.wall_seconds": 30.0},
        "environment.reward_timeout_seconds environment.kind environment.sandbox.wall_seconds",
    ),
    (
        {**CODE, "environment.sandbox.memory_mib": 8000},
        "environment.reward_memory_mib environment.kind environment.sandbox.memory_mib",
    ),
    ({"environments": {"sums": {"dataset": "chain_sum"}}}, "environment environments"),
    (
        {"environment": {}, "environments": {"sums": {"dataset": "chain_sum", "reward_model": "m"}}},
        "environments.sums.reward_model",
    ),
    # engine
    (
        {"engine.kv_cache_tokens": 2047},
        "engine.kv_cache_tokens engine.page_size rollout.max_prompt_tokens rollout.max_new_tokens",
    ),
    (
        {**VLLM, "engine.kv_cache_tokens": 4000},
        "engine.kv_cache_tokens engine.page_size engine.backend model.context_length",
    ),
    ({"fp8.kv_cache": "calibrated", "engine.prefix_cache": "keep"}, "engine.prefix_cache fp8.kv_cache"),
    ({"engine.speculation.name": "ngram", "engine.max_batch": 1}, "engine.max_batch engine.speculation.name"),
    ({**SERVER, "engine.backend": "octetrl"}, "engine.openai engine.backend"),
    ({**VLLM, "cluster.cpus": 2}, "cluster.cpus engine.backend"),
    ({**VLLM, **ROLES}, "cluster.trainer_cpus engine.backend"),
    ({**VLLM, "cluster.device": "cpu"}, "cluster.device engine.backend"),
    (
        {
            **VLLM,
            "cluster.trainer_gpus": 2,
            "cluster.engine_gpus": 6,
            "cluster.max_staleness": 1,
            "cluster.weights_in_flight": "recompute_cache",
        },
        "cluster.weights_in_flight engine.backend",
    ),
    ({**VLLM, "engine.speculation.name": "ngram"}, "engine.speculation.name engine.backend"),
    *(
        (
            {**VLLM, f"engine.speculation.{name}": given},
            f"engine.speculation.{name} engine.backend",
        )
        for name, given in (
            ("max_draft_tokens", 4),
            ("max_sequences", 4),
            ("ngrams", [4]),
            ("min_gain", 0.5),
            ("memory_tokens", 4),
        )
    ),
    ({**VLLM, "engine.prefix_cache": "keep"}, "engine.prefix_cache engine.backend"),
    ({**VLLM, "model.lora": {}}, "model.lora engine.backend"),
    ({**VLLM, "model.dtype": "float32"}, "model.dtype engine.backend"),
    ({**VLLM, "fp8.kv_cache": "dynamic"}, "fp8.kv_cache engine.backend"),
    (
        {**VLLM, "fp8.kv_cache": "calibrated", "fp8.kv_cache_tensors": "v"},
        "fp8.kv_cache_tensors engine.backend",
    ),
    ({**VLLM, "fp8.emulate": True}, "fp8.emulate engine.backend"),
    (
        {
            **VLLM,
            "cluster.address": "auto",
            "cluster.nodes": 2,
            "cluster.gpus_per_node": 3,
            "cluster.tensor_parallel": 2,
        },
        "cluster.tensor_parallel engine.backend cluster.gpus_per_node",
    ),
    (
        {**VLLM, "cluster.workers_per_gpu": 2},
        "cluster.workers_per_gpu engine.backend",
    ),
    ({**VLLM, **SFT}, "algorithm.name engine.backend"),
    ({**VLLM, "rollout.temperature": 0.005}, "rollout.temperature engine.backend"),
    ({**VLLM, "evaluation.temperature": 3}, "evaluation.temperature engine.backend"),
    ({**SERVER, "engine.openai.base_url": "http://u:secret@host/v1"}, "engine.openai.base_url"),
    ({**SERVER, "engine.openai.api_key_variable": "sk-secret"}, "engine.openai.api_key_variable"),
    ({"engine.backend": "openai"}, "engine.openai engine.backend"),
    ({**SERVER, "engine.speculation.name": "ngram"}, "engine.speculation.name engine.backend"),
    ({**SERVER, "environment.reward_model": "rm"}, "environment.reward_model engine.backend"),
    ({**SERVER, "cluster.gpus": 2}, "cluster.gpus engine.backend"),
    ({**TEXT, "rollout.top_k": 5}, "rollout.top_k engine.openai.answers"),
    ({**TEXT, "rollout.min_p": 0.1}, "rollout.min_p engine.openai.answers"),
    ({**TEXT, "rollout.stop": list("abcde")}, "rollout.stop engine.openai.answers"),
    # cluster
    ({"cluster.max_staleness": 1}, "cluster.max_staleness"),
    ({"cluster.weight_buffer": "single"}, "cluster.weight_buffer cluster.max_staleness"),
    ({"cluster.weights_in_flight": "keep_cache"}, "cluster.weights_in_flight cluster.max_staleness"),
    *(
        (
            {"cluster.trainer_gpus": 2, "cluster.engine_gpus": 1, f"cluster.{name}": 2},
            f"cluster.trainer_gpus cluster.{name}",
        )
        for name in ("gpus", "cpus")
    ),
    *(({**ROLES, f"cluster.{name}": 2}, f"cluster.trainer_cpus cluster.{name}") for name in ("gpus", "cpus")),
    ({"cluster.cpus": 2, "cluster.gpus": 2}, "cluster.cpus cluster.gpus"),
    ({"cluster.cpus": 2, "cluster.device": "cuda"}, "cluster.cpus cluster.device"),
    ({**ROLES, "cluster.device": "cuda"}, "cluster.trainer_cpus cluster.device"),
    ({"cluster.cpus": 2, "cluster.workers_per_gpu": 2}, "cluster.workers_per_gpu cluster.cpus"),
    ({**ROLES, "cluster.workers_per_gpu": 2}, "cluster.workers_per_gpu cluster.trainer_cpus"),
    (
        {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "cluster.gpus": 16},
        "cluster.gpus cluster.nodes cluster.gpus_per_node",
    ),
    *(
        (given, "cluster.trainer_gpus cluster.engine_gpus cluster.trainer_cpus cluster.engine_cpus")
        for given in ({"cluster.trainer_cpus": 2}, {"cluster.trainer_cpus": 2, "cluster.engine_gpus": 1})
    ),
    (
        {"cluster.trainer_gpus": 1, "cluster.engine_gpus": 2, "cluster.workers_per_gpu": 2},
        "cluster.trainer_gpus cluster.engine_gpus cluster.workers_per_gpu",
    ),
    ({"cluster.gpus": 2, "cluster.device": "cpu"}, "cluster.device cluster.gpus"),
    ({"cluster.nodes": 2}, "cluster.nodes cluster.gpus_per_node"),
    (
        {"cluster.nodes": 2, "cluster.gpus_per_node": 8},
        "cluster.nodes cluster.address",
    ),
    (
        {"cluster.trainer_cpus": 2, "cluster.engine_cpus": 2, "cluster.tensor_parallel": 2},
        "cluster.tensor_parallel cluster.trainer_gpus cluster.engine_gpus cluster.trainer_cpus cluster.engine_cpus",
    ),
    (
        {"cluster.gpus": 2, "cluster.workers_per_gpu": 2, "cluster.tensor_parallel": 2},
        "cluster.workers_per_gpu cluster.tensor_parallel",
    ),
    ({"cluster.cpus": 3, "cluster.tensor_parallel": 2}, "cluster.tensor_parallel cluster.gpus cluster.cpus"),
    ({"cluster.address": " "}, "cluster.address"),
    ({"cluster.cpus": 2, "cluster.address": "head:99999"}, "cluster.address"),
    ({"cluster.cpus": 2, "cluster.deadlines.silent_seconds": 0.5}, "cluster.deadlines.silent_seconds"),
    (
        {**SFT, **ROLES},
        "algorithm.name cluster.trainer_gpus cluster.engine_gpus cluster.trainer_cpus cluster.engine_cpus",
    ),
    ({**AHEAD, "algorithm.name": "rft"}, "cluster.max_staleness algorithm.name"),
    (
        {
            **AHEAD,
            "algorithm.name": "distill",
            "algorithm.distillation": "forward_kl",
            "algorithm.teacher": "t",
        },
        "cluster.max_staleness algorithm.name",
    ),
    (
        {**AHEAD, "trainer.epochs": 2, "algorithm.corrections": []},
        "cluster.max_staleness algorithm.corrections algorithm.ratio_base",
    ),
    # workers that share a model
    ({**SHARED, "engine.speculation.name": "ngram"}, "engine.speculation.name cluster.tensor_parallel"),
    ({**SHARED, "algorithm.name": "ppo"}, "algorithm.name cluster.tensor_parallel"),
    ({**SHARED, **KL, "algorithm.reference_every": 5}, "algorithm.reference_every cluster.tensor_parallel"),
    ({**SHARED, "environment.reward_model": "m"}, "environment.reward_model cluster.tensor_parallel"),
    # learning beside the tail
    ({**TAIL, "cluster.cpus": None}, "rollout.learn_beside_tail cluster.gpus cluster.cpus"),
    ({**TAIL, **SFT}, "rollout.learn_beside_tail algorithm.name"),
    *(
        ({**TAIL, "algorithm.name": name}, "algorithm.name rollout.learn_beside_tail")
        for name in ("reinforce_pp", "reinforce_pp_baseline", "ppo")
    ),
    (
        {**TAIL, **KL, "algorithm.kl_in": "reward"},
        "algorithm.kl_in rollout.learn_beside_tail",
    ),
    ({**TAIL, "algorithm.corrections": ["self_normalize"]}, "rollout.learn_beside_tail algorithm.corrections"),
    (
        {**TAIL, "algorithm.corrections": ["token_mask"], "algorithm.masked_tokens": "left_out"},
        "algorithm.masked_tokens rollout.learn_beside_tail",
    ),
    (
        {**TAIL, "algorithm.name": "distill", "algorithm.teacher": "t"},
        "algorithm.distillation rollout.learn_beside_tail",
    ),
    ({**TAIL, "trainer.minibatches": 2}, "trainer.minibatches rollout.learn_beside_tail"),
    ({**TAIL, "trainer.epochs": 2}, "trainer.epochs rollout.learn_beside_tail"),
    ({**TAIL, "trainer.gradients": "bfloat16"}, "trainer.gradients rollout.learn_beside_tail"),
    ({**TAIL, "trainer.router.z_loss": 0.1}, "trainer.router.z_loss rollout.learn_beside_tail"),
    ({**TAIL, "trainer.router.balance_loss": 0.1}, "trainer.router.balance_loss rollout.learn_beside_tail"),
    ({**TAIL, "cluster.gradients": "sharded"}, "cluster.gradients rollout.learn_beside_tail"),
    ({**TAIL, "cluster.cpus": 4, "cluster.tensor_parallel": 2}, "cluster.tensor_parallel rollout.learn_beside_tail"),
    ({**TAIL, **REMADE}, "trainer.weight_codes rollout.learn_beside_tail"),
    ({**TAIL, **VLLM, "cluster.cpus": None, "cluster.gpus": 2}, "engine.backend rollout.learn_beside_tail"),
    ({**TAIL, "environment.reward_model": "m"}, "environment.reward_model rollout.learn_beside_tail"),
    ({**TAIL, **ROLES, "cluster.cpus": None}, "cluster.trainer_cpus rollout.learn_beside_tail"),
    (
        {**TAIL, "cluster.cpus": None, "cluster.trainer_gpus": 1, "cluster.engine_gpus": 1},
        "cluster.trainer_gpus rollout.learn_beside_tail",
    ),
]


def problems(changes: Changes, *, training: bool = True) -> list[Problem]:
    _, found = build_recipe(plain_tree(*changes.items()), training=training)
    return found


def of_example(changes: Changes, fields: str) -> list[Problem]:
    """The problems with these fields. An evaluation's where a server answers."""
    found = problems(changes, training=changes.get("engine.backend") != "openai")
    return [problem for problem in found if problem.fields == tuple(fields.split())]


def messages() -> str:
    return "\n".join(dict.fromkeys(one.text for example in EXAMPLES for one in of_example(*example))) + "\n"


@pytest.mark.parametrize(
    ("changes", "fields"), EXAMPLES, ids=[f"{fields} {n}" for n, (_, fields) in enumerate(EXAMPLES)]
)
def test_what_does_not_go_together_is_refused_by_its_fields(changes: Changes, fields: str) -> None:
    (problem,) = of_example(changes, fields)
    assert (
        problem.text.startswith(f"{problem.fields[0]}: ") and "\n" not in problem.text and "secret" not in problem.text
    )


def test_a_server_does_not_train() -> None:
    assert [one.fields for one in problems(SERVER)] == [("engine.backend",)]
    assert problems(SERVER, training=False) == []


def test_every_rule_has_an_example() -> None:
    found = {problem.fields for example in EXAMPLES for problem in problems(example[0], training=True)}
    found |= {problem.fields for example in EXAMPLES for problem in problems(example[0], training=False)}
    found |= {tuple(one.replace("environments.sums", "environment") for one in fields) for fields in found}
    by_role = {rule for rule in RULES if "cluster.nodes" in rule.fields or "cluster.gpus_per_node" in rule.fields}
    assert {rule.fields for rule in RULES if rule not in by_role} <= found


@pytest.mark.parametrize("rule", [*RULES, *SEVERAL_TURNS, *SERVER_TRAINS], ids=lambda rule: rule.pattern)
def test_the_fields_of_a_rule_are_those_of_a_recipe(rule: Rule) -> None:
    from octetrl.config.problems import _by_name

    known = {full for names in _by_name().values() for full in names} | {"critic", "environment", "environments"}
    objectives = {f"algorithm.{field}" for section in _objectives() for field in section}
    assert set(rule.fields) <= known | objectives


def _objectives() -> list[list[str]]:
    from octetrl.config.algorithm import OBJECTIVES

    return [list(section.model_fields) for section in OBJECTIVES.values()]


def test_the_messages_are_those_that_were_read() -> None:
    assert messages() == MESSAGES.read_text(encoding="utf-8"), (
        "`python -m tests.unit.config.test_rules` writes the file"
    )


def test_an_objective_without_the_field_breaks_no_rule_about_it() -> None:
    assert not Rule("algorithm.kl_in!=loss").is_broken_by(
        Recipe.model_validate({"model": {}, "algorithm": {"name": "sft"}})
    )


if __name__ == "__main__":
    MESSAGES.write_text(messages(), encoding="utf-8")
