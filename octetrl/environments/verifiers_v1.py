"""Runs tasksets of `verifiers` from version 0.4 on (`verifiers.v1`), its Harbor, OpenEnv, NeMo Gym and TextArena too.

    environment: {kind: verifiers, dataset: gsm8k_v1, parameters: {agent: {harness: {id: "null"}}}}

verifiers runs each episode: taskset, harness, runtime, scoring. Its harness calls the policy through verifiers' own
server, whose one client calls ours (octetrl/agents/), with the id of the trace as `X-Session-ID`.

    of the episode                                          status
    ok                                                      SCORED       sum of the trained agent's rewards
    ok, ended by max_turns, max_*_tokens, agent_timeout     UNFINISHED   the same
    scoring raised, or gave no reward                       REWARD_ERROR
    scoring took too long                                   REWARD_TIMEOUT
    the harness, or its model call, failed                  AGENT_ERROR
    the runtime or a tunnel failed                          BOX_ERROR
    taskset, tools or env failed                            ENVIRONMENT_ERROR
    setup, finalize or the episode took too long            ENVIRONMENT_TIMEOUT

`trace.reward` alone says 0 in each of them. Calls of agents that are not trainable (judges), and of attempts that
verifiers has repeated, are answered and not trained on.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock, Thread
from typing import Any

from octetrl.environments.dialogue import Failed
from octetrl.environments.programs import Model
from octetrl.environments.scoring import log
from octetrl.environments.turns import Conversation, reward
from octetrl.records import RolloutStatus, Task
from octetrl.system.errors import UserError, error_line

_FIELD = "environment.dataset"
_INSTALL = "pip install 'octetrl[verifiers]', in an environment without openai 3"
_LIMITS = ("max_turns", "max_input_tokens", "max_output_tokens", "max_total_tokens", "agent_timeout")
_STATUSES = {  # by the class of the error, of a trace
    **dict.fromkeys(("HarnessError", "ProviderError"), RolloutStatus.AGENT_ERROR),
    **dict.fromkeys(("SandboxError", "TunnelError", "InterceptionError"), RolloutStatus.BOX_ERROR),
}
_END_SECONDS = 30.0  # for the servers of a taskset
_NO_KEY = "OCTETRL_NO_KEY"  # a variable that is not set: the session is the key


def verifiers_environment(
    name: str, parameters: Mapping[str, Any], *, size: int, max_turns: int
) -> VerifiersEnvironment:
    """The installed taskset `name`. parameters: fields of verifiers' `EnvConfig`: `id` of another Env, `taskset`, and
    each agent's harness, runtime and limits. size: number of tasks of an endless taskset. max_turns: of each agent,
    unless `parameters` has another. Raises UserError if it can't be loaded."""
    try:
        from verifiers.v1.utils.loaders import load_environment
    except ImportError as error:
        raise UserError(f"{_FIELD}: '{name}' needs verifiers 0.4 or later ({error}); {_INSTALL}") from None
    try:
        return VerifiersEnvironment(load_environment(_env_config(name, parameters, max_turns)), name, size)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError, SystemExit) as error:
        shown = dict(parameters)
        raise UserError(f"{_FIELD}: verifiers can't load '{name}' with {shown} ({error_line(error)})") from error


def _env_config(name: str, parameters: Mapping[str, Any], max_turns: int) -> Any:
    """verifiers' default runtime is remote. An agent that runs no code of the model is a process here instead."""
    from verifiers.v1.configs.agent import AgentConfig, agent_config_fields
    from verifiers.v1.runtimes import SubprocessConfig
    from verifiers.v1.utils.loaders import harness_class, resolve_env_config, task_type

    config = resolve_env_config({**parameters, "taskset": {**parameters.get("taskset", {}), "id": name}})
    harnesses = config.agent_harnesses()
    for agent, spec in agent_config_fields(config).items():
        changes: dict[str, Any] = {"max_turns": max_turns if spec.max_turns is None else spec.max_turns}
        if spec.runtime == AgentConfig().runtime and "runtime" not in parameters.get(agent, {}):
            if harness_class(harnesses[agent].id).EXECUTES_CODE or task_type(name).NEEDS_CONTAINER:
                raise UserError(
                    f"environment.parameters: '{agent}' runs code of the model; say where, such as"
                    f" {{{agent}: {{runtime: {{type: docker}}}}}}, or {{type: prime}} for verifiers' remote default"
                )
            changes["runtime"] = SubprocessConfig()
        config = config.model_copy(update={agent: spec.model_copy(update=changes)})
    return config


@dataclass(eq=False)
class VerifiersEnvironment:
    env: Any  # verifiers.v1.Env
    name: str
    size: int
    _service: _Service | None = None
    _lock: Lock = field(default_factory=Lock)

    @cached_property
    def _theirs(self) -> list[Any]:
        taskset = self.env.taskset
        return list(taskset if taskset.bounded else itertools.islice(iter(taskset), self.size))

    @cached_property
    def tasks(self) -> Sequence[Task]:
        """A task without a prompt, or with images, has verifiers' key for its prompt."""
        return [
            Task(f"{self.name}/{place}", own.data.prompt_text or own.key, metadata={"place": place})
            for place, own in enumerate(self._theirs)
        ]

    async def agent(self, task: Task, model: Model) -> str:
        """The last reply of the trained agent."""
        episode = await self._play(self._theirs[task.metadata["place"]], model)
        Conversation.current().state.episode = episode
        status, detail = ending(episode)
        if status is not RolloutStatus.SCORED:
            raise Failed(status, detail)
        return next((str(trace.last_reply) for trace in reversed(_trained(episode))), "")

    @reward
    def verifiers(self, conversation: Conversation) -> float:
        """The sum of the trained agent's rewards, by verifiers' weights."""
        episode = getattr(conversation.state, "episode", None)
        if episode is None:
            raise RuntimeError(
                "the episode was ended before verifiers scored it: give the agent a timeout.rollout below"
                " environment.turns.agent_timeout_seconds"
            )
        for name, value in measured(episode).items():
            log(name, value)
        traces = _trained(episode)
        if missing := [name for trace in traces for name, one in trace.rewards.items() if one is None]:
            raise RuntimeError(f"verifiers has not computed: {', '.join(missing)}")
        sums = {float(trace.reward) for trace in traces if trace.rewards}
        if not sums:
            raise RuntimeError("nothing in the taskset gives a trained agent a reward")
        if len(sums) > 1:
            raise RuntimeError(f"its trained agents have different rewards ({sorted(sums)}); a rollout has one")
        return sums.pop()

    def close(self) -> None:
        with self._lock:
            service, self._service = self._service, None
        if service is not None:
            service.close()

    async def _play(self, task: Any, model: Model) -> Any:
        from verifiers.v1.clients import EvalClientConfig, ModelContext
        from verifiers.v1.env import RunSlot

        opened: set[str] = set()

        def open_session(trace: Any) -> None:
            opened.add(trace.id)
            model.open_session(trace.id, trains=trace.agent.trainable)

        client = EvalClientConfig(base_url=model.base_url, api_key_var=_NO_KEY)
        context = ModelContext(model.name, client)
        with self._lock:
            self._service = service = self._service or _Service(self.env)
        episode = await service.run(lambda: self.env.run_slot(RunSlot(task), context, on_trace=open_session))
        for session in opened - {trace.id for trace in episode.traces}:
            model.open_session(session, trains=False)
        return episode


def ending(episode: Any) -> tuple[RolloutStatus, str | None]:
    """Status and detail of an episode (see the top). It may have errors and be sound: those of repeated attempts."""
    if not episode.ok:
        failed = next((trace for trace in episode.traces if not trace.ok), episode)
        error = failed.last_error
        detail = "it failed without an error" if error is None else f"{error.type}: {error.message}"
        if failed is episode:
            timed_out = episode.is_timeout
            return RolloutStatus.ENVIRONMENT_TIMEOUT if timed_out else RolloutStatus.ENVIRONMENT_ERROR, detail
        in_scoring = RolloutStatus.REWARD_ERROR if failed.timing.scoring.start else RolloutStatus.ENVIRONMENT_ERROR
        return _STATUSES.get("" if error is None else error.type, in_scoring), detail
    for trace in episode.traces:
        if trace.is_timeout and trace.stop_condition not in _LIMITS:
            in_scoring = trace.stop_condition == "scoring_timeout"
            status = RolloutStatus.REWARD_TIMEOUT if in_scoring else RolloutStatus.ENVIRONMENT_TIMEOUT
            return status, f"{trace.agent.name}: {trace.stop_condition}"
    ends = [trace.stop_condition for trace in _trained(episode) if trace.stop_condition in _LIMITS]
    return (RolloutStatus.UNFINISHED, ends[0]) if ends else (RolloutStatus.SCORED, None)


def measured(episode: Any) -> dict[str, float]:
    """Rewards without their weights, and metrics, by name; of several agents with the agent's name before it, and of
    several traces of one agent the mean."""
    values: dict[str, list[float]] = {}
    for trace in episode.traces:
        prefix = f"{trace.agent.name}_" if len(episode.traces) > 1 else ""
        scores = {name: one.score for name, one in trace.rewards.items() if one is not None}
        for name, value in {**trace.metrics, **scores}.items():
            if value is not None:
                values.setdefault(re.sub(r"[^a-z0-9_]", "_", f"{prefix}{name}".lower()), []).append(float(value))
    return {name: sum(given) / len(given) for name, given in values.items()}


def _trained(episode: Any) -> list[Any]:
    return [trace for trace in episode.traces if trace.agent.trainable]


class _Service:
    """An Env with its servers, on an event loop of its own, from the first episode to `close`."""

    def __init__(self, env: Any) -> None:
        self._started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = Thread(target=self._run, args=(env,), name="verifiers", daemon=True)
        self._thread.start()

    async def run(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        try:
            loop, _ = await asyncio.shield(asyncio.wrap_future(self._started))
        except Exception as error:
            raise Failed(RolloutStatus.ENVIRONMENT_ERROR, f"verifiers' servers: {error_line(error)}") from error
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(make(), loop))

    def close(self) -> None:
        if self._started.exception(_END_SECONDS) is None:
            loop, over = self._started.result()
            loop.call_soon_threadsafe(over.set)
        self._thread.join(_END_SECONDS)

    def _run(self, env: Any) -> None:
        async def serve() -> None:
            over = asyncio.Event()
            async with env.serving():
                self._started.set_result((asyncio.get_running_loop(), over))
                await over.wait()

        try:
            asyncio.run(serve())
        except Exception as error:  # of their servers; a rollout gets it
            if not self._started.done():
                self._started.set_exception(error)
