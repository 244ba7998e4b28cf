"""How often to save is what Young and Daly say, and what loses least time; from what was configured or seen."""

import itertools
import math
import random
from typing import Any

import pytest

from jaxtrain.checkpoint.interval import (
    FIRST_SAVE,
    PRIOR_FAILURES_PER_HOST_DAY,
    Choice,
    Cost,
    Failures,
    Pace,
    best_interval,
    daly,
    observed,
    young,
)
from jaxtrain.config import CheckpointConfig

DAY = 86400.0


def lost_share(interval: float, cost: Cost, between_failures: float, restart: float = 60.0) -> float:
    """What Daly's complete model (2006, equation 20) says of the time that isn't work, saves begun `interval` apart."""
    segments = math.exp(restart / between_failures) * math.expm1(interval / between_failures)
    return between_failures * segments / (interval - cost.stall) - 1


def simulated(interval: float, cost: Cost, between_failures: float, restart: float = 60.0) -> float:
    """Seconds that a million seconds of work take where failures come at random; a save counts once it is written."""
    draw = random.Random(0)
    safe, began, work, clock = 0.0, 0.0, 0.0, 0.0
    next_failure = draw.expovariate(1 / between_failures)
    writing: list[tuple[float, float]] = []
    while work < 1e6:
        begun = clock
        clock += interval
        if next_failure < clock:
            safe = max([safe, *(saved for ready, saved in writing if ready <= next_failure)])
            work, writing, clock = safe, [], next_failure + restart
            next_failure = clock + draw.expovariate(1 / between_failures)
            continue
        work += interval - cost.stall
        writing = [*writing[-1:], (begun + interval - cost.stall + cost.write, work)]
    return clock - began


def test_the_formulas_are_those_of_the_papers() -> None:
    assert young(5 * 60, 24 * 3600) == pytest.approx(7200)  # √(2 · 5 min · 24 h) = 120 min
    small = 1e-9
    assert daly(small, 1.0) == pytest.approx(young(small, 1.0), rel=1e-4)
    # The whole of equation 37, with δ = 10 and M = 500: √10000 · (1 + √0.01 / 3 + 0.01 / 9) − 10.
    assert daly(10.0, 500.0) == pytest.approx(100 * (1 + 0.1 / 3 + 0.01 / 9) - 10)
    assert daly(1000.0, 500.0) == daly(2000.0, 500.0) == 500.0


@pytest.mark.parametrize("between_failures", [600.0, 3 * 3600.0, 7 * DAY])
@pytest.mark.parametrize("stall", [0.05, 2.0, 60.0])
def test_no_other_interval_loses_less(stall: float, between_failures: float) -> None:
    cost = Cost(stall, 0.0)
    chosen = best_interval(cost, between_failures)
    tried = [chosen * 1.05**power for power in range(-60, 61) if chosen * 1.05**power > 1.01 * stall]
    least = min(lost_share(interval, cost, between_failures) for interval in tried)
    assert lost_share(chosen, cost, between_failures) - least <= 0.01 * least


@pytest.mark.parametrize("write", [0.0, 300.0])
def test_a_simulated_run_with_background_writes_takes_no_longer_than_with_the_best_interval(write: float) -> None:
    cost, between_failures = Cost(20.0, write), 3 * 3600.0
    chosen = best_interval(cost, between_failures)
    took = {factor: simulated(chosen * factor, cost, between_failures) for factor in (0.5, 0.7, 0.85, 1, 1.2, 1.5, 2)}
    lost = {factor: seconds - 1e6 for factor, seconds in took.items()}
    assert lost[1] <= 1.05 * min(lost.values())
    assert lost[0.5] > lost[1] < lost[2]


def test_a_save_never_begins_before_the_last_one_is_written() -> None:
    assert best_interval(Cost(0.01, 500.0), 600.0) == 500.0
    assert best_interval(Cost(0.01, 1.0), 600.0) < 10.0


def event(kind: str, time: float, process: int = 0, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "time": time, "process": process, **fields}


def test_failures_are_starts_that_nobody_ended() -> None:
    events = [
        event("launch", 0, process=-1),
        event("start", 10),
        event("save", 110, step=5, seconds=3.0, stall=0.5),  # killed some time after
        event("start", 200),
        event("stop", 300, exit_code=75),  # told to end
        event("start", 400),
        event("stop", 450, exit_code=8),  # another process was lost
        event("restart", 9000, process=-1),
        event("start", 500),
        event("stop", 501, exit_code=3),  # what is trained failed, not what trains it
        event("start", 600),
        event("compile", 610),  # under way
    ]
    assert observed(events) == Failures(2, 100 + 100 + 50 + 1)
    assert observed(events[:2]) == observed([]) == Failures(0, 0)


class Watched:
    """A pace with all that it applied and said, on a clock of its own."""

    def __init__(self, events: list[dict[str, Any]], hosts: int = 1, **rules: Any):
        self.applied: list[float] = []
        self.said: list[Choice] = []
        self.clock = 0.0
        config = CheckpointConfig(interval="auto", **rules)
        self.pace = Pace(config, hosts, events, lambda: self.clock, self.applied.append, self.said.append)


def test_the_first_save_of_a_run_comes_soon_and_measures() -> None:
    watched = Watched([], failures_per_day=24.0)
    assert (watched.applied, watched.said) == ([FIRST_SAVE], [])
    watched.pace.saved(10, 4.0, 0.5)
    assert watched.applied[1:] == [pytest.approx(best_interval(Cost(0.5, 4.0), 3600.0))]
    (choice,) = watched.said
    assert str(choice) == (
        "checkpoint.interval=auto: a save every 60.2 s: each stops the loop for 0.5 s (0.83 % of the time) and is "
        "written in 4 s; 24 failures a day (checkpoint.failures_per_day)"
    )


def test_a_run_that_goes_on_knows_what_its_saves_cost() -> None:
    events = [event("start", 0), event("save", 9, step=1, seconds=4.0, stall=0.5), event("start", 10)]
    watched = Watched(events, failures_per_day_per_host=3.0, hosts=8)
    assert watched.applied[-1] == pytest.approx(best_interval(Cost(0.5, 4.0), 3600.0))
    assert watched.said[-1].source == "checkpoint.failures_per_day_per_host on 8 hosts"


def test_it_is_said_again_only_where_it_changes_by_much() -> None:
    watched = Watched([], failures_per_day=24.0)
    for stall in (0.5, 0.5, 0.55, 0.45, 0.52):
        watched.pace.saved(1, 4.0, stall)
    assert (len(watched.applied), len(watched.said)) == (6, 1)
    for _ in range(5):
        watched.pace.saved(1, 4.0, 5.0)
    assert [round(choice.cost.stall, 2) for choice in watched.said] == [0.5, 5.0]


def test_the_rate_begins_with_what_is_usual_and_becomes_what_is_seen() -> None:
    hosts = 100
    new = Watched([], hosts=hosts)
    new.pace.saved(1, 1.0, 0.1)
    assert new.said[0].failures_per_day == pytest.approx(PRIOR_FAILURES_PER_HOST_DAY * hosts)
    assert new.said[0].source.startswith("0 seen in 0 s, and what is usual for 100 hosts")
    starts = [[event("start", 3600.0 * hour), event("eval", 3600.0 * hour + 3599)] for hour in range(2000)]
    seen = Watched([*itertools.chain(*starts), event("start", 7.2e6)], hosts=hosts)
    seen.pace.saved(1, 1.0, 0.1)
    assert seen.said[0].failures_per_day == pytest.approx(24, rel=0.1)
    quiet = Watched([], hosts=hosts)
    quiet.clock = 1000 * DAY
    quiet.pace.saved(1, 1.0, 0.1)
    assert quiet.said[0].failures_per_day == pytest.approx(1 / 1000, rel=0.01)
    rates = [choice.seconds for choice in (seen.said[0], new.said[0], quiet.said[0])]
    assert all(earlier < later for earlier, later in itertools.pairwise(rates))
