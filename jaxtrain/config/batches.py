"""Which batch size holds where: the ramp as arithmetic on the data position.

The size is a function of the position, not of the step: then which rows stand together in a batch doesn't depend on
which batches were skipped. Without skips a part of `steps` steps is exactly that; a skipped batch counts as one too.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A stretch of the data in batches of one size.

    Attributes:
        size: examples per batch.
        batches: how many there are; None: no end.
        start: data position of the first.
        before: batches in all phases before.
    """

    size: int
    batches: int | None
    start: int
    before: int

    @property
    def end(self) -> int | None:
        """The data position after the last batch; None: no end."""
        return None if self.batches is None else self.start + self.batches * self.size


@dataclass(frozen=True)
class BatchPlan:
    """All phases of a run in order; the last has no end."""

    phases: tuple[Phase, ...]

    @classmethod
    def of(cls, ramp: Sequence[tuple[int, int]], size: int) -> "BatchPlan":
        """The plan of (batches, size) parts, and then `size` for ever."""
        phases, start, before = [], 0, 0
        for batches, part in ramp:
            phases.append(Phase(part, batches, start, before))
            start, before = start + batches * part, before + batches
        return cls((*phases, Phase(size, None, start, before)))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Each size once, in the order of the run."""
        return tuple(dict.fromkeys(phase.size for phase in self.phases))

    def phase_at(self, position: int) -> Phase:
        """The phase that the batch at a data position belongs to."""
        return next(phase for phase in self.phases if phase.end is None or position < phase.end)

    def steps_to(self, rows: int) -> int:
        """The fewest batches from the start that together have at least so many rows."""
        if rows <= 0:
            return 0
        phase = self.phase_at(rows - 1)
        return phase.before - (phase.start - rows) // phase.size

    def rows_of(self, batches: int) -> int:
        """The rows of so many batches from the start, which is the data position after them."""
        phase = next(phase for phase in reversed(self.phases) if phase.before <= batches)
        return phase.start + (batches - phase.before) * phase.size
