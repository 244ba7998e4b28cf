"""The buffers that one engine, the same on all stages, needs to run a table, and the slots that each work uses."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from jaxtrain.pipeline.schedule import Schedule, check_schedule

Table = npt.NDArray[np.int32]
"""[ticks, stages]; -1 where there is nothing."""

NOTHING = -1
T = TypeVar("T")


class Tables(NamedTuple, Generic[T]):
    """What is done, and which slot of each buffer is used for it: of all ticks and stages, or of one tick on one stage.

    In a tick, what arrives is written first, then comes the forward, then the backward. A slot is free again in the
    tick after the one that reads it last.
    """

    forward_chunk: T
    forward_microbatch: T
    forward_carry_slot: T
    """Nothing where the first virtual stage embeds."""
    forward_stash_slot: T
    forward_output_slot: T
    """On the last virtual stage only."""

    backward_chunk: T
    backward_microbatch: T
    backward_gradient_slot: T
    """Nothing on the last virtual stage, whose gradient is the head's."""
    backward_stash_slot: T
    backward_output_slot: T
    """On the last virtual stage only."""

    carry_arrival_slot: T
    """Where the carry goes that the stage before sent in the tick before.

    Nothing if it did no forward or that was the last virtual stage's, whose output goes to the head.
    """
    gradient_arrival_slot: T
    """The same for the gradient that the stage after sent."""


@dataclass(frozen=True, eq=False)
class BufferPlan:
    """How many slots each buffer has, the same on all stages, and which slot is used when."""

    stash_slots: int
    """For the residuals of a forward, from it to its backward."""
    carry_slots: int
    """For carries that have arrived and wait for their forward."""
    gradient_slots: int
    """For gradients that have arrived and wait for their backward."""
    output_slots: int
    """For outputs of the last virtual stage that wait for the head."""
    tables: Tables[Table]


class _Life(NamedTuple):
    """Something that a stage keeps from the tick that writes it to the tick that reads it last."""

    written: int
    read: int
    key: tuple[int, int]
    """Virtual stage and micro-batch."""


_Slots = dict[tuple[int, int], int]
_Place = tuple[int, int, tuple[int, int], int, int]


def plan_buffers(schedule: Schedule) -> BufferPlan:
    """The fewest slots with which a table can be run.

    Raises:
        ValueError: the table breaks a rule (`check_schedule`).
    """
    check_schedule(schedule)
    forward = {key: tick for tick, _, key, _, _ in _works(schedule, backward=False)}
    backward = {key: tick for tick, _, key, _, _ in _works(schedule, backward=True)}
    last = schedule.virtual_stages - 1
    lives: dict[str, list[_Life]] = {
        "stash": [_Life(forward[key], read, key) for key, read in backward.items()],
        "carry": [_Life(forward[v - 1, i] + 1, read, (v, i)) for (v, i), read in forward.items() if v > 0],
        "gradient": [_Life(backward[v + 1, i] + 1, read, (v, i)) for (v, i), read in backward.items() if v < last],
        "output": [_Life(forward[key], read, key) for key, read in backward.items() if key[0] == last],
    }
    slots, counts = {}, {}
    for name, kept in lives.items():
        slots[name], counts[name] = _assign(kept, schedule.stages)
    return BufferPlan(
        stash_slots=counts["stash"],
        carry_slots=max(1, counts["carry"]),
        gradient_slots=max(1, counts["gradient"]),
        output_slots=max(1, counts["output"]),
        tables=Tables(
            carry_arrival_slot=_arrivals(schedule, slots["carry"], lives["carry"]),
            gradient_arrival_slot=_arrivals(schedule, slots["gradient"], lives["gradient"]),
            **_side(schedule, "forward", slots, arriving="carry"),
            **_side(schedule, "backward", slots, arriving="gradient"),
        ),
    )


def _assign(lives: list[_Life], stages: int) -> tuple[_Slots, int]:
    """A slot for each life, none shared by two at once on a stage, and how many the fullest stage needs.

    Taking the lowest free slot in the order of writing needs as many as are ever alive at once, which is the fewest.
    """
    slots: _Slots = {}
    most = 0
    for stage in range(stages):
        free: list[int] = []
        busy: list[tuple[int, int]] = []
        used = 0
        for life in sorted(life for life in lives if life.key[0] % stages == stage):
            while busy and busy[0][0] < life.written:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if not free:
                heapq.heappush(free, used)
                used += 1
            slots[life.key] = heapq.heappop(free)
            heapq.heappush(busy, (life.read, slots[life.key]))
        most = max(most, used)
    return slots, most


def _side(schedule: Schedule, side: str, slots: dict[str, _Slots], arriving: str) -> dict[str, Table]:
    """The tables of all forwards or of all backwards, by the names of `Tables`."""
    tables = {
        name: _empty(schedule) for name in ("chunk", "microbatch", f"{arriving}_slot", "stash_slot", "output_slot")
    }
    for tick, stage, key, chunk, microbatch in _works(schedule, backward=side == "backward"):
        tables["chunk"][tick, stage] = chunk
        tables["microbatch"][tick, stage] = microbatch
        for buffer in (arriving, "stash", "output"):
            tables[f"{buffer}_slot"][tick, stage] = slots[buffer].get(key, NOTHING)
    return {f"{side}_{name}": table for name, table in tables.items()}


def _arrivals(schedule: Schedule, slots: _Slots, lives: list[_Life]) -> Table:
    table = _empty(schedule)
    for life in lives:
        table[life.written, life.key[0] % schedule.stages] = slots[life.key]
    return table


def _works(schedule: Schedule, *, backward: bool) -> Iterator[_Place]:
    """Tick, stage, (virtual stage, micro-batch), chunk and micro-batch of each forward, or of each backward."""
    for tick, row in enumerate(schedule.ticks):
        for stage, both in enumerate(row):
            work = both.backward if backward else both.forward
            if work is not None:
                key = (schedule.virtual_stage(stage, work.chunk), work.microbatch)
                yield tick, stage, key, work.chunk, work.microbatch


def _empty(schedule: Schedule) -> Table:
    return np.full((len(schedule.ticks), schedule.stages), NOTHING, np.int32)
