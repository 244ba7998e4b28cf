"""How fast a run was back after each fault, from its events: from the fault to the next finished step, and by what."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtrain.errors import EXIT_COMPLETE, EXIT_INTERRUPTED, EXIT_REQUEUE
from jaxtrain.telemetry.attempts import Attempt, Event, seconds_of

PARTS = ("detect", "stop", "wait", "start", "compile", "restore", "first step", "other")
"""Until the fault is seen; until all processes have ended; until new ones are launched; until the run directory is
opened; compiling; restoring; the first step; what lies between."""

_ORDERLY = (EXIT_COMPLETE, EXIT_REQUEUE, EXIT_INTERRUPTED)
_LONGEST_REASON = 60


@dataclass(frozen=True)
class Return:
    """One fault, and the way back.

    Attributes:
        what: it was.
        seconds: of each part in `PARTS`; those that nobody told of are left out.
        total: seconds from the fault, or the last sign of life before it, to the first finished step after it.
        starts: that it took.
    """

    what: str
    seconds: dict[str, float]
    total: float
    starts: int


def read_returns(attempts: Sequence[Attempt]) -> list[Return]:
    """All returns of a run, in order. An attempt that ended as it was asked to had no fault."""
    returns, before = [], 0
    for index in range(1, len(attempts)):
        first = attempts[index].first("progress")
        if first is None:
            continue
        if not _ended_in_order(attempts[before]):
            returns.append(_return(attempts[before], attempts[index], first, index - before))
        before = index
    return returns


def medians(returns: Sequence[Return]) -> Return:
    """A return with the median of each part, and of the whole."""
    parts = {part: [one.seconds[part] for one in returns if part in one.seconds] for part in PARTS}
    seconds = {part: statistics.median(values) for part, values in parts.items() if values}
    total = statistics.median(one.total for one in returns)
    return Return("median", seconds, total, round(statistics.median(one.starts for one in returns)))


def _ended_in_order(attempt: Attempt) -> bool:
    stop = attempt.first("stop")
    return stop is not None and stop.get("exit_code") in _ORDERLY and attempt.fault is None


def _return(before: Attempt, after: Attempt, first: Event, starts: int) -> Return:
    died = seen = before.end
    seconds: dict[str, float] = {}
    if before.fault is not None:
        died = min(fault["time"] - seconds_of(fault, "seen_after") for fault in before.of_kind("fault"))
        seen = before.fault["time"]
        seconds["detect"] = seen - died
    restart = before.first("restart")
    ended = seen if restart is None else max(restart["time"], seen)
    if restart is not None:
        seconds["stop"] = ended - seen
    start = after.first("start")
    opened = after.begin if start is None else start["time"]
    until = after.events[: after.events.index(first)]
    seconds |= {
        "wait": max(after.begin - ended, 0.0),
        "start": opened - after.begin,
        "compile": _sum(until, "compile"),
        "restore": _sum(until, "restore"),
        "first step": seconds_of(first),
    }
    total = first["time"] - died
    return Return(_what(before), seconds | {"other": max(total - math.fsum(seconds.values()), 0.0)}, total, starts)


def _sum(events: Sequence[Event], kind: str) -> float:
    return math.fsum(seconds_of(event) for event in events if event["kind"] == kind)


def _what(attempt: Attempt) -> str:
    if (fault := attempt.fault) is not None:
        where = "" if fault.get("step") is None else f" at step {fault['step']}"
        return f"rank {fault.get('rank', '?')} {fault.get('what', 'failed')}{where}"
    if (stop := attempt.first("stop")) is not None:
        reason = str(stop.get("reason", "")).splitlines() or [""]
        short = reason[0] if len(reason[0]) <= _LONGEST_REASON else f"{reason[0][:_LONGEST_REASON]}…"
        return f"exit code {stop.get('exit_code', '?')}: {short}"
    return "ended without a word"
