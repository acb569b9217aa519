"""An objective of the user's own: `algorithm.name: module:name` names its loss (docs/algorithms.md works an example).

    def loss(inputs: LossInputs, fields: MyFields, shared: OwnObjectiveConfig) -> TokenLoss

    inputs    log-probs, entropies, advantages and sample numbers of a micro-batch's N trained tokens (token_loss.py)
    fields    a dataclass with the values of the recipe's `algorithm` section that are no shared fields
    shared    the shared fields: clips, corrections, KL, entropy, weighting, groups. `policy_loss` applies them

The result has one loss per token, float32 [N] in nats times advantage, not divided: only the trainer divides. If the
dataclass has a method `advantages(rewards) -> list[float]`, it maps the rewards of a group's answers to as many
advantages. Without it they are group-relative, as GRPO's.

The functions run in every worker, on the worker's device. They must depend on their arguments only, so that a resumed
run repeats its bits.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import torch
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError

from octetrl.algorithms.token_loss import LossInputs, TokenLoss
from octetrl.config.algorithm import OwnObjectiveConfig
from octetrl.config.problems import value_problem
from octetrl.system.errors import UserError, nearest, type_of

SIGNATURE = "(inputs: LossInputs, fields: YourDataclass, shared: OwnObjectiveConfig) -> TokenLoss"


@dataclass(frozen=True)
class OwnObjective:
    """A loaded loss with the values of its fields."""

    path: str
    function: Callable[[LossInputs, Any, OwnObjectiveConfig], TokenLoss]
    fields: Any  # an instance of the loss's dataclass

    def loss(self, inputs: LossInputs, config: OwnObjectiveConfig) -> TokenLoss:
        """Per-token loss [N] and its metrics. Raises UserError if the function returns anything else."""
        result = self.function(inputs, self.fields, config)
        what = _wrong_result(result, inputs)
        if what is not None:
            raise UserError(f"algorithm.name: '{self.path}' returns {what}; return TokenLoss(loss_N, metrics)")
        return result

    @property
    def rule(self) -> Callable[[Sequence[float]], list[float]] | None:
        """Rewards of one group to advantages; None: group-relative."""
        return self._advantages if callable(getattr(self.fields, "advantages", None)) else None

    def _advantages(self, rewards: Sequence[float]) -> list[float]:
        advantages = list(self.fields.advantages(list(rewards)))
        if len(advantages) != len(rewards):
            raise UserError(
                f"algorithm.name: the advantages of '{self.path}' are {len(advantages)} for {len(rewards)} rewards;"
                " return one for each"
            )
        return [float(one) for one in advantages]


def load_objective(config: OwnObjectiveConfig) -> OwnObjective:
    """Import the loss in this process and build its fields. Raises UserError for what is wrong with either.

    `octetrl check` and the run import the module in a separate process first (run/environment.py)."""
    module_name, _, name = config.name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"algorithm.name: '{config.name}' can't be imported ({error})") from error
    return OwnObjective(config.name, function, build_fields(config, fields_of(config.name, function)))


def fields_of(path: str, function: Any) -> type:
    """The dataclass of the loss's second argument. Raises UserError if the function is no loss."""
    if not callable(function) or isinstance(function, type):
        raise UserError(f"algorithm.name: '{path}' is no function; write a function {SIGNATURE}")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"algorithm.name: '{path}' is async; write a plain function {SIGNATURE}")
    parameters = list(inspect.signature(function).parameters.values())
    if len(parameters) != 3:
        raise UserError(
            f"algorithm.name: '{path}' takes {len(parameters)} arguments, but is called with 3; write {SIGNATURE}"
        )
    try:
        hint = get_type_hints(function).get(parameters[1].name)
    except NameError as error:
        raise UserError(
            f"algorithm.name: the annotations of '{path}' can't be read ({error}); import what they name"
        ) from error
    if not (isinstance(hint, type) and dataclasses.is_dataclass(hint)):
        shown = "no annotation" if hint is None else f"the annotation {getattr(hint, '__name__', hint)}"
        raise UserError(
            f"algorithm.name: the second argument of '{path}' has {shown}; annotate it with a dataclass of your fields"
        )
    both = [one.name for one in dataclasses.fields(hint) if one.name in OwnObjectiveConfig.model_fields]
    if both:
        raise UserError(
            f"algorithm.{both[0]}: it is a field of {hint.__name__} and a shared field too; rename yours, or read"
            f" shared.{both[0]}"
        )
    return hint


def build_fields(config: OwnObjectiveConfig, kind: type) -> Any:
    """An instance of the dataclass `kind` from the recipe's values, checked by name and type. Raises UserError with a
    line for each wrong value."""
    known = {one.name: one for one in dataclasses.fields(kind) if one.init}
    given = {name: value for name, value in config.own_fields.items() if value is not None or name in known}
    shared = [name for name in OwnObjectiveConfig.model_fields if name != "name"]
    problems = [
        f"algorithm.{name}: unknown key{nearest(name, [*known, *shared])}; {config.name} has"
        f" {', '.join(known) or 'no fields of its own'}, and the shared fields of docs/algorithms.md"
        for name in given
        if name not in known
    ]
    wanted = {name: value for name, value in given.items() if name in known}
    try:
        made: Any = TypeAdapter(kind).validate_json(json.dumps(wanted), strict=True)
    except ValidationError as error:
        problems += [_wrong_field(kind, detail) for detail in error.errors(include_url=False)]
    except (PydanticSchemaGenerationError, PydanticUserError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"algorithm.name: the fields of {kind.__name__} can't be checked ({reason})") from error
    if problems:
        raise UserError(problems[0] if len(problems) == 1 else "\n  ".join([f"{len(problems)} problems", *problems]))
    return made


def try_loss(objective: OwnObjective, config: OwnObjectiveConfig) -> None:
    """Call loss and advantages once, on five made-up tokens of two samples. Raises UserError if one raises an
    exception, or if the result has the wrong form, is not finite or has no gradient."""
    inputs = _made_inputs(config)
    try:
        result = objective.loss(inputs, config)
        if objective.rule is not None:
            objective.rule([0.0, 1.0])
        (gradient_N,) = torch.autograd.grad(result.loss_N.sum(), inputs.logprobs_N, allow_unused=True)
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise UserError(f"algorithm.name: '{objective.path}' fails on five tokens ({reason}); correct it") from error
    if not torch.isfinite(result.loss_N).all():
        raise UserError(f"algorithm.name: '{objective.path}' returns a loss that is not finite; correct it")
    if gradient_N is None or not gradient_N.any():
        raise UserError(
            f"algorithm.name: the loss of '{objective.path}' has no gradient in inputs.logprobs_N, so nothing would be"
            " trained; compute it from them, without detach"
        )


def _made_inputs(config: OwnObjectiveConfig) -> LossInputs:
    logprobs_N = torch.tensor([-0.5, -1.0, -0.2, -1.5, -0.7], requires_grad=True)
    older_N = torch.tensor([-0.6, -0.9, -0.2, -1.4, -0.9])
    return LossInputs(
        logprobs_N=logprobs_N,
        entropy_N=(logprobs_N * 0.0 + 1.0),
        advantages_N=torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]),
        sequence_N=torch.tensor([0, 0, 0, 1, 1]),
        num_sequences=2,
        generator_logprobs_N=older_N,
        proximal_logprobs_N=older_N.clone(),
        reference_logprobs_N=older_N.clone() if config.keeps_reference else None,
        mean_weight=torch.tensor(1.0) if "self_normalize" in config.corrections else None,
        kept_share=torch.tensor(1.0) if config.masked_tokens == "left_out" else None,
    )


def _wrong_result(result: Any, inputs: LossInputs) -> str | None:
    if not isinstance(result, TokenLoss):
        return type_of(result)
    loss_N, wanted = result.loss_N, tuple(inputs.logprobs_N.shape)
    if not isinstance(loss_N, torch.Tensor):
        return f"a loss_N of type {type(loss_N).__name__}"
    if tuple(loss_N.shape) != wanted or loss_N.dtype != inputs.logprobs_N.dtype:
        return f"a loss_N of {loss_N.dtype} {list(loss_N.shape)} for {inputs.logprobs_N.dtype} {list(wanted)}"
    if not isinstance(result.metrics, Mapping):
        return f"metrics of type {type(result.metrics).__name__}"
    for name, values in result.metrics.items():
        if not isinstance(values, torch.Tensor) or values.requires_grad or not isinstance(name, str):
            return f"a metric {name!r} that is no detached tensor"
    return None


def _wrong_field(kind: type, detail: Any) -> str:
    location = [str(part) for part in detail["loc"]]
    name = "algorithm." + ".".join(location) if location else f"algorithm: {kind.__name__}"
    if detail["type"] in ("missing", "missing_argument"):
        return f"{name}: missing; {kind.__name__} needs it"
    return value_problem(name, detail)
