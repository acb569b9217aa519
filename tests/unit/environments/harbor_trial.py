"""harbor_trial.py TASK TRIALS ROOT COMMAND: one trial of Harbor, with an agent that runs COMMAND in a box of bubblewrap
over the root file system ROOT. Prints the reward. It runs with Harbor's Python."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path
from typing import Any

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HARBOR_TELEMETRY": "off"}
from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.models.trial.config import TrialConfig
from harbor.trial.trial import Trial


class Box(BaseEnvironment):
    @staticmethod
    def type() -> str:
        return "bubblewrap"

    def _validate_definition(self) -> None:
        """None is needed."""

    def here(self, path: str | Path) -> Path:
        return Path(self.trial_paths.trial_dir, "box", str(path).lstrip("/"))

    async def start(self, force_build: bool) -> None:
        shutil.copytree(os.environ["ROOT"], self.here(""), symlinks=True)
        for name in ("agent", "verifier", "artifacts"):
            self.here(f"/logs/{name}").mkdir()

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.here(""))

    async def upload_file(self, source_path: Any, target_path: str) -> None:
        shutil.copy(source_path, self.here(target_path))

    async def upload_dir(self, source_dir: Any, target_dir: str) -> None:
        shutil.copytree(source_dir, self.here(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path: str, target_path: Any) -> None:
        shutil.copy(self.here(source_path), target_path)

    async def download_dir(self, source_dir: str, target_dir: Any) -> None:
        shutil.copytree(self.here(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(
        self, command: str, cwd: Any = None, env: Any = None, timeout_sec: Any = None, user: Any = None
    ) -> Any:
        words = ["bwrap", "--unshare-all", "--die-with-parent", "--bind", str(self.here("")), "/", "--proc", "/proc"]
        words += ["--dev", "/dev", "--chdir", cwd or "/app", "--clearenv", "--setenv", "PATH", "/bin"]
        for name, value in (env or {}).items():
            words += ["--setenv", name, value]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, "sh", "-c", command, stdout=pipe, stderr=pipe)
        out, err = await asyncio.wait_for(process.communicate(), timeout_sec)
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


class Agent(BaseAgent):
    @staticmethod
    def name() -> str:
        return "command"

    def version(self) -> str:
        return "1"

    async def setup(self, environment: Any) -> None:
        """None is needed."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        assert instruction.strip() == "Write 7 + 8 into /app/answer.", instruction
        await environment.exec(os.environ["COMMAND"])


async def main(task: str, trials: str) -> None:
    given = {
        "task": {"path": task},
        "trials_dir": trials,
        "agent": {"import_path": "harbor_trial:Agent"},
        "environment": {"import_path": "harbor_trial:Box"},
    }
    result = await (await Trial.create(TrialConfig.model_validate(given))).run()
    assert result.exception_info is None, result.exception_info
    print(result.verifier_result.rewards["reward"])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    os.environ |= {"ROOT": sys.argv[3], "COMMAND": sys.argv[4]}
    asyncio.run(main(sys.argv[1], sys.argv[2]))
