"""The real mini-swe-agent repairs a repository with a failing test; the policy is a double that knows how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from octetrl.environments.programs import Model
from octetrl.environments.turns import Conversation, reward
from octetrl.records import RolloutStatus, Task
from tests.required import missing
from tests.unit.agents.programs import played_task

MINI = Path(os.environ.get("OCTETRL_OUTSIDE", ""), "mini")
if not MINI.is_file():
    missing("mini-swe-agent", "not installed; `make test-outside` runs them", whole_module=True)
COMMANDS = (
    "python3 -m unittest 2>&1 | tail -n 5",
    "sed -i 's/a - b/a + b/' sums.py && python3 -m unittest 2>&1 | tail -n 1",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)
SETTINGS = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class Repairs:
    """A task: a repository whose test fails."""

    tasks = (Task("sums", "add() in sums.py is wrong; make its test pass."),)

    async def agent(self, task: Task, model: Model) -> str:
        folder = Conversation.current().state.folder = tempfile.TemporaryDirectory()
        Path(folder.name, "sums.py").write_text("def add(a, b):\n    return a - b\n")
        Path(folder.name, "test_sums.py").write_text(
            "import unittest, sums\nclass T(unittest.TestCase):\n    def test(self):\n"
            "        self.assertEqual(sums.add(2, 3), 5)\n"
        )
        where = str(Path(folder.name, "trajectory.json"))
        command = [str(MINI), "-m", f"openai/{model.name}", "-t", task.text, "-y", "--exit-immediately", "-l", "0"]
        own = {**SETTINGS, "MSWEA_GLOBAL_CONFIG_DIR": folder.name, "HOME": folder.name}
        result = await model.run([*command, "-o", where], cwd=folder.name, env=own)
        if result.code != 0:
            raise RuntimeError(f"mini: {result.stopped or result.code} {result.stdout[-2000:]} {result.stderr[-2000:]}")
        return str(json.loads(Path(where).read_text())["info"]["exit_status"])

    @reward
    def repaired(self, conversation: Conversation) -> float:
        command = [sys.executable, "-m", "unittest"]
        folder = conversation.state.folder.name
        return float(subprocess.run(command, cwd=folder, capture_output=True, check=False).returncode == 0)


def test_it_repairs_a_repository_and_what_the_policy_said_is_one_sample() -> None:
    words = iter(COMMANDS)

    def says(*_: Any) -> str:
        call = {"name": "bash", "arguments": {"command": next(words)}}
        return f"I look.\n<tool_call>\n{json.dumps(call)}\n</tool_call>"

    rollout, session = played_task(Repairs(), 0, says, context=6000, agent_seconds=240.0)
    assert (rollout.status, rollout.reward) == (RolloutStatus.SCORED, 1.0), rollout.detail
    assert rollout.result == "Submitted" and len(session.submitted) == len(COMMANDS)
    assert [len(turns) for turns in rollout.segments] == [len(COMMANDS)]
    assert rollout.metrics["agent/sampled_tokens"] == sum(len(turn.completion.token_ids) for turn in rollout.turns)
