"""When a run has lost its way for good."""

import json
import math
import random
from collections.abc import Iterable

import pytest

from jaxtrain.errors import DivergedError
from jaxtrain.resilience.divergence import Divergence

AFTER = 200


def watch(losses: Iterable[float], after: int = AFTER) -> int | None:
    """The step that ends the run, which is killed and resumed now and then; None: none does."""
    divergence = Divergence(after, 10, {})
    for step, loss in enumerate(losses, start=1):
        try:
            divergence.take(step, loss)
        except DivergedError:
            return step
        if step % 37 == 0:
            divergence = Divergence(after, 10, json.loads(json.dumps(divergence.state())))
    return None


def noisy(levels: Iterable[float], noise: float = 0.05, seed: int = 0) -> list[float]:
    draw = random.Random(seed)
    return [level * (1 + noise * draw.gauss(0, 1)) for level in levels]


def falling(steps: int) -> list[float]:
    return [2.5 + 8 * math.exp(-step / 50) for step in range(steps)]


LOST = {
    "back to the level of an untrained model": (falling(500) + [10.5] * 300, 500),
    "above half of what was learned": (falling(500) + [7.5] * 300, 500),
    "wild, but above half of what was learned": (
        falling(500) + [8 + 6 * random.Random(step).random() for step in range(300)],
        500,
    ),
    "never below its start": ([10.5] * 40 + [20.0] * 300, 40),
    "wild from the start": ([10.5] * 8 + [10.5 * 40 ** random.Random(step).random() + 10 for step in range(600)], 8),
}


@pytest.mark.parametrize("name", LOST)
def test_a_run_that_stays_far_above_what_it_had_been_is_ended(name: str) -> None:
    levels, since = LOST[name]
    step = watch(noisy(levels))
    assert step is not None
    assert since + AFTER <= step <= since + AFTER + 60


GOOD = {
    "learning": falling(2000),
    "a spike of half the limit": falling(500) + [10.5] * 100 + falling(500),
    "a harder part of the data": falling(500) + [3.5] * 1000,
    "fine-tuning that learns little": noisy([2.0] * 100, 0.03) + noisy([1.97] * 400, 0.03) + noisy([2.0] * 1000, 0.03),
    "constant": [2.0] * 1000,
    "constant, and then a little worse": [2.0] * 300 + [2.1] * 20 + [2.0] * 300,
    "zero": [0.0] * 1000,
    "negative": [-12 + level for level in falling(1000)],
}


@pytest.mark.parametrize("name", GOOD)
def test_a_run_that_has_not_lost_its_way_goes_on(name: str) -> None:
    assert watch(noisy(GOOD[name])) is None


def test_a_loss_without_any_noise_may_get_a_little_worse() -> None:
    assert watch([2.0] * 100 + [2.1] * 1000) is None


def test_zero_steps_watch_nothing() -> None:
    assert watch(noisy(falling(500) + [100.0] * 1000), after=0) is None
