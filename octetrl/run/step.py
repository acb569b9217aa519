"""One step of a run. Set-up, timing, logging and memory phases are in other files.

`produce` turns tasks into scored groups. `learn` turns samples into one update of the policy and puts the new weights
into the engine. Supervised fine-tuning is `learn` with conversations, DPO is `learn` with pairs.
"""

from __future__ import annotations

from dataclasses import replace

from octetrl.config.objective_settings import DatasetSettings
from octetrl.records import Sample, joined
from octetrl.rollout.collect import CollectedBatch, collect_batch
from octetrl.rollout.samples import samples_of, trained_rollouts
from octetrl.run.folder.journal import Journal
from octetrl.run.state import Run, StepMethod, StepResult
from octetrl.trainer.packing import pack


class GenerateThenLearn(StepMethod):
    """One step of RL."""

    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        collected = produce(run, number)
        trained = trained_rollouts(collected.kept, run.algorithm)
        recorded = journal.record(number, collected.groups, trained)
        learnt = learn(run, samples_of(trained, run.collection.sampling.temperature), number)
        metrics = joined(recorded, collected.metrics, learnt)
        return StepResult(metrics, collected.groups, reward_times=collected.reward_times)


class LearnFromData(StepMethod):
    """One step from given conversations or preference pairs."""

    def step(self, run: Run, number: int, journal: Journal) -> StepResult:
        algorithm = run.config.algorithm
        assert isinstance(algorithm, DatasetSettings), f"{algorithm.name} draws rollouts"
        assert run.conversations is not None, "a recipe that samples no rollouts has conversations"
        samples = run.conversations.next_batch(algorithm.batch_size)
        return StepResult(joined(run.conversations.metrics, learn(run, samples, number)))


def produce(run: Run, step: int) -> CollectedBatch:
    """Tasks -> scored groups, of which some are kept."""
    workers, settings = run.workers, run.collection.at_step(step)
    return collect_batch(run.taskset, run.algorithm.keeps, run.rewards, workers, settings, run.lengths)


def learn(run: Run, samples: list[Sample], step: int) -> dict[str, float]:
    """Samples -> packed batch -> one update -> new weights and KV scales in the engine."""
    batch = pack(samples, run.workers.layout, run.algorithm.token_weighting)
    update = run.workers.train(replace(batch, step=step))
    published = run.workers.publish(update.policy_version)
    return joined(batch.metrics, update.metrics, published.metrics)
