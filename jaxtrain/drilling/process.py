"""A training process with faults in it: `python -m jaxtrain.drilling.process CONFIG [key=value …]`.

The trainer has no code for being drilled: this program changes it before it starts. `JAXTRAIN_DRILL` holds the faults
as JSON.
"""

import errno
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jaxtrain import train
from jaxtrain.command import leave
from jaxtrain.config import Config
from jaxtrain.output import outlive_the_terminal
from jaxtrain.resilience.last_words import delay_aborts
from jaxtrain.resilience.preemption import Signals

VARIABLE = "JAXTRAIN_DRILL"
EXTRA = 0.5


@dataclass(frozen=True)
class Inside:
    """Faults that no signal can make.

    Attributes:
        nan_rank: which process gets a batch with NaN; None: none does.
        nan_position: the data position of that batch.
        full_step: the first save from this step on finds a full disk, once.
        slow_rank: whose devices take half as long again; None: no one's.
        slow_step: from this step on.
        once: a folder where what happens only once in a drill leaves a mark.
    """

    once: str
    nan_rank: int | None = None
    nan_position: int = 0
    full_step: int | None = None
    slow_rank: int | None = None
    slow_step: int = 0

    def variable(self) -> dict[str, str]:
        """The environment that tells a process of them."""
        return {VARIABLE: json.dumps(asdict(self))}


def poison_batch(rank: int, position: int) -> None:
    """Lets process `rank` find NaN in its part of the batch at a data position.

    Raises when the batch is read: no field of it holds numbers with a fraction.
    """
    import jax
    import numpy as np

    from jaxtrain.batches import RunBatches, SizedBatch

    read = RunBatches.__next__

    def poisoned(batches: RunBatches) -> SizedBatch:
        batch = read(batches)
        if batch.position == position and jax.process_index() == rank:
            name = next(name for name, field in batch.rows.items() if np.issubdtype(field.dtype, np.floating))
            batch.rows[name] = np.full_like(batch.rows[name], np.nan)
        return batch

    setattr(RunBatches, "__next__", poisoned)  # noqa: B010 - an assignment is refused by the type checker


def fill_disk(step: int, once: Path) -> None:
    """Lets the first save from `step` on find no space when it would be committed; `once` remembers that it did."""
    import orbax.checkpoint as ocp

    finalize = ocp.CompositeCheckpointHandler.finalize

    def full(handler: Any, directory: Any) -> None:
        if int(Path(directory).name.split(".")[0]) >= step and not once.exists():
            once.touch()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(directory))
        finalize(handler, directory)

    setattr(ocp.CompositeCheckpointHandler, "finalize", full)  # noqa: B010


def slow_down(rank: int, step: int) -> None:
    """Lets the devices of process `rank` take half as long again from `step` on, for steps and for probes."""
    import jax

    from jaxtrain import loop
    from jaxtrain.resilience.probe import Probe, Result
    from jaxtrain.resilience.whereabouts import here
    from jaxtrain.training import Compiled

    compile_program, probe = loop.compile_program, Probe.__call__

    def slower(train_step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = jax.block_until_ready(train_step(*arguments))
            if here.step >= step:
                time.sleep(EXTRA * (time.perf_counter() - began))
            return result

        return run

    def compiling(*arguments: Any) -> Compiled:
        compiled = compile_program(*arguments)
        if jax.process_index() != rank:
            return compiled
        return replace(compiled, train_step={size: slower(run) for size, run in compiled.train_step.items()})

    def slower_probe(devices: Probe, *repeats: int) -> list[Result]:
        results = probe(devices, *repeats)
        slower_by = 1 + EXTRA if here.step >= step else 1
        return [replace(result, seconds=result.seconds * slower_by) for result in results]

    setattr(loop, "compile_program", compiling)  # noqa: B010
    setattr(Probe, "__call__", slower_probe)  # noqa: B010


def put_in(faults: Inside) -> None:
    """Changes the trainer of this process."""
    if faults.nan_rank is not None:
        poison_batch(faults.nan_rank, faults.nan_position)
    if faults.full_step is not None:
        fill_disk(faults.full_step, Path(faults.once) / "full")
    if faults.slow_rank is not None:
        slow_down(faults.slow_rank, faults.slow_step)


def main(arguments: Sequence[str]) -> int:
    """Trains as `jaxtrain.train` does, with the faults put in once the process listens to signals.

    What they change imports JAX, and the threads that it starts must not take the signals.
    """
    as_it_is = train.train

    def with_faults(config: Config, signals: Signals) -> None:
        put_in(Inside(**json.loads(os.environ[VARIABLE])))
        as_it_is(config, signals)

    setattr(train, "train", with_faults)  # noqa: B010
    return train.main(arguments)


if __name__ == "__main__":
    outlive_the_terminal()
    delay_aborts()
    leave(main(sys.argv[1:]))
