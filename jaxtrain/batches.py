"""The batches of a run from any data position on, in the sizes that its ramp has there."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

from jaxtrain.config import BatchPlan, DataConfig
from jaxtrain.data import Batch, HostBatches, host_batches
from jaxtrain.placement import Placement
from jaxtrain.training_data import TrainingData


@dataclass(frozen=True)
class SizedBatch:
    """This process's part of a batch.

    Attributes:
        size: rows of the whole batch, over all processes.
        position: data position of its first row.
    """

    size: int
    position: int
    rows: Batch


class RunBatches(Iterator[SizedBatch]):
    """Each batch from `position` on; ends with the data.

    Reads ahead within a phase; the next phase's reading starts with its first batch.

    Args:
        places: for each size of the plan, where its rows go.
    """

    def __init__(
        self, plan: BatchPlan, data: TrainingData, places: Mapping[int, Placement], position: int, options: DataConfig
    ):
        self._plan = plan
        self._data = data
        self._places = places
        self._options = options
        self._position = position
        self._phase = plan.phase_at(position)
        self._batches = self._open()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> SizedBatch:
        if self._position == self._phase.end:
            self._batches.close()
            self._phase = self._plan.phase_at(self._position)
            self._batches = self._open()
        batch = SizedBatch(self._phase.size, self._position, next(self._batches))
        self._position += self._phase.size
        return batch

    def close(self) -> None:
        """Ends threads and workers."""
        self._batches.close()

    def _open(self) -> HostBatches:
        return host_batches(
            self._data.table,
            self._data.order,
            self._phase.size,
            self._places[self._phase.size].rows,
            start=self._position,
            workers=self._options.workers,
            prefetch=self._options.prefetch,
        )
