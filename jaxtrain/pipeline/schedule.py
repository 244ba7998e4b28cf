"""Schedules as tables: what each stage does in each tick.

A tick does at most one forward, then at most one backward, and ends with one exchange with both neighbours. It costs
what its slowest stage does, so forward and backward are paired: were a tick one operation, neighbours would alternate
between the two, and every tick would cost a backward.
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal, NamedTuple, get_args

from jaxtrain.errors import ConfigError

ScheduleKind = Literal["gpipe", "1f1b", "interleaved_1f1b"]
KINDS: tuple[str, ...] = get_args(ScheduleKind)


class Work(NamedTuple):
    """One micro-batch through one chunk of a stage; the virtual stage is chunk · stages + stage."""

    chunk: int
    microbatch: int


class Tick(NamedTuple):
    """What one stage does in one tick: the forward first, then the backward."""

    forward: Work | None
    backward: Work | None


@dataclass(frozen=True)
class Schedule:
    """A table of work over chunks · stages virtual stages, of which stage s holds each one that is s modulo stages."""

    kind: str
    stages: int
    chunks: int
    microbatches: int
    ticks: tuple[tuple[Tick, ...], ...]
    """[tick][stage]"""

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def title(self) -> str:
        """Such as `1f1b: 8 stages, 16 micro-batches`."""
        chunks = f" × {self.chunks} chunks" if self.chunks > 1 else ""
        stages = f"{self.stages} stage{'s' if self.stages > 1 else ''}"
        microbatches = f"{self.microbatches} micro-batch{'es' if self.microbatches > 1 else ''}"
        return f"{self.kind}: {stages}{chunks}, {microbatches}"

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """The place of a stage's chunk in the order in which a micro-batch passes them."""
        return chunk * self.stages + stage


class _Entry(NamedTuple):
    """A micro-batch's entry into the first stage of a chunk: the tick, counted from the first forward, and the work."""

    tick: int
    mirrored: int
    """The same for its entry into the last stage's backward, counted from the first backward."""
    work: Work


def make_schedule(kind: str, stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """The table of a training step.

    `gpipe` (arXiv:1811.06965): all forwards, then all backwards, in the same order, so gradients add up as in 1f1b.
    `1f1b` (PipeDream-Flush, arXiv:2006.09503), paired: F(i) on stage s in tick i + s, B(i) in tick i + 2(p-1) - s.
    `interleaved_1f1b` (arXiv:2104.04473): groups of g micro-batches pass the first chunk of all stages, then the next.
    In a group that starts in tick t, F(c, i) is on stage s in tick t + s + c·g + i, and backwards mirror that. Groups
    have p micro-batches, or some more where p doesn't divide m: one of fewer would leave (v-1)(p-g) ticks empty.
    With fewer micro-batches than stages there is one group with such gaps, and no table is faster.

    Args:
        kind: one of `KINDS`.
        stages: p, devices along the pipeline.
        microbatches: m, any number.
        chunks: v, pieces of each stage; 1 except for `interleaved_1f1b`, which is `1f1b` with 1.

    Raises:
        ConfigError: there is no such schedule.
    """
    _refuse_impossible(kind, stages, microbatches, chunks)
    entries, depth = _entries(stages, microbatches, chunks)
    first_backward = depth + stages - 1 if kind != "gpipe" else entries[-1].tick + stages - 1
    return _table(kind, stages, microbatches, chunks, entries, first_backward)


def check_schedule(schedule: Schedule) -> None:
    """Sees that a table does everything once and nothing before what it needs has arrived.

    What a stage sends in a tick arrives in the next. The backward of the last virtual stage needs its own forward, of
    the same tick or before.

    Raises:
        ValueError: names the first violation, in the order of ticks; what is missing comes last.
    """
    last = schedule.virtual_stages - 1
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], int] = {}
    for tick, row in enumerate(schedule.ticks):
        if len(row) != schedule.stages:
            raise ValueError(f"tick {tick} has {len(row)} stages, not {schedule.stages}")
        for stage, (forward, backward) in enumerate(row):
            if forward is not None:
                virtual, name = _register(schedule, forwards, tick, stage, forward, "forward")
                if virtual > 0 and forwards.get((virtual - 1, forward.microbatch), tick) >= tick:
                    raise ValueError(f"{name} comes before the output of virtual stage {virtual - 1} has arrived")
            if backward is not None:
                virtual, name = _register(schedule, backwards, tick, stage, backward, "backward")
                if virtual < last and backwards.get((virtual + 1, backward.microbatch), tick) >= tick:
                    raise ValueError(f"{name} comes before the gradient of virtual stage {virtual + 1} has arrived")
                if virtual == last and (virtual, backward.microbatch) not in forwards:
                    raise ValueError(f"{name} comes before its own forward")
    for direction, ticks in (("forward", forwards), ("backward", backwards)):
        for virtual in range(schedule.virtual_stages):
            for microbatch in range(schedule.microbatches):
                if (virtual, microbatch) not in ticks:
                    raise ValueError(
                        f"the {direction} of micro-batch {microbatch} on virtual stage {virtual} is missing"
                    )


def _register(
    schedule: Schedule, done: dict[tuple[int, int], int], tick: int, stage: int, work: Work, direction: str
) -> tuple[int, str]:
    """Notes the tick of a work; returns its virtual stage and its name."""
    name = f"tick {tick}, stage {stage}: the {direction} of micro-batch {work.microbatch} on chunk {work.chunk}"
    if not 0 <= work.chunk < schedule.chunks or not 0 <= work.microbatch < schedule.microbatches:
        raise ValueError(f"{name}: there are {schedule.chunks} chunks and {schedule.microbatches} micro-batches")
    virtual = schedule.virtual_stage(stage, work.chunk)
    if (virtual, work.microbatch) in done:
        raise ValueError(f"{name} was done in tick {done[virtual, work.microbatch]} already")
    done[virtual, work.microbatch] = tick
    return virtual, name


def _entries(stages: int, microbatches: int, chunks: int) -> tuple[list[_Entry], int]:
    """Every micro-batch's entry into every chunk, and the ticks from its entry into the first to that into the last."""
    groups = max(1, microbatches // stages)
    entries, first, depth = [], 0, 0
    for group in range(groups):
        size = microbatches // groups + (group < microbatches % groups)
        period = max(size, stages)  # a micro-batch is back on the first stage after as many ticks as there are stages
        for chunk in range(chunks):
            for index in range(size):
                tick = chunks * first + chunk * period + index
                mirrored = chunks * first + (chunks - 1 - chunk) * period + index
                entries.append(_Entry(tick, mirrored, Work(chunk, first + index)))
        first, depth = first + size, max(depth, (chunks - 1) * period)
    return entries, depth


def _table(
    kind: str, stages: int, microbatches: int, chunks: int, entries: list[_Entry], first_backward: int
) -> Schedule:
    """The entries, passed on from stage to stage: forwards upwards, backwards down."""
    forwards = {(entry.tick + stage, stage): entry.work for entry in entries for stage in range(stages)}
    backwards = {
        (first_backward + entry.mirrored + stages - 1 - stage, stage): entry.work
        for entry in entries
        for stage in range(stages)
    }
    ticks = tuple(
        tuple(Tick(forwards.get((tick, stage)), backwards.get((tick, stage))) for stage in range(stages))
        for tick in range(1 + max(tick for tick, _ in [*forwards, *backwards]))
    )
    return Schedule(kind, stages, chunks, microbatches, ticks)


def _refuse_impossible(kind: str, stages: int, microbatches: int, chunks: int) -> None:
    if kind not in KINDS:
        near = get_close_matches(kind.lower(), KINDS, n=1, cutoff=0.4)
        raise ConfigError(
            f"pipeline.schedule={kind} is none of {', '.join(KINDS)}{f'; did you mean {near[0]}?' if near else ''}"
        )
    if stages < 1:
        raise ConfigError(f"mesh.pipeline={stages} leaves no stage; the nearest value is 1")
    if microbatches < 1:
        raise ConfigError(f"pipeline.schedule={kind} needs at least one micro-batch in a step, not {microbatches}")
    if chunks < 1:
        raise ConfigError(f"pipeline.chunks={chunks} leaves no layers on a stage; the nearest value is 1")
    if chunks > 1 and kind != "interleaved_1f1b":
        raise ConfigError(
            f"pipeline.chunks={chunks}, but pipeline.schedule={kind} has one chunk for each stage; "
            f"set pipeline.chunks: 1 or pipeline.schedule: interleaved_1f1b"
        )
