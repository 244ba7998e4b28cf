"""How long a table takes in lockstep: stages exchange at the end of each tick, so none goes on before all are done."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxtrain.pipeline.schedule import Schedule, Work

Costs = float | Sequence[float]
"""The time of one micro-batch: the same on each virtual stage, or one for each of them in their order."""


class Span(NamedTuple):
    """When a stage did a work, in the unit of the costs."""

    stage: int
    work: Work
    backward: bool
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """A schedule in time, in the unit of the costs."""

    schedule: Schedule
    spans: tuple[Span, ...]
    """In the order of ticks, then stages; a forward before the backward of its tick."""
    total: float
    ideal: float
    """What an even split of the same work would take with the table's smallest bubble, (m + (p-1)/v)(F + B).

    F and B are the times of all chunks of a stage, a mean over the stages. With fewer micro-batches than stages, when
    a micro-batch's own way through the pipeline is longer, (p + (m-1)/v)(F + B).
    """

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they are idle or exchange."""
        busy = math.fsum(span.end - span.start for span in self.spans)
        return 1 - busy / (self.total * self.schedule.stages)


def simulate(schedule: Schedule, forward: Costs, backward: Costs, link: float = 0.0) -> Timeline:
    """The time of every work of a table that `check_schedule` accepts.

    Args:
        forward: the time of one micro-batch's forward on one virtual stage, with the embedding on the first.
        backward: the same for the backward, with both passes of the head on the last, which runs there.
        link: the time of the exchange at the end of each tick.

    Raises:
        ValueError: a time is negative or not finite, or there is not one for each virtual stage, or all are 0.
    """
    costs = (_each(schedule, "forward", forward), _each(schedule, "backward", backward))
    _each(schedule, "link", link)
    spans: list[Span] = []
    now = 0.0
    for row in schedule.ticks:
        of_tick = list(_tick(schedule, row, costs, now))
        spans.extend(of_tick)
        now = max((span.end for span in of_tick), default=now) + link
    if now == 0:
        raise ValueError("forward, backward and link are all 0: there is no time to tell")
    return Timeline(schedule, tuple(spans), total=now, ideal=_ideal(schedule, *costs))


def microbatches_in_flight(schedule: Schedule) -> float:
    """How many whole micro-batches a stage has residuals of, at most: chunks between forward and backward, over v."""
    most = 0
    for stage in range(schedule.stages):
        kept = 0
        for row in schedule.ticks:
            kept += row[stage].forward is not None
            most = max(most, kept)
            kept -= row[stage].backward is not None
    return most / schedule.chunks


def _tick(
    schedule: Schedule, row: Sequence[tuple[Work | None, Work | None]], costs: tuple[list[float], ...], start: float
) -> Iterator[Span]:
    for stage, both in enumerate(row):
        begun = start
        for backward, work in enumerate(both):
            if work is not None:
                end = begun + costs[backward][schedule.virtual_stage(stage, work.chunk)]
                yield Span(stage, work, bool(backward), begun, end)
                begun = end


def _ideal(schedule: Schedule, forward: list[float], backward: list[float]) -> float:
    microbatches, stages = schedule.microbatches, schedule.stages
    passes = max(microbatches, stages) + (min(microbatches, stages) - 1) / schedule.chunks
    return passes * (math.fsum(forward) + math.fsum(backward)) / stages


def _each(schedule: Schedule, name: str, costs: Costs) -> list[float]:
    """One time for each virtual stage."""
    each = list(costs) if isinstance(costs, Sequence) else [costs] * schedule.virtual_stages
    if len(each) != schedule.virtual_stages:
        raise ValueError(f"{name} has {len(each)} times, but there are {schedule.virtual_stages} virtual stages")
    for cost in each:
        if not (cost >= 0 and math.isfinite(cost)):
            raise ValueError(f"{name}={cost} is no time: it must be finite and not negative")
    return each
