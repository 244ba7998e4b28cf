"""One process at a time may write a data set."""

import fcntl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxtrain.resilience.whereabouts import here


@contextmanager
def exclusive(directory: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Holds `DIRECTORY.lock` against every other process, calling `waiting` once if it has to wait.

    The kernel frees the lock when its holder dies. The file stays: removing it would let two processes each lock
    a file of that name.
    """
    path = directory.with_name(directory.name + ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waiting is not None:
                waiting()
            with here.wait(f"the lock of {directory}"):
                fcntl.flock(file, fcntl.LOCK_EX)
        yield
