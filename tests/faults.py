"""Trainings with a fault put in: `python -m tests.faults FAULT CONFIG [key=value …]`, or by hand in this process.

Faults: `nan-row=ROW` makes the loss of every batch with that row NaN on the process that holds it; `raise=NAME@STEP`
raises the built-in exception NAME when the numbers of STEP are read; `no-data=PROCESS` hides the data from one process;
`no-saves=STEP` puts a file in the place of the checkpoint directory then; `slow-saves=SECONDS` makes each save take so
much longer; `late=PROCESS@STEP` sets the clock of that process ahead by a year when the numbers of STEP are read.
"""

import builtins
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxtrain.config import Config
from jaxtrain.data import Batch, RowTable
from jaxtrain.errors import ConfigError
from jaxtrain.train import leave, main
from jaxtrain.training_data import TrainingData

Assemble = Callable[[RowTable, npt.NDArray[np.int64]], Batch]


def with_nan_row(bad_row: int) -> Assemble:
    """A stand-in for `RowTable.assemble` that gives the training row `bad_row` a weight of NaN."""
    assemble = RowTable.assemble

    def poisoned(table: RowTable, row_ids: npt.NDArray[np.int64]) -> Batch:
        batch = assemble(table, row_ids)
        if table.split == "train":
            batch["weights"][row_ids == bad_row] = np.nan
        return batch

    return poisoned


def raise_at(name: str, step: int) -> None:
    """Makes the recorder raise instead of writing the numbers of `step`."""
    from jaxtrain.recorder import Recorder

    record = Recorder.step

    def failing(recorder: Recorder, metrics: dict[str, Any]) -> None:
        if metrics["step"] == step:
            raise getattr(builtins, name)(f"injected at step {step}")
        record(recorder, metrics)

    setattr(Recorder, "step", failing)  # noqa: B010 - an assignment is refused by the type checker


def without_data_on(process: int) -> None:
    """Makes the process of this index find its data set missing."""
    import jax

    from jaxtrain import loop

    open_data = loop.open_data

    def failing(config: Config) -> TrainingData:
        if jax.process_index() == process:
            raise ConfigError("injected: no such directory")
        return open_data(config)

    setattr(loop, "open_data", failing)  # noqa: B010


def end_saves_at(step: int) -> None:
    """Makes every save after the numbers of `step` fail."""
    from jaxtrain.checkpoint import Checkpointer
    from jaxtrain.recorder import Recorder

    directories: list[Path] = []
    record, claim = Recorder.step, Checkpointer.claim

    def claiming(checkpointer: Checkpointer) -> None:
        directories.append(checkpointer.directory)
        claim(checkpointer)

    def breaking(recorder: Recorder, metrics: dict[str, Any]) -> None:
        record(recorder, metrics)
        if metrics["step"] == step:
            shutil.rmtree(directories[0])
            directories[0].touch()

    setattr(Checkpointer, "claim", claiming)  # noqa: B010
    setattr(Recorder, "step", breaking)  # noqa: B010


def slow_down_saves(seconds: float) -> None:
    """Makes Orbax wait before it commits a checkpoint whose arrays are written."""
    import orbax.checkpoint as ocp

    finalize = ocp.CompositeCheckpointHandler.finalize

    def slow(handler: Any, directory: Any) -> None:
        time.sleep(seconds)
        finalize(handler, directory)

    setattr(ocp.CompositeCheckpointHandler, "finalize", slow)  # noqa: B010


def set_clock_ahead(process: int, step: int) -> None:
    """Lets a year pass on one process at a step."""
    import jax

    from jaxtrain import agreement
    from jaxtrain.recorder import Recorder

    record, now, reached = Recorder.step, agreement.now, []

    def watching(recorder: Recorder, metrics: dict[str, Any]) -> None:
        if metrics["step"] == step and jax.process_index() == process:
            reached.append(step)
        record(recorder, metrics)

    setattr(Recorder, "step", watching)  # noqa: B010
    setattr(agreement, "now", lambda: now() + 365 * 86400 * len(reached))  # noqa: B010


def inject(fault: str) -> None:
    """Puts a fault into this process."""
    kind, value = fault.split("=")
    if kind == "nan-row":
        setattr(RowTable, "assemble", with_nan_row(int(value)))  # noqa: B010
    elif kind == "raise":
        name, step = value.split("@")
        raise_at(name, int(step))
    elif kind == "no-data":
        without_data_on(int(value))
    elif kind == "no-saves":
        end_saves_at(int(value))
    elif kind == "slow-saves":
        slow_down_saves(float(value))
    elif kind == "late":
        process, step = value.split("@")
        set_clock_ahead(int(process), int(step))
    else:
        raise SystemExit(f"unknown fault {fault}")


if __name__ == "__main__":
    inject(sys.argv[1])
    leave(main(sys.argv[2:]))
