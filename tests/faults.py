"""Trainings with a fault put in: `python -m tests.faults FAULT CONFIG [key=value …]`, or by hand in this process.

Faults: `nan-row=ROW` makes the loss of every batch with that row NaN on the process that holds it; `raise=NAME@STEP`
raises the built-in exception NAME when the numbers of STEP are read, with `/PROCESS` behind it on that process only;
`no-data=PROCESS` hides the data from one process;
`no-saves=STEP` puts a file in the place of the checkpoint directory then; `slow-saves=SECONDS` makes each save take so
much longer; `late=PROCESS@STEP` sets the clock of that process ahead by a year when the numbers of STEP are read.
`wrong-bit=PROCESS@PROBE` flips a bit of what the last device of that process computes, from that probe on;
`slow=DEVICE@PROBE,DATA` makes probes take 10 ms, from that probe on 13 ms on process DEVICE, and slows the data of
process DATA.
`wrong-targets=POSITION` makes the loss of the batch at that data position high.
`stuck=PROCESS@STEP` holds the main thread of a process for ever when the numbers of STEP are read, `stuck-data` when it
asks for the batch of STEP, `stuck-save=PROCESS` and `stuck-restore=PROCESS` in its first save and restore,
`stuck-eval=PROCESS` in its first evaluation, `stuck-compile=PROCESS` before its first compilation; `slow-eval=SECONDS`
makes each batch of an evaluation take so much longer; `stuck-device=STEP` gives the devices a program without an end.
"""

import builtins
import dataclasses
import itertools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxtrain.batches import RunBatches, SizedBatch
from jaxtrain.config import Config
from jaxtrain.data import Batch, RowTable
from jaxtrain.errors import ConfigError
from jaxtrain.resilience.last_words import delay_aborts
from jaxtrain.train import leave, main
from jaxtrain.training_data import TrainingData

VARIABLE = "FAULT"
"""In the environment it names the fault, instead of the first argument: a supervisor knows its processes' arguments."""

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


def with_wrong_targets(positions: Collection[int], weight: float = 1) -> Callable[[RunBatches], SizedBatch]:
    """A stand-in for `RunBatches.__next__` that gives the batches at these data positions targets nobody has seen.

    Args:
        weight: of these targets beside their usual one; NaN makes the loss no number.
    """
    following = RunBatches.__next__

    def wrong(batches: RunBatches) -> SizedBatch:
        batch = following(batches)
        if batch.position in positions:
            batch.rows["targets"] = 255 - batch.rows["targets"]
            batch.rows["weights"] = (weight * batch.rows["weights"]).astype(np.float32)
        return batch

    return wrong


def raise_at(name: str, step: int, process: int | None = None) -> None:
    """Makes the recorder raise instead of writing the numbers of `step`, on all processes or on one."""
    import jax

    from jaxtrain.recorder import Recorder

    record = Recorder.step

    def failing(recorder: Recorder, metrics: dict[str, Any]) -> None:
        if metrics["step"] == step and process in (None, jax.process_index()):
            raise getattr(builtins, name)(f"injected at step {step}")
        record(recorder, metrics)

    setattr(Recorder, "step", failing)  # noqa: B010 - an assignment is refused by the type checker


def without_data_on(process: int) -> None:
    """Makes the process of this index find its data set missing."""
    import jax

    from jaxtrain import opening

    open_data = opening.open_data

    def failing(config: Config) -> TrainingData:
        if jax.process_index() == process:
            raise ConfigError("injected: no such directory")
        return open_data(config)

    setattr(opening, "open_data", failing)  # noqa: B010


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


def stuck_main_thread() -> None:
    """Never comes back."""
    threading.Event().wait()


def before(owner: Any, name: str, process: int, at: int = 1) -> None:
    """Makes a process stand still for ever before the `at`-th call of a function or method."""
    import jax

    function, calls = getattr(owner, name), itertools.count(1)

    def stuck(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at and jax.process_index() == process:
            stuck_main_thread()
        return function(*args, **kwargs)

    setattr(owner, name, stuck)


def stick(kind: str, value: str) -> None:
    """Makes a process stand still for ever at some place of the run."""
    from jaxtrain import loop
    from jaxtrain.batches import RunBatches
    from jaxtrain.checkpoint import Checkpointer, checkpointer
    from jaxtrain.evaluation import Evaluator
    from jaxtrain.recorder import Recorder

    process, _, step = value.partition("@")
    owner, name = {
        "stuck": (Recorder, "step"),
        "stuck-data": (RunBatches, "__next__"),
        "stuck-save": (Checkpointer, "save"),
        "stuck-restore": (checkpointer, "read_arrays"),
        "stuck-eval": (Evaluator, "totals"),
        "stuck-compile": (loop, "compile_program"),
    }[kind]
    before(owner, name, int(process), int(step or 1))


def slow_down_evaluations(seconds: float) -> None:
    """Makes an evaluation wait before each batch."""
    from jaxtrain.resilience.preemption import AbandonedTogether

    ask = AbandonedTogether.before_a_batch

    def slow(together: AbandonedTogether) -> None:
        time.sleep(seconds)
        ask(together)

    setattr(AbandonedTogether, "before_a_batch", slow)  # noqa: B010


def stick_the_devices(step: int) -> None:
    """Lets the devices never end with the numbers of a step, of one process on one device."""
    import jax

    from jaxtrain import loop

    compile_program = loop.compile_program
    endless = jax.jit(lambda loss: jax.pure_callback(lambda _: stuck_main_thread(), loss, loss))

    def compiling(*args: Any) -> Any:
        compiled, calls = compile_program(*args), itertools.count(1)

        def wrapped(train_step: Callable[..., Any]) -> Callable[..., Any]:
            def call(*inputs: Any) -> Any:
                state, metrics = train_step(*inputs)
                return state, ({**metrics, "loss": endless(metrics["loss"])} if next(calls) == step else metrics)

            return call

        return dataclasses.replace(
            compiled, train_step={size: wrapped(train_step) for size, train_step in compiled.train_step.items()}
        )

    setattr(loop, "compile_program", compiling)  # noqa: B010


def with_a_wrong_bit(process: int, first: int) -> Callable[..., Any]:
    """A stand-in for what probes a device: on a process's last one, a bit of the float32 product's sum is flipped.

    From the `first` probe on, counted from 0.
    """
    import jax

    from jaxtrain.resilience import probe

    run, runs = probe._run, itertools.count()

    def flipping(program: Any, repeats: int) -> Any:
        seed, answer = program.operands
        (device,) = answer.devices()
        mine = jax.process_index() == process and device == jax.local_devices()[-1]
        if mine and next(runs) >= first:
            program = replace(program, operands=(seed, answer.at[1].set(answer[1] ^ np.uint32(1 << 9))))
        return run(program, repeats)

    return flipping


def slow_down(device: int, first: int, data: int) -> None:
    """From the `first` probe on a slow device on one process; slow data on another one."""
    import jax

    from jaxtrain.resilience import probe

    run, assemble, runs = probe._run, RowTable.assemble, itertools.count()

    def timed(program: Any, repeats: int) -> Any:
        slow = jax.process_index() == device and next(runs) >= first
        return replace(run(program, repeats), seconds=0.013 if slow else 0.01)

    def waiting(table: RowTable, row_ids: npt.NDArray[np.int64]) -> Batch:
        if jax.process_index() == data:
            time.sleep(0.4)
        return assemble(table, row_ids)

    setattr(probe, "_run", timed)  # noqa: B010
    setattr(RowTable, "assemble", waiting)  # noqa: B010


def inject(fault: str) -> None:
    """Puts a fault into this process."""
    kind, value = fault.split("=")
    if kind == "stuck-device":
        stick_the_devices(int(value))
    elif kind.startswith("stuck"):
        stick(kind, value)
    elif kind == "slow-eval":
        slow_down_evaluations(float(value))
    elif kind == "nan-row":
        setattr(RowTable, "assemble", with_nan_row(int(value)))  # noqa: B010
    elif kind == "wrong-targets":
        setattr(RunBatches, "__next__", with_wrong_targets({int(value)}))  # noqa: B010
    elif kind == "raise":
        name, _, where = value.partition("@")
        step, _, process = where.partition("/")
        raise_at(name, int(step), int(process) if process else None)
    elif kind == "no-data":
        without_data_on(int(value))
    elif kind == "no-saves":
        end_saves_at(int(value))
    elif kind == "slow-saves":
        slow_down_saves(float(value))
    elif kind == "late":
        late, _, when = value.partition("@")
        set_clock_ahead(int(late), int(when))
    elif kind == "wrong-bit":
        from jaxtrain.resilience import probe

        process, first = value.split("@")
        setattr(probe, "_run", with_a_wrong_bit(int(process), int(first)))  # noqa: B010
    elif kind == "slow":
        device, first, data = value.replace(",", "@").split("@")
        slow_down(int(device), int(first), int(data))
    else:
        raise SystemExit(f"unknown fault {fault}")


if __name__ == "__main__":
    delay_aborts()
    inject(os.environ.get(VARIABLE) or sys.argv.pop(1))
    leave(main(sys.argv[1:]))
