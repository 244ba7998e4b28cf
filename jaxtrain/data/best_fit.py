"""Rows that cut as few documents as can be: best-fit-decreasing packing, computed once and stored beside the shards.

A document is cut only if it is longer than a row. Its pieces, and all other documents, are then placed from the longest
to the shortest, each into the row with the least room that still holds it, or else into a new one (Ding et al., "Fewer
Truncations Improve Language Modeling", arXiv 2404.10830, section 3.2).
"""

import hashlib
import itertools
import logging
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxtrain.data.lock import exclusive
from jaxtrain.data.packing import Piece
from jaxtrain.files import replace_bytes

VERSION = 1
"""Of the algorithm: with another one the rows are others."""

_CHECKSUM_BYTES = hashlib.sha256().digest_size
_log = logging.getLogger(__name__)

Columns = npt.NDArray[np.int32]
"""int32 [4, pieces]: row, document, offset, length of each piece; rows rise, and in a row documents and offsets."""


class BestFitPlan:
    """Which pieces of which documents make up each row; the same as `RowPlan`, but for how rows are filled.

    Args:
        columns: of `place_best_fit`, or of the file that holds them.
        sequence: positions in a row.
    """

    def __init__(self, columns: Columns, sequence: int) -> None:
        self.sequence = sequence
        self._row, self._document, self._offset, self._length = columns

    def __len__(self) -> int:
        return int(self._row[-1]) + 1 if len(self._row) else 0

    @property
    def tokens(self) -> int:
        """Counted targets of all rows together."""
        return int(self._length.sum(dtype=np.int64))

    def pieces(self, row: int) -> list[Piece]:
        """The pieces of a row in order: at least one, together at most `sequence` positions. O(log pieces).

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        start, stop = np.searchsorted(self._row, np.array([row, row + 1], np.int32))
        columns = (self._document[start:stop], self._offset[start:stop], self._length[start:stop])
        return [Piece(*piece) for piece in zip(*(column.tolist() for column in columns), strict=True)]


def place_best_fit(lengths: npt.ArrayLike, sequence: int) -> Columns:
    """Places all positions of documents with these lengths in rows of `sequence`.

    A document of n tokens gives n-1 positions. All pieces of one length are placed at once, so that the time goes with
    the number of lengths and rooms that occur rather than with the number of documents.
    """
    document, offset, length = _pieces(np.asarray(lengths), sequence)
    row = np.empty(len(length), np.int32)
    order = np.argsort(-length, kind="stable")
    rows = _Rows(sequence)
    descending = length[order]
    bounds = np.append(np.flatnonzero(np.diff(descending, prepend=-1)), len(order))
    for start, stop in itertools.pairwise(bounds.tolist()):
        row[order[start:stop]] = rows.place(int(descending[start]), stop - start)
    return _in_order(row, document, offset, length)


def _pieces(lengths: npt.NDArray[Any], sequence: int) -> tuple[Columns, Columns, Columns]:
    """Document, offset and length of each piece: full rows, and what is left of a document."""
    positions = np.maximum(lengths.astype(np.int64) - 1, 0)
    counts = -(-positions // sequence)
    document = np.repeat(np.arange(len(positions), dtype=np.int32), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offset = (np.arange(len(document)) - first) * sequence
    return document, offset.astype(np.int32), np.minimum(positions[document] - offset, sequence).astype(np.int32)


def _in_order(row: Columns, document: Columns, offset: Columns, length: Columns) -> Columns:
    """Numbers the rows by the first piece that each holds, so that unshuffled rows follow the documents."""
    first = np.full(int(row.max(initial=-1)) + 1, len(row), np.int64)
    np.minimum.at(first, row, np.arange(len(row)))
    number = np.empty(len(first), np.int32)
    number[np.argsort(first, kind="stable")] = np.arange(len(first), dtype=np.int32)
    order = np.argsort(number[row], kind="stable")
    return np.stack([number[row][order], document[order], offset[order], length[order]])


class _Rows:
    """Rows that are being filled, by the room that each has left."""

    def __init__(self, sequence: int) -> None:
        self._sequence = sequence
        self._count = 0
        self._with_room: list[deque[npt.NDArray[np.int32]]] = [deque() for _ in range(sequence)]
        self._rooms = 0  # bit r: there are rows with room r

    def place(self, length: int, count: int) -> npt.NDArray[np.int32]:
        """The rows of `count` pieces of one length, which is not above any length that was placed before.

        As if they came one by one: a row takes as many as it has room for before it is the turn of the next, since each
        that it takes makes it the tightest.
        """
        placed: list[npt.NDArray[np.int32]] = []
        while count:
            fitting = self._rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                rows = self._with_room[room].popleft()
                if not self._with_room[room]:
                    self._rooms &= ~(1 << room)
            else:
                room = self._sequence
                rows = np.arange(self._count, self._count + -(-count // (room // length)), dtype=np.int32)
                self._count += len(rows)
            count -= self._fill(rows, room, length, count, placed)
        return np.concatenate(placed)

    def _fill(
        self, rows: npt.NDArray[np.int32], room: int, length: int, count: int, placed: list[npt.NDArray[np.int32]]
    ) -> int:
        """Puts up to `count` pieces in these rows, which all have this room; returns how many."""
        each = room // length
        full = min(len(rows), count // each)
        placed.append(np.repeat(rows[:full], each))
        self._keep(rows[:full], room - each * length)
        done, rest = full * each, rows[full:]
        if len(rest) and done < count:
            last = count - done
            placed.append(np.repeat(rest[:1], last))
            self._keep(rest[:1], room - last * length)
            done, rest = count, rest[1:]
        if len(rest):
            self._with_room[room].appendleft(rest)
            self._rooms |= 1 << room
        return done

    def _keep(self, rows: npt.NDArray[np.int32], room: int) -> None:
        if len(rows) and room:
            self._with_room[room].append(rows)
            self._rooms |= 1 << room


def plan_name(lengths_sha256: str, sequence: int) -> str:
    """What the plan is a function of, as 16 hex digits."""
    return hashlib.sha256(f"best-fit {VERSION} {sequence} {lengths_sha256}".encode()).hexdigest()[:16]


def stored_best_fit(
    directory: Path, split: str, lengths: npt.NDArray[np.int32], lengths_sha256: str, sequence: int
) -> Columns:
    """`place_best_fit`, read from `DIRECTORY/SPLIT-best-fit-NAME.plan`, or else computed and stored there.

    A file that doesn't hold what was written is replaced. Where the directory can't be written, the plan is computed
    each time, with a warning.
    """
    path = directory / f"{split}-best-fit-{plan_name(lengths_sha256, sequence)}.plan"
    columns = _read(path)
    if columns is None:
        try:
            with exclusive(directory):
                columns = _read(path)  # it may have come while we waited
                if columns is None:
                    columns = place_best_fit(lengths, sequence)
                    content = columns.tobytes()
                    replace_bytes(path, content + hashlib.sha256(content).digest())
        except OSError as error:
            _log.warning("%s can't be stored (%s): it is computed at each start", path, error.strerror)
            columns = place_best_fit(lengths, sequence) if columns is None else columns
    return columns


def _read(path: Path) -> Columns | None:
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):  # not there, or empty
        return None
    stored, checksum = content[:-_CHECKSUM_BYTES], content[-_CHECKSUM_BYTES:].tobytes()
    if len(stored) % 16 or hashlib.sha256(stored.data).digest() != checksum:
        _log.warning("%s is damaged and is computed again", path)
        return None
    return stored.view(np.int32).reshape(4, -1)
