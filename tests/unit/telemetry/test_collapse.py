"""The collapse gate: ruined runs are found in a few steps, and none of many healthy courses is taken for one."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from octetrl.telemetry.collapse import PATIENCE, Collapse, CollapseGate

GROUPS, GROUP = 32, 8
Step = dict[str, float]


def rollouts(chance: random.Random, share: float, scale: float = 1.0, groups: int = GROUPS) -> Step:
    """A step's reward metrics where each prompt has its own probability of being solved, `share` on average."""
    rewards: list[list[float]] = []
    for _ in range(groups):
        own = chance.betavariate(2 * share + 1e-9, 2 * (1 - share) + 1e-9) if 0 < share < 1 else share
        rewards.append([scale * (chance.random() < own) for _ in range(GROUP)])
    flat = [reward for group in rewards for reward in group]
    mean = sum(flat) / len(flat)
    return {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in flat) / len(flat)) ** 0.5,
        "reward/zero_variance_fraction": sum(len(set(group)) == 1 for group in rewards) / groups,
        "rollout/count": float(len(flat)),
    }


def found(steps: list[Step]) -> Collapse | None:
    gate = CollapseGate(GROUP)
    return next((one for step, now in enumerate(steps, start=1) if (one := gate.look(step, now))), None)


def course(share: Callable[[int], float], steps: int, seed: int, **given: float) -> list[Step]:
    chance = random.Random(seed)
    return [rollouts(chance, share(step), **given) for step in range(1, steps + 1)]  # type: ignore[arg-type]


def noisy(chance: random.Random, value: float, by: float) -> float:
    return value * (1 + chance.gauss(0, by))


# --- collapses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.9, 0.45, 0.1])
@pytest.mark.parametrize("at", [2, 30, 200])
def test_a_reward_that_dies_is_found(share: float, at: int) -> None:
    collapse = found(course(lambda step: share if step < at else 0.0, at + 20, seed=at))
    assert collapse is not None and collapse.since == at and collapse.step < at + 8
    assert collapse.sound_until == at - 2, "the rollouts of step t are of the weights after step t - 1"


def test_a_rare_reward_of_single_answers_that_dies_is_found() -> None:
    """Without siblings there is no share of groups with equal rewards."""
    chance, gate = random.Random(3), CollapseGate(1)
    for step in range(1, 61):
        rewards = [float(step < 41 and chance.random() < 0.05) for _ in range(64)]
        mean = sum(rewards) / 64
        now = {"reward/mean": mean, "reward/std": (mean - mean**2) ** 0.5, "rollout/count": 64.0}
        collapse = gate.look(step, now)
        if collapse is not None:
            break
    assert collapse is not None and collapse.what == "reward is dead" and collapse.since >= 41 and step < 50


@pytest.mark.parametrize("scale", [100.0, -1.0])
def test_a_reward_that_falls_is_found_whatever_its_scale(scale: float) -> None:
    """To a twentieth of the prompts solved, not to none; for -1 the reward is a penalty for what goes wrong."""
    right = (0.7, 0.05) if scale > 0 else (0.3, 0.95)
    collapse = found(course(lambda step: right[step >= 20], 40, seed=5, scale=scale))
    assert collapse is not None and collapse.what == "reward fell" and 20 <= collapse.since <= 21


def test_entropy_gradients_and_a_loss_that_explode_and_entropy_that_dies_are_found() -> None:
    chance = random.Random(2)
    for name, before, after in (("entropy", 0.4, 5.0), ("grad_norm", 0.5, 40.0), ("loss", 0.7, 6.0)):
        steps = [{name: noisy(chance, before if step < 30 else after, 0.1)} for step in range(1, 50)]
        collapse = found(steps)
        assert collapse is not None and (collapse.since, collapse.step) == (30, 29 + PATIENCE), name
        assert name in str(collapse)
    chance = random.Random(3)
    shares = [0.5 if step < 30 else 0.3 for step in range(60)]
    steps = [rollouts(chance, share) | {"entropy": 0.4 if share == 0.5 else 0.004} for share in shares]
    collapse = found(steps)
    assert collapse is not None and collapse.what == "entropy fell"


# --- health -------------------------------------------------------------------------------------------------


HEALTHY: dict[str, Callable[[int], float]] = {
    "flat": lambda step: 0.4,
    "learning": lambda step: min(0.98, 0.02 + step / 250),
    "learnt": lambda step: 1.0 if step > 60 else 0.5 + step / 120,
    "nothing from the beginning": lambda step: 0.0,
    "sparse": lambda step: 0.002,
    "late": lambda step: 0.0 if step < 100 else 0.3,
    "a dip of a few steps": lambda step: 0.1 if 90 < step < 94 else 0.5,
    "slowly forgetting": lambda step: 0.6 - step / 2000,
}


@pytest.mark.parametrize("kind", HEALTHY)
@pytest.mark.parametrize("groups", [4, 128])
def test_healthy_rewards_are_no_collapse(kind: str, groups: int) -> None:
    for seed in range(3):
        assert found(course(HEALTHY[kind], 250, seed, groups=groups)) is None


def test_healthy_entropy_gradients_and_losses_are_no_collapse() -> None:
    """Entropy that falls as it should, spikes of the gradient, and the first hundred steps from random weights."""
    for seed in range(6):
        chance = random.Random(seed)
        steps = []
        for step in range(1, 300):
            spike = 100.0 if chance.random() < 0.05 else 1.0
            steps.append(
                rollouts(chance, min(0.95, 0.3 + step / 300))
                | {"entropy": noisy(chance, 0.6 * 0.97**step + 1e-3, 0.2), "loss": chance.gauss(0, 0.3)}
                | {"grad_norm": spike * chance.lognormvariate(0, 0.7)}
            )
        assert found(steps) is None
        supervised = [
            {
                "loss": noisy(chance, 6 * 0.93**step + 0.1, 0.1),
                "entropy": noisy(chance, 5.9 / (1 + (step / 20) ** 3) + 0.1, 0.05),
                "grad_norm": noisy(chance, 4 / step**0.5, 0.3),
            }
            for step in range(1, 300)
        ]
        assert found(supervised) is None


def test_what_rises_by_little_is_no_collapse() -> None:
    """An entropy by less than a nat, however small it was, and a negative loss by less than half of its size."""
    for name, before, healthy, ruined in (("entropy", 0.1, 1.0, 1.2), ("loss", -1.0, -0.6, -0.4)):
        assert found([{name: before}] * 30 + [{name: healthy}] * 20) is None, name
        collapse = found([{name: before}] * 30 + [{name: ruined}] * 20)
        assert collapse is not None and (collapse.what, collapse.since) == (f"{name} rose", 31)


def test_single_answers_of_a_step_count_as_one_group_of_equal_rewards() -> None:
    """In half of the steps before none was right, so ten such steps in a row are improbable, but not by a millionth."""
    gate = CollapseGate(1)
    none = {"reward/mean": 0.0, "reward/std": 0.0, "rollout/count": 64.0}
    one = {"reward/mean": 1 / 64, "reward/std": 0.124, "rollout/count": 64.0}
    collapses = [gate.look(step, now) for step, now in enumerate([none] * 20 + [one] * 21 + [none] * 30, start=1)]
    assert collapses[:51] == [None] * 51
    assert [one.what for one in collapses if one] == ["reward is dead"]


# --- what follows from it -----------------------------------------------------------------------------------


def test_what_is_sound_follows_each_step_and_stays_before_a_collapse() -> None:
    gate, steps = CollapseGate(GROUP), course(lambda step: 0.5 if step < 20 else 0.0, 40, seed=1)
    collapses = []
    for step, now in enumerate(steps, start=1):
        collapse = gate.look(step, now)
        collapses += [collapse] if collapse else []
        assert gate.sound_until == (step - 1 if step < 20 else 18)
    assert len(collapses) == 1, "said once, not in every step"
    for step, now in enumerate(course(lambda step: 0.5, 20, seed=2), start=41):
        assert gate.look(step, now) is None
    assert (gate.sound_until, gate.sound_before_collapse) == (59, 18)
    assert gate.look(61, {}) is None and gate.sound_until == 60, "a step that measured nothing tells nothing"
    steps = course(lambda step: 0.5 if step < 20 else 0.0, 30, seed=4)
    whole = found(steps)
    for cut in (1, 19, 21):
        gate = CollapseGate(GROUP)
        gate.replay({"step": float(step), "loss": None, **now} for step, now in enumerate(steps[:cut], start=1))
        rest = [gate.look(step, now) for step, now in enumerate(steps[cut:], start=cut + 1)]
        assert [one for one in rest if one] == [whole]


def test_a_single_earlier_step_says_little_about_the_mean() -> None:
    """Its own mean has a standard error as well: a fall of 0.30 from 0.50 is 3.4 of a step's, and 2.4 of both."""
    gate = CollapseGate(GROUP)
    spread_and_count = {"reward/std": 0.5, "rollout/count": float(GROUPS * GROUP)}
    assert gate.look(1, {"reward/mean": 0.5} | spread_and_count) is None
    assert all(gate.look(step, {"reward/mean": 0.2} | spread_and_count) is None for step in range(2, 20))
    assert gate.sound_until == 18


def test_what_is_measured_between_a_collapse_and_its_end_is_no_past_to_compare_with() -> None:
    """A ruined run jumps to high rewards for a few steps at a time; then it is as it was before."""
    gate, step = CollapseGate(GROUP), 0
    ruined = [0.0] * 8 + ([1.0] * (PATIENCE - 1) + [0.0]) * 10
    for share in [0.5] * 30 + ruined + [0.5] * 9:
        step += 1
        gate.look(step, course(lambda _, share=share: share, 1, seed=step)[0])  # type: ignore[misc]
    assert gate.sound_until == step - 1
