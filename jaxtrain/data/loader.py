"""Batches for one process, read ahead by threads or by worker processes.

Grain reads ahead. Its elements are whole batches, and element k is a function of the position and k alone: threads,
workers and restarts can't change what a batch holds.
"""

import pickle
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxtrain.data.order import RowOrder
from jaxtrain.data.rows import Batch, Table
from jaxtrain.data.worker import Workers
from jaxtrain.errors import DataError, JaxtrainError

if TYPE_CHECKING:
    import grain

ROW_IDS = "row_ids"
# Python's lock lets hardly more than two threads assemble at a time.
_THREADS = 2


def host_batches(
    table: Table,
    order: RowOrder,
    global_batch: int,
    local_rows: npt.ArrayLike,
    start: int = 0,
    workers: int = 0,
    prefetch: int = 2,
) -> "HostBatches":
    """This process's part of every batch from data position `start` on.

    Element k stands for the positions `start + k*global_batch` and on (positions count rows) and holds the rows at
    the places `local_rows` of the batch, in that order: the table's fields, each `[len(local_rows), …]`, and
    `row_ids` int64 `[len(local_rows)]`. Finite data end with the last batch that holds a row, completed by fillers:
    on every process after the same number of batches.

    Args:
        table: the rows; for `workers` > 0 it must pickle.
        order: which row stands at which position.
        global_batch: rows of a batch over all processes.
        local_rows: int [n], places in the global batch, 0 to `global_batch`-1, that this process holds.
        start: data position of the first batch. Costs the same wherever it is.
        workers: processes that assemble batches; 0 is two threads of this one. A program that uses workers must guard
            its own start with `if __name__ == "__main__":`, since each worker imports it.
        prefetch: batches read ahead; 0 (only without workers) assembles each when it is asked for.

    Raises:
        ValueError: an argument is out of its range.
    """
    if global_batch < 1 or start < 0 or workers < 0 or prefetch < 0:
        given = f"global_batch {global_batch}, start {start}, workers {workers}, prefetch {prefetch}"
        raise ValueError(f"out of range: {given}")
    places = np.asarray(local_rows, np.int64)
    if places.ndim != 1 or not ((places >= 0) & (places < global_batch)).all():
        raise ValueError(f"local_rows must be a list of places from 0 to {global_batch - 1}")
    return HostBatches(_BatchSource(table, order, global_batch, places, start), workers, prefetch)


class HostBatches(Iterator[Batch]):
    """An iterator over this process's batches, which reads ahead from its making on; made by `host_batches`.

    An error of the table is raised in the place of its batch, and again ever after.
    """

    def __init__(self, source: "_BatchSource", workers: int, prefetch: int) -> None:
        self._remaining = len(source)
        self._error: Exception | None = None
        self._elements: Workers | grain.DatasetIterator[Any] | None
        if workers:
            self._elements = Workers(partial(_read_ahead, source, max(1, prefetch // workers)), workers)
        else:
            threads = _read_ahead(source, prefetch)
            threads.start_prefetch()
            self._elements = threads

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        if not self._remaining:
            self.close()
            raise StopIteration
        if self._elements is None:
            raise ValueError("the batches are closed")
        try:
            element = next(self._elements)
        except StopIteration:
            element = _Failed(RuntimeError(f"the data ended {self._remaining} batches early"))
        except Exception as error:
            element = _Failed(error)
        if isinstance(element, _Failed):
            self._error = element.error
            raise self._error
        self._remaining -= 1
        batch: Batch = element
        return batch

    def close(self) -> None:
        """Ends threads and workers and waits for workers. May be called again."""
        if self._elements is not None:
            self._elements.close()
            self._elements = None


@dataclass
class _Failed:
    """Stands for a batch that could not be assembled: Grain would change the error's words and lose its place."""

    error: Exception


@dataclass(frozen=True, eq=False)
class _BatchSource:
    """The batches by number, as Grain's random-access source."""

    table: Table
    order: RowOrder
    global_batch: int
    places: npt.NDArray[np.int64]
    start: int

    def __len__(self) -> int:
        end = sys.maxsize if self.order.total is None else self.order.total
        return max(-(-(end - self.start) // self.global_batch), 0)

    def __getitem__(self, index: int) -> Batch | _Failed:
        try:
            row_ids = self.order.rows_at(self.start + index * self.global_batch + self.places)
            fields = self.table.assemble(row_ids)
            _check_fields(fields, len(row_ids))
        except (Exception, SystemExit) as error:
            return _Failed(_portable(error))
        return {**fields, ROW_IDS: row_ids}


def _check_fields(fields: Batch, rows: int) -> None:
    if ROW_IDS in fields:
        raise DataError(f"the table has a field named {ROW_IDS!r}, which the loader adds itself: rename it")
    for name, values in fields.items():
        shape = np.shape(values)
        if shape[:1] != (rows,):
            raise DataError(f"the table's field {name!r} has shape {shape} for {rows} rows: make its first size {rows}")


def _portable(error: Exception | SystemExit) -> Exception:
    """The error itself where it can be raised in the trainer, or else one that says the same."""
    story = "".join(traceback.format_exception(error)).rstrip()
    if isinstance(error, StopIteration | SystemExit):  # would read as the end of the data, or of the work
        return RuntimeError(story)
    if parent_process() is None:
        return error
    if not isinstance(error, JaxtrainError):  # the traceback itself can't leave the worker
        error.add_note(f"In a data worker:\n{story}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(story)
    return error


def _read_ahead(source: _BatchSource, prefetch: int, index: int = 0, count: int = 1) -> "grain.DatasetIterator[Any]":
    """The batches index, index+count, index+2·count, …, read ahead by threads."""
    import grain  # imports jax, which must not happen when this module is imported

    elements: Any = grain.MapDataset.source(source)
    options = grain.ReadOptions(num_threads=min(_THREADS, prefetch), prefetch_buffer_size=prefetch)
    return iter(elements[index::count].to_iter_dataset(options))
