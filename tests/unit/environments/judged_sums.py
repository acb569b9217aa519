"""An Env of verifiers with two agents, as a plugin of its own."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from verifiers.v1.envs.single_agent import SingleAgentEnvConfig


class JudgedConfig(SingleAgentEnvConfig):
    judge: vf.AgentConfig = vf.AgentConfig()


class JudgedEnv(vf.Env[JudgedConfig]):
    """A judge that the policy plays, too; it is not trained."""

    async def setup(self, agents: Any) -> None:
        agents.judge.trainable = False

    async def run(self, task: Any, agents: Any) -> None:
        await agents.agent.run(task)
        await agents.judge.run(task)


__all__ = ["JudgedEnv"]
