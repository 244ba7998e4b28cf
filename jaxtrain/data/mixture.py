"""Several data sets read together, by weights that may change on the way: a pure function of the data position.

Within a stage, the components come in a pattern that repeats: as many rows as the weights need to be whole numbers.
In it the j-th row of a component of weight w stands in the window from ⌊j/w⌋ to ⌈(j+1)/w⌉, as the tasks of a
proportionate-fair schedule do (Baruah et al., "Proportionate Progress", Algorithmica 15, 1996; on one processor it is
enough to take the earliest deadline first). So among the first n rows of a stage each component has ⌊n·w⌋ or ⌈n·w⌉.

Each component is walked in shuffled epochs of its own, for ever.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from jaxtrain.config.data import LONGEST_PATTERN, whole_weights
from jaxtrain.data.order import RowOrder
from jaxtrain.data.rows import FILLER, Batch, Table


@dataclass(frozen=True)
class Stage:
    """From data position `start` on these weights hold: one for each component, not all of them 0."""

    start: int
    weights: tuple[float, ...]


class _Pattern:
    """Which component each row of a stage is of, and how many of it were before."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.counts = np.array(whole_weights(weights), np.int64)
        """int64 [components]: rows of each in one pattern."""
        self.components = _pattern(self.counts.tolist())
        self._rank = np.empty(len(self.components), np.int64)
        for component in range(len(self.counts)):
            own = self.components == component
            self._rank[own] = np.arange(own.sum())

    def at(self, places: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """For places from the stage's start, the component and how many rows of it come before."""
        turns, rest = np.divmod(places, len(self.components))
        components = self.components[rest]
        return components, turns * self.counts[components] + self._rank[rest]

    def drawn(self, rows: int) -> npt.NDArray[np.int64]:
        """int64 [components]: how many of the first `rows` are of each."""
        turns, rest = divmod(rows, len(self.components))
        return turns * self.counts + np.bincount(self.components[:rest], minlength=len(self.counts))


def _pattern(counts: Sequence[int]) -> npt.NDArray[np.int64]:
    length = sum(counts)
    if length > LONGEST_PATTERN:
        raise ValueError(f"a pattern of {length} rows, which is more than {LONGEST_PATTERN}")
    drawn = [0] * len(counts)
    waiting = [(0, component) for component, count in enumerate(counts) if count]
    ready: list[tuple[int, int]] = []
    components = np.empty(length, np.int64)
    for place in range(length):
        while waiting and waiting[0][0] <= place:
            _, component = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(drawn[component] + 1) * length // counts[component]), component))
        _, component = heapq.heappop(ready)
        components[place] = component
        drawn[component] += 1
        if drawn[component] < counts[component]:
            heapq.heappush(waiting, (drawn[component] * length // counts[component], component))
    return components


class MixtureOrder:
    """The order of a mixture's rows, which are numbered through its components as in `MixtureTable`.

    Args:
        orders: of each component, without end.
        rows: of each component.
        stages: the first starts at 0, and each later one after the one before.
    """

    total: int | None = None
    """A mixture has no end."""

    def __init__(self, orders: Sequence[RowOrder], rows: Sequence[int], stages: Sequence[Stage]) -> None:
        if any(order.total is not None for order in orders):
            raise ValueError("the components of a mixture must have no end")
        starts = [stage.start for stage in stages]
        if starts[:1] != [0] or starts != sorted(set(starts)):
            raise ValueError(f"the first stage starts at 0 and each later one after the one before, not at {starts}")
        if any(len(stage.weights) != len(orders) or not any(stage.weights) for stage in stages):
            raise ValueError("each stage needs a weight for each component, and one above 0")
        self._orders = list(orders)
        self._offsets = np.concatenate([[0], np.cumsum(rows)[:-1]]).astype(np.int64)
        self._starts = np.array(starts, np.int64)
        self._patterns = [_Pattern(stage.weights) for stage in stages]
        # How many rows of each component the stages before have had.
        self._before = np.zeros((len(stages), len(orders)), np.int64)
        for stage in range(1, len(stages)):
            rows_before = int(self._starts[stage] - self._starts[stage - 1])
            self._before[stage] = self._before[stage - 1] + self._patterns[stage - 1].drawn(rows_before)

    def rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row at each position of the data: int64, the same shape. O(1) for each.

        Raises:
            IndexError: a position is negative.
        """
        flat = positions.ravel()
        if flat.size and flat.min() < 0:
            raise IndexError(f"position {flat.min()}: positions count from 0")
        stages = np.searchsorted(self._starts, flat, side="right") - 1
        components, ranks = np.empty_like(flat), np.empty_like(flat)
        for stage in np.unique(stages):
            own = stages == stage
            components[own], ranks[own] = self._patterns[stage].at(flat[own] - self._starts[stage])
            ranks[own] += self._before[stage][components[own]]
        rows = np.empty_like(flat)
        for component in np.unique(components):
            own = components == component
            rows[own] = self._orders[component].rows_at(ranks[own]) + self._offsets[component]
        return rows.reshape(positions.shape)

    def drawn(self, position: int) -> list[int]:
        """How many of the rows before a position are of each component."""
        stage = int(np.searchsorted(self._starts, position, side="right")) - 1
        drawn = self._before[stage] + self._patterns[stage].drawn(position - int(self._starts[stage]))
        return [int(count) for count in drawn]


class MixtureTable:
    """The rows of several tables as one: those of the first, then those of the second, and so on.

    Args:
        tables: by name; their rows have the same fields.
    """

    def __init__(self, tables: Mapping[str, Table]) -> None:
        self.tables = dict(tables)
        self._ends = np.cumsum([len(table) for table in self.tables.values()])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        """The rows of these ids; `FILLER` gives zeros.

        Raises:
            IndexError: an id is neither a row nor `FILLER`.
        """
        batch: Batch = {}
        for component, table in enumerate(self.tables.values()):
            own = self._components(row_ids) == component
            if own.any():
                start = self._ends[component] - len(table)
                for name, values in table.assemble(row_ids[own] - start).items():
                    batch.setdefault(name, np.zeros((len(row_ids), *values.shape[1:]), values.dtype))[own] = values
        return batch or next(iter(self.tables.values())).assemble(row_ids)

    def describe_rows(self, row_ids: npt.NDArray[np.int64]) -> list[str | int]:
        """Each row as `COMPONENT:ROW`, counted in its own table, for a log; `FILLER` as it is."""
        names, tables = list(self.tables), list(self.tables.values())
        return [
            FILLER if row == FILLER else f"{names[component]}:{row - self._ends[component] + len(tables[component])}"
            for row, component in zip(row_ids.tolist(), self._components(row_ids).tolist(), strict=True)
        ]

    def _components(self, row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        outside = row_ids[(row_ids != FILLER) & ((row_ids < 0) | (row_ids >= len(self)))]
        if len(outside):
            raise IndexError(f"row {outside[0]} of {len(self)}")
        return np.where(row_ids == FILLER, -1, np.searchsorted(self._ends, row_ids, side="right"))
