"""`RUN/events.jsonl` cut into attempts: one from each start of the run to its end, or its death."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from jaxtrain.errors import EXIT_COMPLETE

Event = dict[str, Any]

SUPERVISOR = -1
"""Its number among processes."""


@dataclass
class Attempt:
    """What the events tell of one start.

    Attributes:
        begin, end: unix seconds; `end` is that of the last sign of life.
    """

    begin: float
    end: float
    events: list[Event] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["kind"] == kind]

    def first(self, kind: str) -> Event | None:
        return next(iter(self.of_kind(kind)), None)

    @property
    def found_complete(self) -> bool:
        """Whether it found the run at its goal and did nothing."""
        stop = self.first("stop")
        return stop is not None and stop.get("exit_code") == EXIT_COMPLETE and self.first("progress") is None

    @property
    def fault(self) -> Event | None:
        """The first that was seen."""
        return self.first("fault")


def read_attempts(events: Sequence[Event]) -> list[Attempt]:
    """The attempts in order; those that found the run complete already are left out, however much later they came.

    Args:
        events: as `read_events` gives them, in any order of processes; what isn't an event is passed over.
    """
    attempts: list[Attempt] = []
    for event in _in_time(events):
        if not attempts or _begins(event, attempts[-1]):
            begin = event["time"] - seconds_of(event)
            attempts.append(Attempt(begin, event["time"]))
        _add(attempts[-1], event)
    kept = [attempt for attempt in attempts if not attempt.found_complete]
    for before, after in pairwise(kept):
        after.begin = max(after.begin, before.end)
    return kept


def seconds_of(event: Event, key: str = "seconds") -> float:
    """A number that an event carries, such as how long what it tells of took; 0 where it doesn't say."""
    value = event.get(key)
    return max(float(value), 0.0) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _in_time(events: Sequence[Event]) -> Iterator[Event]:
    """Events with a time and a kind, in the order of the file; a clock that was set back stands still until then."""
    latest = 0.0
    for event in events:
        if isinstance(event.get("time"), int | float) and isinstance(event.get("kind"), str):
            latest = max(latest, float(event["time"]))
            yield {**event, "time": latest}


def _begins(event: Event, attempt: Attempt) -> bool:
    """Whether this event is the first of another attempt: a start, or the supervisor's launch that comes before it."""
    if event["kind"] == "launch":
        return bool(attempt.events)
    return event["kind"] == "start" and attempt.first("start") is not None


def _add(attempt: Attempt, event: Event) -> None:
    attempt.events.append(event)
    if event["kind"] == "restart":
        return
    if event["kind"] == "fault" and event.get("process") == SUPERVISOR:
        attempt.end = max(attempt.end, event["time"] - seconds_of(event, "seen_after"))
    else:
        attempt.end = max(attempt.end, event["time"])
