"""Every rule of the tables refuses an example. All messages, each with its fields, are in refusals.txt, to be read as
text: `python -m tests.unit.config.test_rules` writes the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octetrl.config.problems import field_names
from octetrl.config.rules import Rule
from octetrl.config.rules_environment import AGENT, DATASET, ENVIRONMENT, MIXTURE, ONE_OF_SEVERAL, SEVERAL_TURNS
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
TWO_SOURCES = {
    "algorithm.name": "sft",
    "data.sources": {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl", "columns": {"prompt": "q"}}},
}
RLOO = {"algorithm.name": "rloo", "algorithm.rloo_ratio": "sequence"}
KL = {"algorithm.kl_coefficient": 0.1}
BEFORE = {**KL, "algorithm.kl_in": "reward_before_baseline"}
ROLES = {"cluster.trainer_cpus": 1, "cluster.engine_cpus": 1}
AHEAD = {**ROLES, "cluster.max_staleness": 1}
FP8 = {"fp8.train": True, "fp8.rollout": True}
MX = {**FP8, "fp8.format": "mxfp8"}
REMADE = {**FP8, "trainer.weight_codes": "remade"}
VLLM = {"engine.backend": "vllm"}
SERVER = {"engine.backend": "openai", "engine.openai.base_url": "http://host:8000/v1", "engine.openai.model": "m"}
TEXT = {**SERVER, "engine.openai.answers": "text"}
TAIL = {"rollout.learn_beside_tail": True, "cluster.cpus": 2}
SHARED = {"cluster.cpus": 2, "cluster.tensor_parallel": 2}
TOGETHER = {"cluster.cpus": 2, "cluster.context_parallel": "auto"}
JUDGE = {"base_url": "http://localhost:8000/v1", "model": "m"}
PRESET = {"model.path": None, "model.preset": "tiny", "model.init": "random", "model.tokenizer": "t"}
FILE = {"kind": "jsonl", "dataset": "b.jsonl"}
AGENT_COMMAND = {"environment.agent": {"command": ["a"]}}
CODE = {"environment.kind": "code", "environment.dataset": "tasks.jsonl"}

EXAMPLES: list[Changes] = [
    # model
    {"model.preset": "tiny"},
    {"model.path": None},
    {**PRESET, "model.init": "pretrained"},
    {**PRESET, "model.tokenizer": None},
    {"model.lora.targets": []},
    {"model.lora.targets": ["q_proj", "q_proj"]},
    {"model.dtype": "float32", **FP8},
    {**FP8, "fp8.kv_cache_tensors": "k"},
    {**MX, "fp8.emulate": False},
    {**MX, "cluster.cpus": 2},
    {**FP8, "cluster.device": "cpu", "fp8.emulate": False},
    {"rollout.prompts_per_step": 100_000, "rollout.group_size": 1000},
    {"model.context_length": 1000},
    {**SFT, "model.context_length": 1000, "evaluation.every": 5},
    {"evaluation.max_new_tokens": 4000},
    # objective
    {"algorithm.name": "my.losses:"},
    {"algorithm.max_refills": 5, "algorithm.drop_zero_variance": False},
    {"algorithm.kl_target": 0.1},
    {"algorithm.reference_every": 5},
    {"algorithm.kl_gradient": "k2"},
    {"algorithm.kl_in": "reward_before_baseline"},
    {**KL, "algorithm.kl_gradient": "k2", "algorithm.kl_in": "reward"},
    {**BEFORE, "algorithm.overlong": "mask"},
    {**BEFORE, "rollout.history": "template"},
    {**RLOO, "algorithm.token_weighting": "token"},
    {**RLOO, **KL, "algorithm.kl_in": "reward"},
    {**SFT, "data.sources": {"a": {"path": "b"}}},
    {"checkpoint.batches_ahead": "saved"},
    {**BEFORE, "algorithm.name": "reinforce_pp"},
    {"algorithm.corrections": ["tis", "sequence_tis"]},
    {"algorithm.corrections": ["veto", "veto"]},
    {"algorithm.corrections": ["token_mask"], "algorithm.ratio_base": "generator"},
    {"algorithm.corrections": ["veto"], "algorithm.veto_by": "ratio", "algorithm.ratio_base": "generator"},
    {"algorithm.token_mask_range": [1.1, 1.2]},
    {"algorithm.sequence_mask_range": [-0.1, 1.2]},
    {"algorithm.geometric_mask_range": [0.1, 0.9]},
    {"algorithm.veto_by": "ratio"},
    {"algorithm.masked_tokens": "left_out"},
    {"algorithm.name": "distill"},
    {"algorithm.name": "sft"},
    {"algorithm.name": "dpo"},
    {**SFT, "fp8.kv_cache": "calibrated"},
    {"data.sources": {"chat": {"path": "nowhere.jsonl"}}},
    {"algorithm.name": "rft", "algorithm.best_of_group": 9},
    {"rollout.group_size": 1},
    {"rollout.temperature": 1e-40},
    {"evaluation.temperature": 1e-40},
    {"rollout.temperature": 0},
    {"rollout.top_k": 5},
    {"rollout.top_p": 0.9},
    {"rollout.min_p": 0.1},
    {"critic.pretrain_steps": 3},
    {"algorithm.name": "ppo", "critic.pretrain_steps": 100},
    # memory of training
    {"trainer.weight_codes": "remade"},
    {**REMADE, "model.lora": {}},
    {**REMADE, "engine.release_for_training": False},
    {"trainer.gradients": "bfloat16", "model.dtype": "float32"},
    {**SHARED, "trainer.gradients": "bfloat16"},
    {"trainer.gradients": "bfloat16", "model.lora": {}},
    {"trainer.checkpointed_layers": 2, "trainer.activation_checkpointing": "none"},
    # the run
    {"trainer.optimizer.betas": [0.9, 1.0]},
    {"algorithm.name": "ppo", "critic.optimizer.betas": [0.9, 1.0]},
    {"trainer.optimizer.weight_decay_on": "all"},
    {"algorithm.name": "ppo", "critic.optimizer.weight_decay_on": "matrices"},
    {"model.dtype": "float32", "trainer.optimizer.master": "stochastic_rounding"},
    {"algorithm.name": "ppo", "model.dtype": "float32", "critic.optimizer.master": "stochastic_rounding"},
    {"evaluation.samples": 4},
    {"trainer.minibatches": 257},
    {**SFT, "trainer.minibatches": 65},
    {"rollout.stop": [""]},
    {"evaluation.every": 1, "environment.eval_size": 0},
    {"evaluation.k": [1, 4]},
    {"checkpoint.keep_best": 1},
    {"checkpoint.keep_best": 1, "checkpoint.every": 7, "evaluation.every": 10, "steps": 69},
    {"checkpoint.store": "runs/mine"},
    {"logging.notify": {"events": ["end"]}},
    {"seed": 2**63},
    {"output_dir": " "},
    {"output_dir": "/"},
    {"output_dir": "runs/\0"},
    # environment
    {"environment.dataset": None},
    {**CODE, "environment.dataset": None},
    {"environment.parameters": {"a": 1}, "environment.kind": "math"},
    {"environment.answer_tolerance": 0.01},
    {"environment.columns": {"prompt": "question"}},
    {"environment.reference_marker": "####"},
    {"environment.tools": ["calculator"], "environment.kind": "gymnasium"},
    {"environment.reward": "a:b", "environment.judge": JUDGE},
    {"environment.reward_model": "m", "environment.judge": JUDGE},
    {"environment.reward_model": "m", "environment.reward": "a:b"},
    {"environment.box": {"kind": "bubblewrap", "cpus": 2.0}, **AGENT_COMMAND},
    {"environment.box": {"kind": "bubblewrap", "network": "bridge"}, **AGENT_COMMAND},
    {"environment.box": {"kind": "podman"}, **AGENT_COMMAND},
    {"environment.box": {"image": "a"}},
    {"environment.split": "test"},
    {"environment.subset": "main"},
    {**CODE, "environment.eval_split": "test"},
    {"environment.kind": "math", "environment.dataset": "a/b", "environment.eval_split": "train"},
    {"environment.reward": "rewards.py"},
    {"environment.tools": ["calculater"]},
    {"environment.tools": ["search"]},
    {"environment.corpus": "docs"},
    {"environment.prompt_template": "hello"},
    {"environment.answer_marker": ""},
    {"environment.kind": "math", "environment.reference_marker": ""},
    {**CODE, "environment.sandbox.wall_seconds": 30.0},
    {**CODE, "environment.sandbox.memory_mib": 8000},
    {"environments": {"sums": {"dataset": "chain_sum"}}},
    {"environment": {}, "environments": {"sums": {"dataset": "chain_sum", "reward_model": "m"}}},
    {"environment.reward": {"right": {"function": "right"}}},
    {"environment.reward": {}},
    {"environment.reward": {"a": {"function": "a:b", "only": "evaluation"}}},
    {
        "environment.reward": {
            "a": {"function": "a:b", "only": "training"},
            "c": {"function": "c:d", "only": "evaluation"},
        }
    },
    {"environment.reward": {"a": {"function": "a:b"}, "c": {"function": "c:d", "only": "evaluation", "weight": 2.0}}},
    {"environment.eval_dataset": "test.jsonl"},
    {"environment.curriculum": {"order_by": "level"}, **SFT},
    {"environment.curriculum": {}},
    {"environment.curriculum": {"pass_rate": [0.9, 0.1]}},
    *({"environment.curriculum": {"order_by": "a", name: 0.5}} for name in ("retry_hard", "retry_easy", "unseen")),
    {"environment.kind": "math", "environment.dataset": "a.jsonl", "environment.eval_dataset": {}},
    *(
        {"environment.kind": "math", "environment.dataset": "a.jsonl", "environment.eval_dataset": {name: one}}
        for name, one in {
            "environments": {"dataset": "b.jsonl"},
            "b": {"dataset": "b.jsonl", "k": [4]},
            "greedy": {"dataset": "b.jsonl", "samples": 4},
            "parted": {"dataset": "b.jsonl", "split": "test"},
            "long": {"dataset": "b.jsonl", "max_new_tokens": 1 << 20},
        }.items()
    ),
    {"environments": {"a": {"dataset": "x"}, "b": {**FILE, "eval_dataset": {"a": {"dataset": "t.jsonl"}}}}},
    {"environments": {"a": {"dataset": "x", "group_size": 1}, "b": {"dataset": "y"}}},
    {"environments": {"a": {"dataset": "x", "group_size": 4}}, "algorithm.name": "rft", "algorithm.best_of_group": 5},
    {
        "environments": {"a": {"dataset": "x", "temperature": 0.5}},
        "algorithm.name": "distill",
        "algorithm.teacher": "t",
    },
    {"environments": {"a": {"dataset": "x", "temperature": 3.0}}, **VLLM},
    {"environments": {"a": {"dataset": "x", "group_size": 4}}, **TAIL},
    {"evaluation.on_start": True, "environment.eval_size": 0},
    {"early_stopping": {"patience": 2}},
    # held-out examples, epochs
    *(
        {name: 1 if name == "data.eval_size" else "a"}
        for name in ("data.eval_dataset", "data.eval_split", "data.eval_size")
    ),
    {"epochs": 2},
    {**SFT, "epochs": 2, "steps": 100},
    {**SFT, "data.eval_size": 1, "data.eval_dataset": "h.jsonl"},
    {**SFT, "data.eval_size": 1, "data.eval_split": "test"},
    {**SFT, "data.eval_split": "test", "data.eval_dataset": {"a": {"path": "h.jsonl"}}},
    {**SFT, "data.eval_split": "test"},
    {"algorithm.name": "sft", "data.sources": {"a": {"path": "a/b"}}, "data.eval_split": "train"},
    {**TWO_SOURCES, "data.eval_dataset": "h.jsonl"},
    {"callbacks": ["notify"]},
    # engine
    {"engine.kv_cache_tokens": 2047},
    {**VLLM, "engine.kv_cache_tokens": 4000},
    {"fp8.kv_cache": "calibrated", "engine.prefix_cache": "keep"},
    {"engine.speculation.name": "ngram", "engine.max_batch": 1},
    {**SERVER, "engine.backend": "octetrl"},
    {**VLLM, "cluster.cpus": 2},
    {**VLLM, **ROLES},
    {**VLLM, "cluster.device": "cpu"},
    {
        **VLLM,
        "cluster.trainer_gpus": 2,
        "cluster.engine_gpus": 6,
        "cluster.max_staleness": 1,
        "cluster.weights_in_flight": "recompute_cache",
    },
    {**VLLM, "engine.speculation.name": "ngram"},
    *(
        {**VLLM, f"engine.speculation.{name}": given}
        for name, given in (
            ("max_draft_tokens", 4),
            ("max_sequences", 4),
            ("ngrams", [4]),
            ("min_gain", 0.5),
            ("memory_tokens", 4),
        )
    ),
    {**VLLM, "engine.prefix_cache": "keep"},
    {**VLLM, "model.lora": {}},
    {**VLLM, "model.dtype": "float32"},
    {**VLLM, "fp8.kv_cache": "dynamic"},
    {**VLLM, "fp8.kv_cache": "calibrated", "fp8.kv_cache_tensors": "v"},
    {**VLLM, "fp8.emulate": True},
    {**VLLM, "fp8.format": "mxfp8"},
    {**VLLM, "cluster.address": "auto", "cluster.nodes": 2, "cluster.gpus_per_node": 3, "cluster.tensor_parallel": 2},
    {**VLLM, "cluster.address": "auto", "cluster.nodes": 2, "cluster.cpus_per_node": 3},
    {**VLLM, "cluster.workers_per_gpu": 2},
    {**VLLM, **SFT},
    {**VLLM, "rollout.temperature": 0.005},
    {**VLLM, "evaluation.temperature": 3},
    {**SERVER, "engine.openai.base_url": "http://u:secret@host/v1"},
    {**SERVER, "engine.openai.api_key_variable": "sk-secret"},
    {"engine.backend": "openai"},
    {**SERVER, "engine.speculation.name": "ngram"},
    {**SERVER, "environment.reward_model": "rm"},
    {**SERVER, "cluster.gpus": 2},
    {**TEXT, "rollout.top_k": 5},
    {**TEXT, "rollout.min_p": 0.1},
    {**TEXT, "rollout.stop": list("abcde")},
    # cluster
    {"cluster.max_staleness": 1},
    {"cluster.weight_buffer": "single"},
    {"cluster.weights_in_flight": "keep_cache"},
    *({"cluster.trainer_gpus": 2, "cluster.engine_gpus": 1, f"cluster.{name}": 2} for name in ("gpus", "cpus")),
    *({**ROLES, f"cluster.{name}": 2} for name in ("gpus", "cpus")),
    {"cluster.cpus": 2, "cluster.gpus": 2},
    {"cluster.cpus": 2, "cluster.device": "cuda"},
    {**ROLES, "cluster.device": "cuda"},
    {"cluster.cpus": 2, "cluster.workers_per_gpu": 2},
    {**ROLES, "cluster.workers_per_gpu": 2},
    {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "cluster.gpus": 16},
    {"cluster.nodes": 1, "cluster.cpus_per_node": 8, "cluster.gpus": 16},
    {"cluster.nodes": 1, "cluster.gpus_per_node": 8, "cluster.cpus_per_node": 8},
    {"cluster.nodes": 1, "cluster.cpus_per_node": 8, "cluster.cpus": 8},
    {"cluster.nodes": 1, "cluster.cpus_per_node": 8, "cluster.device": "cuda"},
    {"cluster.nodes": 1, "cluster.cpus_per_node": 8, "cluster.workers_per_gpu": 2},
    *(given for given in ({"cluster.trainer_cpus": 2}, {"cluster.trainer_cpus": 2, "cluster.engine_gpus": 1})),
    {"cluster.trainer_gpus": 1, "cluster.engine_gpus": 2, "cluster.workers_per_gpu": 2},
    {"cluster.gpus": 2, "cluster.device": "cpu"},
    {"cluster.nodes": 2},
    {"cluster.nodes": 2, "cluster.gpus_per_node": 8},
    {"cluster.trainer_cpus": 2, "cluster.engine_cpus": 2, "cluster.tensor_parallel": 2},
    {"cluster.gpus": 2, "cluster.workers_per_gpu": 2, "cluster.tensor_parallel": 2},
    {"cluster.cpus": 3, "cluster.tensor_parallel": 2},
    {"cluster.address": " "},
    {"cluster.cpus": 2, "cluster.address": "head:99999"},
    {"cluster.cpus": 2, "cluster.deadlines.silent_seconds": 0.5},
    {**SFT, **ROLES},
    {**AHEAD, "algorithm.name": "rft"},
    {**AHEAD, "algorithm.name": "distill", "algorithm.distillation": "forward_kl", "algorithm.teacher": "t"},
    {**AHEAD, "trainer.epochs": 2, "algorithm.corrections": []},
    # workers that share a model
    {**SHARED, "engine.speculation.name": "ngram"},
    {**SHARED, "algorithm.name": "ppo"},
    {**SHARED, **KL, "algorithm.reference_every": 5},
    {**SHARED, "environment.reward_model": "m"},
    # learning beside the tail
    {**TAIL, "cluster.cpus": None},
    {**TAIL, **SFT},
    *({**TAIL, "algorithm.name": name} for name in ("reinforce_pp", "reinforce_pp_baseline", "ppo")),
    {**TAIL, **KL, "algorithm.kl_in": "reward"},
    {**TAIL, "algorithm.corrections": ["self_normalize"]},
    {**TAIL, "algorithm.corrections": ["token_mask"], "algorithm.masked_tokens": "left_out"},
    {**TAIL, "algorithm.name": "distill", "algorithm.teacher": "t"},
    {**TAIL, "trainer.minibatches": 2},
    {**TAIL, "trainer.epochs": 2},
    {**TAIL, "trainer.gradients": "bfloat16"},
    {**TAIL, "trainer.router.z_loss": 0.1},
    {**TOGETHER, "cluster.tensor_parallel": 2},
    {**TOGETHER, **TAIL},
    {**TOGETHER, "algorithm.name": "ppo"},
    {"cluster.cpus": 3, "cluster.context_parallel": 2},
    {**TAIL, "trainer.router.balance_loss": 0.1},
    {**TAIL, "cluster.gradients": "sharded"},
    {**TAIL, "cluster.cpus": 4, "cluster.tensor_parallel": 2},
    {**TAIL, **REMADE},
    {**TAIL, **VLLM, "cluster.cpus": None, "cluster.gpus": 2},
    {**TAIL, "environment.reward_model": "m"},
    {**TAIL, **ROLES, "cluster.cpus": None},
    {**TAIL, "cluster.cpus": None, "cluster.trainer_gpus": 1, "cluster.engine_gpus": 1},
]


def problems(changes: Changes, *, training: bool = True) -> list[Problem]:
    _, found = build_recipe(plain_tree(*changes.items()), training=training)
    return found


def messages() -> str:
    """Each problem of the examples once, with its fields. A recipe with a server is one of an evaluation."""
    found = [one for each in EXAMPLES for one in problems(each, training=each.get("engine.backend") != "openai")]
    return "".join(dict.fromkeys(f"{one.text} [{' '.join(one.fields)}]\n" for one in found))


def test_the_messages_are_those_that_were_read() -> None:
    assert messages() == MESSAGES.read_text(encoding="utf-8"), (
        "`python -m tests.unit.config.test_rules` writes the file"
    )


@pytest.mark.parametrize("changes", EXAMPLES, ids=str)
def test_what_does_not_go_together_is_refused_in_one_line(changes: Changes) -> None:
    found = problems(changes, training=changes.get("engine.backend") != "openai")
    assert found and all("\n" not in one.text and "secret" not in one.text for one in found)


def test_a_server_does_not_train() -> None:
    assert [one.fields for one in problems(SERVER)] == [("engine.backend",)]
    assert problems(SERVER, training=False) == []


def test_every_rule_has_an_example() -> None:
    each = [problems(changes, training=training) for changes in EXAMPLES for training in (True, False)]
    found = {problem.fields for problems in each for problem in problems}
    found |= {tuple(one.replace("environments.sums", "environment") for one in fields) for fields in found}
    machines = {"cluster.nodes", "cluster.gpus_per_node", "cluster.cpus_per_node"}
    by_role = {rule for rule in RULES if machines & set(rule.fields)}
    assert {rule.fields for rule in RULES if rule not in by_role} <= found


@pytest.mark.parametrize("rule", [*RULES, *SEVERAL_TURNS, *AGENT, *SERVER_TRAINS], ids=lambda rule: rule.pattern)
def test_the_fields_of_a_rule_are_those_of_a_recipe(rule: Rule) -> None:
    assert set(rule.fields) <= set(field_names(Recipe))


def test_an_objective_without_the_field_breaks_no_rule_about_it() -> None:
    assert not Rule("algorithm.kl_in!=loss").is_broken_by(
        Recipe.model_validate({"model": {}, "algorithm": {"name": "sft"}})
    )


if __name__ == "__main__":
    MESSAGES.write_text(messages(), encoding="utf-8")
