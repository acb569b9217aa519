"""One step of a run. Set-up, timing, logging and memory phases are in other files.

`produce` turns tasks into samples with their advantages. `learn` turns samples into one update of the policy and puts
the new weights into the engine. Supervised fine-tuning is `learn` with conversations, DPO is `learn` with pairs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from octetrl.config.objective_settings import DatasetSettings
from octetrl.records import Sample
from octetrl.rollout.collect import collect_batch
from octetrl.rollout.samples import to_samples
from octetrl.telemetry.metrics import StepMetrics
from octetrl.trainer.packing import pack

if TYPE_CHECKING:
    from octetrl.run.state import Run


def train_step(run: Run) -> StepMetrics:
    """One step of RL."""
    return learn(run, produce(run))


def supervised_step(run: Run) -> StepMetrics:
    """One step from given conversations or preference pairs."""
    algorithm = run.config.algorithm
    assert isinstance(algorithm, DatasetSettings), f"{algorithm.name} draws rollouts"
    assert run.conversations is not None, "a recipe that samples no rollouts has conversations"
    samples = run.conversations.next_batch(algorithm.batch_size)
    return StepMetrics.merge(run.conversations.metrics, learn(run, samples))


def produce(run: Run) -> list[Sample]:
    """Tasks -> scored groups -> samples with their advantages."""
    collected = collect_batch(run.taskset, run.algorithm.keeps, run.rewards, run.rollout_workers, run.collection)
    run.journal.record(collected.groups, collected.metrics, collected.put_back)
    return to_samples(collected.kept, run.algorithm)


def learn(run: Run, samples: list[Sample]) -> StepMetrics:
    """Samples -> packed batch -> one update -> new weights and KV scales in the engine."""
    batch = pack(samples, run.workers.layout, run.algorithm.token_weighting)
    update = run.workers.train(replace(batch, step=run.step))
    published = run.workers.publish(update.policy_version)
    return StepMetrics.merge(run.journal.metrics, batch.metrics, update.metrics, published.metrics)
