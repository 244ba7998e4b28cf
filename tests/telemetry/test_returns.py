"""How fast a run was back, from events written by hand."""

import math

import pytest

from jaxtrain.telemetry.attempts import read_attempts
from jaxtrain.telemetry.returns import medians, read_returns
from tests.telemetry.timeline import Timeline, killed_twice


def test_each_fault_is_split_into_its_parts() -> None:
    silent, seen = read_returns(read_attempts(killed_twice().events))
    assert silent.what == "ended without a word"
    assert silent.seconds == {
        "wait": pytest.approx(49.5 - 40.4),
        "start": pytest.approx(5.5),
        "compile": 10.0,
        "restore": 2.0,
        "first step": 1.0,
        "other": pytest.approx(0),
    }
    assert silent.total == pytest.approx(68 - 40.4)
    assert seen.what == "rank 1 died at step 35"
    assert seen.seconds == {
        "detect": pytest.approx(0.3),
        "stop": pytest.approx(1.0),
        "wait": pytest.approx(2.0),
        "start": pytest.approx(6.0),
        "compile": 10.0,
        "restore": 2.0,
        "first step": 1.0,
        "other": pytest.approx(0),
    }
    for one in (silent, seen):
        assert math.fsum(one.seconds.values()) == pytest.approx(one.total)
    assert medians([silent, seen]).seconds["wait"] == pytest.approx((9.1 + 2) / 2)
    assert medians([silent, seen]).seconds["detect"] == pytest.approx(0.3)


def test_the_first_of_several_who_saw_it_counts_and_the_earliest_moment_of_the_fault() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0)
    run.at(30, "fault", 1, what="stuck", rank=0, step=1, seen_after=13.0, exit_code=9)
    run.at(30.1, "fault", 0, what="stuck", rank=0, step=1, seen_after=12.0, exit_code=9)
    run.at(30.4, "fault", -1, what="exit code 9", rank=1, step=1, seen_after=0.1, exit_code=9)
    run.start(40, 0).progress(56, 1, 1, 1.0)
    (one,) = read_returns(read_attempts(run.events))
    assert one.what == "rank 0 stuck at step 1"
    assert one.seconds["detect"] == pytest.approx(13)
    assert one.total == pytest.approx(56 - 17)


def test_starts_that_failed_before_a_step_belong_to_the_return() -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0)
    run.at(20, "start", step=0, steps=9, seconds=1.0).at(22, "stop", step=0, reason="no\nworker", exit_code=6)
    run.start(30, 0).progress(46, 1, 1, 1.0)
    (one,) = read_returns(read_attempts(run.events))
    assert one.starts == 2
    assert one.total == pytest.approx(30)


@pytest.mark.parametrize(("code", "returns"), [(0, 0), (75, 0), (130, 0), (1, 1), (3, 1)])
def test_an_end_that_was_asked_for_is_no_fault(code: int, returns: int) -> None:
    run = Timeline().start(0, 0).progress(16, 1, 1, 1.0).at(17, "stop", step=1, reason="so", exit_code=code)
    run.start(30, 0).progress(46, 1, 1, 1.0)
    assert len(read_returns(read_attempts(run.events))) == returns
