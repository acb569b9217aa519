"""`import octetrl`: train with functions and lists of this process, evaluate, export, generate."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import octetrl
from octetrl.cli.main import run_command
from octetrl.run.generate import generate_text
from octetrl.run.report import last_screen
from tests.e2e import tiny_rewards
from tests.e2e.tiny_run import RECIPE, read_lines
from tests.unit.environments import trl_functions

TASKS = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(12)]
SECTIONS: dict[str, Any] = {
    **{name: RECIPE[name] for name in ("rollout", "engine", "trainer", "checkpoint", "cluster", "logging", "seed")},
    "precision": "fp8_full",
    "environment": {"eval_size": 4},
}


@dataclass(frozen=True)
class AboutANumber(octetrl.Task):
    """Computes its prompt."""

    number: int = 0
    prompt: str = field(init=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", f"say {self.number}")


def settings(model: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    """Of `octetrl.train`, for two steps on the tiny model."""
    section = {"path": str(model), "context_length": 128}
    return {"model": section, "output_dir": folder, "steps": 2, **SECTIONS, **changes}


def test_from_a_closure_to_text(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[octetrl.Task] = []

    def noise(task: octetrl.Task, text: str) -> float:
        seen.append(task)
        return tiny_rewards.by_text(task, text)

    run = octetrl.train(tasks=TASKS, reward=noise, **settings(model, tmp_path / "run"))
    assert run.folder == tmp_path / "run" and repr(run) == f"FinishedRun(folder={run.folder!r})"
    assert [line["step"] for line in run.metrics] == [1, 2]
    assert run.metrics == read_lines(run.folder / "metrics.jsonl")
    assert all(line["mismatch/max_abs_diff"] == 0.0 for line in run.metrics)
    assert (run.recipe.environment.reward, run.recipe.environment.dataset) == ("given:noise", "given:tasks")
    assert {task.answer for task in seen} <= {task["answer"] for task in TASKS}

    assert [row["sibling"] for row in run.rollouts(1)] == [0, 1, 2, 3] * 2 and len(run.rollouts()) == 8
    for begin in (0, 4):
        rewards = [row["reward"] for row in run.rollouts(1)[begin : begin + 4]]
        spread = statistics.stdev(rewards)
        expected = [(reward - statistics.fmean(rewards)) / spread if spread else None for reward in rewards]
        assert [row["advantage"] for row in run.rollouts(1)[begin : begin + 4]] == pytest.approx(expected)
    assert run.rollouts(2)[0]["text"] != run.rollouts(1)[0]["text"]
    with pytest.raises(octetrl.UserError, match="1 to 2"):
        run.rollouts(3)
    assert run.best == run.folder / "checkpoints" / "step_000002", "the last, where none has the metric"
    assert run.report().read_text().startswith("<!doctype html>")
    page = run._repr_html_()
    assert str(run.folder) in page and page.count("<polyline") == 1, "the curve of the reward"
    frame = SimpleNamespace(DataFrame=lambda rows: SimpleNamespace(set_index=lambda name: (name, rows)))
    monkeypatch.setitem(sys.modules, "pandas", frame)
    assert run.to_pandas() == ("step", run.metrics)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(octetrl.UserError, match="pip install pandas"):
        run.to_pandas()
    report = run.evaluate(samples=2, temperature=1.0)
    assert (report.tasks, len(report.groups[0].rollouts)) == (4, 2)
    assert report.accuracy is not None
    exported = run.export(tmp_path / "exported")

    sampling = octetrl.SamplingParams(n=2, max_tokens=5, seed=3)
    first, second = octetrl.LLM(exported, precision="bf16", device="cpu").generate(["3 + 1 =", "hello"], sampling)
    asked, on_cpu = ["3 + 1 =", "hello"], {"device": "cpu"}
    [expected, _] = generate_text(str(exported), asked, sampling.for_engine(), cluster=on_cpu, seed=3, n=2)
    assert list(first.outputs) == expected
    assert (first.text, first.prompt, second.prompt) == (expected[0].text, "3 + 1 =", "hello")
    assert run.generate("3 + 1 =", sampling)[0].token_ids, "with the run's precision"

    recipe = str(run.folder / "config.yaml")
    assert run_command(["eval", str(exported), "--recipe", recipe]) == 2
    assert "was given to octetrl.train in Python" in capsys.readouterr().err
    proposed = [text for label, text in last_screen(run.folder, run.recipe)[1] if label in ("next", "")]
    assert proposed and not any("octetrl eval" in text for text in proposed), "eval can't find these tasks"
    resumed = octetrl.train(tasks=TASKS, reward=noise, resume=True, **settings(model, run.folder, steps=3))
    assert [line["step"] for line in resumed.metrics] == [1, 2, 3]


def test_reward_functions_of_trl_are_recognised_by_their_parameters(model: Path, tmp_path: Path) -> None:
    """A closure that takes columns by name, and one of a module that does not take prompts and is async."""
    told: list[tuple[str, str]] = []

    def noise(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        told.extend(zip(prompts, answer, strict=True))
        return [tiny_rewards.by_text(octetrl.Task("", ""), text) for text in completions]

    run = octetrl.train(tasks=TASKS, reward=noise, **settings(model, tmp_path / "run", steps=1))
    assert run.metrics[0]["reward/count"] == 8.0 and run.metrics[0]["reward/std"] > 0
    assert set(told) <= {(task["prompt"], task["answer"]) for task in TASKS} and told
    two = {"a": {"tasks": TASKS, "reward": trl_functions.polite}, "b": {"tasks": TASKS, "reward": noise}}
    sections = settings(
        model, tmp_path / "two", steps=1, environments={n: {**one, "eval_size": 4} for n, one in two.items()}
    )
    del sections["environment"]
    [line] = octetrl.train(**sections).metrics
    assert line["reward/count"] == 8.0
    with pytest.raises(octetrl.UserError, match="already holds a run; continue it with resume=True, or"):
        octetrl.train(tasks=TASKS, reward=noise, **settings(model, tmp_path / "run"))
    other = {**settings(model, tmp_path / "run"), "trainer": {"optimizer": {"lr": 3e-3}}, "tasks": TASKS}
    with pytest.raises(octetrl.UserError, match=r"^resume: .*allow=\['trainer.optimizer.lr', 'trainer.tokens"):
        octetrl.train(reward=noise, resume=True, **other)
    octetrl.train(reward=noise, resume=True, allow=["trainer"], **other)


def test_a_recipe_with_a_file_and_a_function_of_a_module_is_a_plain_run(model: Path, tmp_path: Path) -> None:
    """Nothing of it is `given`: the run's own recipe evaluates it from anywhere."""
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    changes = settings(model, tmp_path / "run", algorithm={"kl_coefficient": 0.0, "conversations": None})
    changes["environment"] = {"eval_size": 4}
    run = octetrl.train("demo_grpo", tasks=tmp_path / "tasks.jsonl", reward=tiny_rewards.by_text, **changes)
    environment = run.recipe.environment
    assert (environment.kind, environment.reward) == ("jsonl", "tests.e2e.tiny_rewards:by_text")
    assert environment.parameters == {}, "those of the recipe's other dataset are gone"
    assert run.recipe.algorithm.clip_high == 0.28, "the recipe's"
    assert run_command(["eval", str(run.folder), "--recipe", str(run.folder / "config.yaml")]) == 0


def test_an_environment_object(model: Path, tmp_path: Path) -> None:
    class Echo:
        def __init__(self) -> None:
            self.tasks = [octetrl.Task(str(number), f"say {number}") for number in range(8)]

        def score(self, task: octetrl.Task, text: str) -> float:
            return float(len(text) % 7)

    run = octetrl.train(tasks=Echo(), **settings(model, tmp_path / "run", steps=1))
    assert run.recipe.environment.dataset == "given:Echo"
    assert run.metrics[0]["reward/count"] == 8
    tasks = [AboutANumber(str(number), number=number) for number in range(8)]
    run = octetrl.train(
        tasks=tasks, reward=lambda task, text: float(task.number), **settings(model, tmp_path / "own", steps=1)
    )
    assert {row["prompt"] for row in run.rollouts(1)} <= {task.prompt for task in tasks}
    with pytest.raises(octetrl.UserError, match="'given:Half' has no score"):
        octetrl.train(tasks=type("Half", (), {"tasks": Echo().tasks})(), **settings(model, tmp_path / "half"))


def test_a_reward_that_hangs_is_counted_and_the_run_goes_on(model: Path, tmp_path: Path) -> None:
    def sometimes_hangs(task: octetrl.Task, text: str) -> float:
        if len(text) % 2:
            time.sleep(30.0)
        return float(len(text) % 7)

    limits = {"eval_size": 4, "reward_timeout_seconds": 1.0, "max_failure_share": 1.0, "reward_workers": 8}
    changes = settings(model, tmp_path / "run", steps=1, environment=limits)
    metrics = octetrl.train(tasks=TASKS, reward=sometimes_hangs, **changes).metrics[0]
    hung = metrics["rollout/reward_timeout"]
    assert hung > 0
    assert metrics["reward/count"] + hung == 8


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tasks": [{"prompt": "a"}, {"answer": "b"}]}, r"tasks\[1\]: .*'prompt'"),
        ({"tasks": [{"prompt": "a"}, 3]}, r"tasks\[1\]: an int; give a Task or a dictionary"),
        ({"tasks": [octetrl.Task("x", "a"), octetrl.Task("x", "b")]}, r"tasks\[1\]: id 'x' is that of tasks\[0\]"),
        (
            {"tasks": [AboutANumber("x")], "environment": {"prompt_template": "Q: {prompt}"}},
            r"tasks\[0\]: an AboutANumber does not take another prompt",
        ),
        ({"tasks": 3}, "tasks is an int; give a JSONL file"),
        ({"tasks": TASKS, "reward": lambda text: 1.0}, r"can't be called as reward\(task, text\)"),
        ({"tasks": TASKS, "reward": 1.0}, "reward is a float; give a function"),
        ({"tasks": TASKS, "precision": "fp9"}, "octetrl.train: precision: .*fp8_full"),
        ({"tasks": TASKS, "step": 3}, "octetrl.train: step: unknown key; did you mean 'steps'"),
        ({"tasks": TASKS, "rollout": {"max_tokens": 3}}, "octetrl.train: .*max_tokens.*max_new_tokens"),
        ({"tasks": TASKS, "seed": object()}, "not JSON serializable"),
        ({"tasks": TASKS, "resume": True}, "resume needs output_dir"),
        ({"tasks": TASKS}, "context_length: 1024 is shorter than"),
        ({}, "octetrl.train: tasks: missing; give a JSONL file"),
        ({"environments": {"a": {}}}, r"octetrl.train: environments\.a\.tasks: missing; give a JSONL file"),
        ({"environments": [TASKS]}, "environments is a list; give a dictionary of environments by name"),
        ({"environments": {"a": {"tasks": TASKS, "reward": 3}}}, "train: environments.a: reward is an int; give a"),
        ({"environments": {"a": {"tasks": TASKS, "weight": math.nan}}}, "environments.a.weight: Out of range float"),
        ({"environments": {1: {"tasks": TASKS}}}, "environments: the name 1 is an int; give a text"),
        ({"environments": {"a": {}}, "tasks": TASKS}, "train: tasks and environments exclude each other"),
        ({"environments": {"a": {}}, "reward": math.cos}, "train: reward and environments exclude each other"),
    ],
)
def test_what_is_wrong_is_refused_and_leaves_nothing(
    given: dict[str, Any], said: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(octetrl.UserError, match=said):
        octetrl.train(model=model, cluster={"device": "cpu"}, **given)
    assert not list(tmp_path.iterdir())


def test_a_model_that_is_missing_where_the_run_would_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's folder has the model's name, and must not be taken for it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(octetrl.UserError, match="model folder 'runs/mine' does not exist"):
        octetrl.train(model="runs/mine", tasks=TASKS, cluster={"device": "cpu"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "prompts", "said"),
    [
        ({"precision": "fp9"}, [], "precision is 'fp9'; give bf16"),
        ({"context_length": 10**6}, [], "context_length: 1000000 is out of range, this model has 1024 positions"),
        ({"context_length": 32}, ["a b c d e f g h i j k l m n o p"], r"prompt 0 has \d+ tokens and max_tokens is 16"),
        ({"context_length": 32}, [[1, 2], [1, 10**6]], "prompt 1 holds 1000000"),
        ({"context_length": 32}, [[1, 2], None], "prompt 1 is a NoneType; give a text, or token ids"),
        ({"context_length": 32}, {"role": "user"}, "dict was given; give a text, token ids, or a list of them"),
    ],
)
def test_llm_refuses(model: Path, settings: dict[str, Any], prompts: Any, said: str) -> None:
    with pytest.raises(octetrl.UserError, match=said):
        octetrl.LLM(model, **{"device": "cpu", **settings}).generate(prompts)


def test_token_ids_are_taken_as_they_are(model: Path) -> None:
    llm = octetrl.LLM(model, precision="fp8_full", context_length=64, device="cpu")
    [text] = llm.generate("3 + 1 =")
    [tokens] = llm.generate(text.prompt_token_ids)
    assert (tokens.prompt, tokens.outputs) == (None, text.outputs)
    assert llm.generate([]) == []
    calls = [llm.generate(["3 + 1 ="] * 8, octetrl.SamplingParams(max_tokens=12, seed=seed)) for seed in range(4)]
    assert len({one.outputs[0].token_ids for call in calls for one in call}) == 32, "no seed of a place is another's"
    with ThreadPoolExecutor(3) as threads:  # a notebook's threads take turns
        assert all(again == [text] for again in threads.map(llm.generate, ["3 + 1 ="] * 3))


def test_importing_needs_no_torch_and_names_are_all_there() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "before = set(sys.modules); import octetrl; loaded = set(sys.modules) - before\n"
        "libraries = {name.partition('.')[0] for name in loaded} - sys.stdlib_module_names\n"
        "assert libraries == {'octetrl'}, libraries\n"
        "octetrl.Task, octetrl.SamplingParams, octetrl.UserError, octetrl.train, octetrl.__version__\n"
        "assert set(octetrl.__all__) <= set(dir(octetrl))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert all(getattr(octetrl, name) is not None for name in octetrl.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = octetrl.Trainer
