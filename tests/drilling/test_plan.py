"""A plan of faults is drawn from its seed, and leaves room for each fault to be survived."""

from itertools import pairwise

import pytest

from jaxtrain.drilling.plan import FAULTS, make_plan
from jaxtrain.errors import ConfigError


def test_a_plan_has_each_fault_once_in_order_with_a_checkpoint_between_any_two() -> None:
    for seed in range(50):
        plan = make_plan(list(FAULTS), seed, steps=100, processes=2, every=5)
        assert [fault.kind for fault in plan] == list(FAULTS)
        steps = [fault.step for fault in plan]
        assert steps[0] > 10, "two checkpoints are there"
        assert steps[-1] < 95, "and one follows the last"
        assert all(later - earlier > 5 for earlier, later in pairwise(steps))
        assert {fault.rank for fault in plan} <= {0, 1}


def test_the_seed_decides() -> None:
    plans = [make_plan(["kill", "stop"], seed, steps=200, processes=8, every=5) for seed in (1, 1, 2)]
    assert plans[0] == plans[1] != plans[2]


def test_a_run_too_short_for_its_faults_is_refused_with_the_length_that_works() -> None:
    with pytest.raises(ConfigError, match="at least 23 steps at checkpoint.every=5"):
        make_plan(["kill", "stop"], 0, steps=22, processes=2, every=5)
    assert len(make_plan(["kill", "stop"], 0, steps=23, processes=2, every=5)) == 2


def test_an_unknown_fault_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="--faults flood: there is no such fault; there are kill, stop"):
        make_plan(["flood"], 0, steps=100, processes=2, every=5)
