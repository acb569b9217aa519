"""An OpenEnv server of one environment, guess a number, on a free port of this machine, which it prints."""

from __future__ import annotations

import socket
from typing import Any

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: int


class Told(Observation):
    said: str


class GuessEnvironment(Environment[Guess, Told, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._target = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: Any) -> Told:
        self._target = (seed or 0) % 5
        return Told(said=f"Round {seed}: a number from 0 to 4")

    def step(self, action: Guess, timeout_s: float | None = None, **given: Any) -> Told:
        if action.guess == 99:
            raise ArithmeticError("no such number")
        if action.guess == self._target:
            return Told(said="right", done=True, reward=1.0)
        return Told(said="higher" if action.guess < self._target else "lower", reward=-0.25)

    @property
    def state(self) -> State:
        return State(step_count=0)


if __name__ == "__main__":
    app = create_fastapi_app(GuessEnvironment, Guess, Told, max_concurrent_envs=2)
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
