"""Processes that assemble batches beside the trainer.

Grain has worker processes too, but hands batches over in shared memory, which containers have little of and which a
program that ends early leaves behind, or in queues, where a worker that dies half-way through a batch hangs its reader.
Here each worker has a pipe of its own, whose only writing end it holds: when it dies, however it dies, reading ends.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process, util
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

Part = Callable[[int, int], Iterator[Any]]
"""Gives the elements index, index+count, index+2·count, … when called with (index, count). Must pickle."""


class Workers(Iterator[Any]):
    """The elements of `part` in order, worker i of n making the elements i, i+n, i+2n, ….

    `remedy` is what a person can do who has too little memory for so many.

    Raises:
        RuntimeError: a worker died.
    """

    def __init__(self, part: Part, count: int, remedy: str = "lower data.workers or data.prefetch") -> None:
        self._remedy = remedy
        self._workers: list[tuple[SpawnProcess, Connection]] = []
        self._taken = 0
        # Also runs when we are freed and before multiprocessing waits for its children, which don't heed its signal.
        self._close = util.Finalize(self, _end, (self._workers,), exitpriority=100)
        context = get_context("spawn")
        for index in range(count):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(part, index, count, writer), name=f"data-worker-{index}")
            process.daemon = True
            with writer, _off_devices():
                process.start()
            self._workers.append((process, reader))

    def __next__(self) -> Any:
        index = self._taken % len(self._workers)
        process, pipe = self._workers[index]
        try:
            element = pipe.recv()
        except (EOFError, OSError):
            process.join()
            if process.exitcode == 0:
                raise StopIteration from None
            raise RuntimeError(
                f"data worker {index} of {len(self._workers)} died with exit code {process.exitcode}: see its output "
                f"above; without any, the machine may have run out of memory: {self._remedy}"
            ) from None
        self._taken += 1
        return element

    def close(self) -> None:
        """Ends the workers and waits for them. May be called again."""
        self._close()


def _end(workers: list[tuple[SpawnProcess, Connection]]) -> None:
    for process, pipe in workers:
        process.kill()  # nothing that a worker holds is needed again
        pipe.close()
    for process, _ in workers:
        process.join()


@contextmanager
def _off_devices() -> Iterator[None]:
    """Lets a process that starts here, whatever it imports, see no device of the trainer's."""
    before = os.environ.get("JAX_PLATFORMS")
    os.environ["JAX_PLATFORMS"] = "cpu"
    try:
        yield
    finally:
        if before is None:
            del os.environ["JAX_PLATFORMS"]
        else:
            os.environ["JAX_PLATFORMS"] = before


def _work(part: Part, index: int, count: int, pipe: Connection) -> None:
    # A terminal or a scheduler signals the whole group. Whether and when to stop is the trainer's decision, and until
    # then it needs its batches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_trainer, name="end-with-the-trainer", daemon=True).start()
    with suppress(BrokenPipeError):
        for element in part(index, count):
            pipe.send(element)


def _end_with_the_trainer() -> None:
    trainer = parent_process()
    if trainer is not None:
        # Waits for the closing of a pipe that the kernel closes however the trainer ends. The kernel's own signal
        # for a parent's death would come when the *thread* that started us ends.
        trainer.join()
        os._exit(0)
