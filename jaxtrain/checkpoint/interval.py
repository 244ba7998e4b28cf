"""How often to save: the interval that loses the least time, from what a save costs and how often a run fails.

J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974): √(2δM), for a save that
stops the work for δ and a mean time between failures of M. J. T. Daly, A higher order estimate of the optimum
checkpoint interval for restart dumps, FGCS 22 (2006): the same with two more terms, which count where failures are
frequent. Only what stops the loop is lost with each save: the write that goes on in the background costs nothing but
that a save must have ended before the next one begins.
"""

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from jaxtrain.config import CheckpointConfig
from jaxtrain.errors import (
    EXIT_BAD_HOST,
    EXIT_CRASHED,
    EXIT_LOST_PROCESS,
    EXIT_MISSING_WORKER,
    EXIT_STUCK,
    EXIT_STUCK_CHECKPOINT,
    EXIT_STUCK_DATA,
    EXIT_STUCK_DEVICE,
)

FIRST_SAVE = 60.0
"""Seconds to the first save of a run, which is there to measure what one costs."""
PRIOR_FAILURES_PER_HOST_DAY = 419 / 54 / 2048
"""What is assumed before a run was seen to fail: Llama 3 405B, 419 interruptions in 54 days on 16,384 GPUs in hosts of
eight (The Llama 3 Herd of Models, 2024)."""

_DAY = 86400.0
_REMEMBERED = 5
_MUCH = 1.25
_FAILURES = {
    EXIT_CRASHED,
    EXIT_MISSING_WORKER,
    EXIT_LOST_PROCESS,
    EXIT_STUCK,
    EXIT_STUCK_DEVICE,
    EXIT_STUCK_DATA,
    EXIT_STUCK_CHECKPOINT,
    EXIT_BAD_HOST,
}


@dataclass(frozen=True)
class Cost:
    """Of one save, in seconds: how long the loop stood still, and how long the write took in all."""

    stall: float
    write: float


@dataclass(frozen=True)
class Failures:
    """How often a run failed in how many seconds."""

    count: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """An interval, in seconds from the begin of one save to that of the next, and what it was chosen from."""

    seconds: float
    cost: Cost
    failures_per_day: float
    source: str

    def __str__(self) -> str:
        share = 100 * self.cost.stall / self.seconds
        return (
            f"checkpoint.interval=auto: a save every {_duration(self.seconds)}: each stops the loop for "
            f"{_duration(self.cost.stall)} ({share:.2g} % of the time) and is written in {_duration(self.cost.write)}; "
            f"{self.failures_per_day:.2g} failures a day ({self.source})"
        )


def young(stall: float, between_failures: float) -> float:
    """Seconds of work between saves, to first order."""
    return math.sqrt(2 * stall * between_failures)


def daly(stall: float, between_failures: float) -> float:
    """Seconds of work between saves, to higher order (Daly 2006, equation 37)."""
    if stall >= 2 * between_failures:
        return between_failures
    ratio = stall / (2 * between_failures)
    return young(stall, between_failures) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall


def best_interval(cost: Cost, between_failures: float) -> float:
    """Seconds from the begin of one save to that of the next, never so short that the write has not ended."""
    return max(cost.stall + daly(cost.stall, between_failures), cost.write, cost.stall)


def observed(events: Sequence[Mapping[str, Any]]) -> Failures:
    """What the events of a run tell of all its starts but the last, which is under way; one that was killed has no
    `stop`.

    Starts that ended for what a person did or configured, and those that diverged, are time without a failure.
    """
    count, seconds = 0, 0.0
    for start in [*_starts(events)][:-1]:
        stops = [event for event in start if event["kind"] == "stop"]
        count += not stops or stops[-1].get("exit_code") in _FAILURES
        seconds += max(0.0, start[-1]["time"] - start[0]["time"])
    return Failures(count, seconds)


def earlier_costs(events: Sequence[Mapping[str, Any]]) -> list[Cost]:
    """Of the last saves that events tell of."""
    saves = [
        event for event in events if event["kind"] == "save" and None not in (event.get("stall"), event.get("seconds"))
    ]
    return [Cost(event["stall"], event["seconds"]) for event in saves[-_REMEMBERED:]]


def _starts(events: Sequence[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    """What process 0 wrote in each start: a supervisor's events are of its own clock and may come later."""
    start: list[Mapping[str, Any]] = []
    for event in events:
        if event.get("process") != 0:
            continue
        if event["kind"] == "start" and start:
            yield start
            start = []
        if start or event["kind"] == "start":
            start.append(event)
    if start:
        yield start


class Pace:
    """Chooses the interval anew after each save. To be had by the process whose clock decides; thread-safe.

    Args:
        rules: with `failures_per_day` or `failures_per_day_per_host`, or none of them: then what was observed counts,
            and before anything was, `PRIOR_FAILURES_PER_HOST_DAY`.
        hosts: machines in the run.
        events: of the run, the last start of which is this one.
        now: a clock that never goes back, in seconds.
        apply: called with each interval in seconds.
        say: called with a choice that differs by much from the last one that was said.
    """

    def __init__(
        self,
        rules: CheckpointConfig,
        hosts: int,
        events: Sequence[Mapping[str, Any]],
        now: Callable[[], float],
        apply: Callable[[float], None],
        say: Callable[[Choice], None],
    ):
        self._rules = rules
        self._hosts = hosts
        self._seen = observed(events)
        self._costs = deque(earlier_costs(events), maxlen=_REMEMBERED)
        self._now = now
        self._began = now()
        self._apply = apply
        self._say = say
        self._said: Choice | None = None
        apply(FIRST_SAVE)
        self._choose()

    def saved(self, step: int, seconds: float, stall: float) -> None:
        """What the save of a step took."""
        self._costs.append(Cost(stall, seconds))
        self._choose()

    def _choose(self) -> None:
        if not self._costs:
            return
        # The first save of a process is slower than the rest.
        middle = Cost(*(statistics.median(column) for column in zip(*map(astuple, self._costs), strict=True)))
        rate, source = self._failures_per_second()
        choice = Choice(best_interval(middle, 1 / rate), middle, rate * _DAY, source)
        self._apply(choice.seconds)
        if self._said is None or not 1 / _MUCH < choice.seconds / self._said.seconds < _MUCH:
            self._said = choice
            self._say(choice)

    def _failures_per_second(self) -> tuple[float, str]:
        rules = self._rules
        if rules.failures_per_day is not None:
            return rules.failures_per_day / _DAY, "checkpoint.failures_per_day"
        if rules.failures_per_day_per_host is not None:
            rate = rules.failures_per_day_per_host * self._hosts / _DAY
            return rate, f"checkpoint.failures_per_day_per_host on {self._hosts} hosts"
        prior = PRIOR_FAILURES_PER_HOST_DAY * self._hosts / _DAY
        seconds = self._seen.seconds + self._now() - self._began
        # The mean of the posterior, with a prior that weighs as much as one failure.
        rate = (1 + self._seen.count) / (1 / prior + seconds)
        return rate, f"{self._seen.count} seen in {_duration(seconds)}, and what is usual for {self._hosts} hosts"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.3g} s"
