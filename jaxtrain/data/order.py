"""Which row stands at which place of the data: a pure function of an integer."""

from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxtrain.data.rows import FILLER


class RowOrder(Protocol):
    """Which row stands at which position. Must pickle, since data workers get a copy."""

    total: int | None
    """Positions until the end, or None if there is none."""

    def rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The row at each position, or `FILLER` beyond the end: int64, the same shape."""


class Order:
    """The order of all rows over all epochs.

    Position i of the data holds row `order.row(i)`, whatever was read before: a resumed run needs to know nothing but
    its position. Each epoch holds every row once; shuffled, each in a new permutation.

    Args:
        rows: rows of an epoch, below 2³¹.
        seed: of the shuffle, 0 to 2³²-1.
        shuffle: a new permutation each epoch, or always 0, 1, 2, ….
        epochs: how many there are, or None for no end.
    """

    def __init__(self, rows: int, seed: int, shuffle: bool, epochs: int | None) -> None:
        if not 0 < rows < 1 << 31:
            raise ValueError(f"rows must be from 1 to 2**31-1, not {rows}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs must be at least 1 or None, not {epochs}")
        self._arguments = (rows, seed, shuffle, epochs)
        self.total = None if epochs is None else rows * epochs
        """Rows of all epochs together, or None if there is no end."""
        import grain  # imports jax, which must not happen when this module is imported

        dataset = grain.MapDataset.range(rows).seed(seed)
        self._dataset = (dataset.shuffle() if shuffle else dataset).repeat(epochs)
        # Grain sets a data set up at its first use, and not thread-safely.
        self.row(0)

    def __reduce__(self) -> tuple[type["Order"], tuple[int, int, bool, int | None]]:
        return Order, self._arguments

    def row(self, position: int) -> int:
        """The row at a position of the data, or `FILLER` beyond its end. O(1)."""
        if position < 0:
            raise IndexError(f"position {position}: positions count from 0")
        if self.total is not None and position >= self.total:
            return FILLER
        return int(self._dataset[position])

    def rows_at(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """`row` of each position: int64, the same shape."""
        rows = [self.row(int(position)) for position in positions.ravel()]
        return np.array(rows, np.int64).reshape(positions.shape)
