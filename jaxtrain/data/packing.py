"""From the lengths of documents to rows of a fixed number of tokens.

Every token that has a successor in its own document is an input exactly once over all rows; its successor is its
target, wherever the row ends. A document of n tokens gives n-1 positions, so no token is trained to predict the
first one of the next document.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Piece(NamedTuple):
    """`length` positions of a document, from `offset` on: inputs `[offset, offset+length)`, targets one further."""

    document: int
    offset: int
    length: int


class RowPlan:
    """Which pieces of which documents make up each row.

    Packed, the positions of all documents form one stream that is cut every `sequence`: all rows are full but the
    last. Otherwise every document starts a row of its own and is cut every `sequence`.

    Args:
        lengths: int [documents], the tokens of each document.
        sequence: positions in a row.
        packed: several documents in one row, or one.
    """

    def __init__(self, lengths: npt.ArrayLike, sequence: int, packed: bool) -> None:
        if sequence < 1:
            raise ValueError(f"sequence must be at least 1, not {sequence}")
        self.sequence = sequence
        self.packed = packed
        self._positions = np.maximum(np.asarray(lengths, np.int64) - 1, 0)
        self._units = self._positions if packed else -(-self._positions // sequence)
        # The first stream position (packed) or the first row (not packed) of each document.
        self._starts = np.concatenate([[0], np.cumsum(self._units)])

    def __len__(self) -> int:
        total = int(self._starts[-1])
        return -(-total // self.sequence) if self.packed else total

    @property
    def tokens(self) -> int:
        """Counted targets of all rows together."""
        return int(self._positions.sum())

    def pieces(self, row: int) -> list[Piece]:
        """The pieces of a row in order: at least one, together at most `sequence` positions. O(log documents).

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self._packed_pieces(row) if self.packed else [self._single_piece(row)]

    def _document_at(self, unit: int) -> int:
        # Documents without positions start where their successor does: `right` steps over them.
        return int(np.searchsorted(self._starts, unit, side="right")) - 1

    def _single_piece(self, row: int) -> Piece:
        document = self._document_at(row)
        offset = (row - int(self._starts[document])) * self.sequence
        return Piece(document, offset, min(self.sequence, int(self._positions[document]) - offset))

    def _packed_pieces(self, row: int) -> list[Piece]:
        start = row * self.sequence
        end = min(start + self.sequence, int(self._starts[-1]))
        pieces = []
        document = self._document_at(start)
        while start < end:
            stop = min(end, int(self._starts[document + 1]))
            if stop > start:
                pieces.append(Piece(document, start - int(self._starts[document]), stop - start))
            start = stop
            document += 1
        return pieces
