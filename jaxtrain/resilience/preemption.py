"""Being told to leave: SIGTERM, SIGUSR1 or Ctrl-C, at any moment of a run.

A thread waits for the signals, which all other threads leave to it: the main one may be inside a compiler for minutes,
where no handler of Python's runs, and JAX has a handler of its own for SIGTERM, which then never sees one.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

from jaxtrain.errors import EXIT_INTERRUPTED, EXIT_REQUEUE

if TYPE_CHECKING:
    from jaxtrain.resilience.channel import Channel  # imports jax, which starts threads

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_AHEAD = 3


class Signals:
    """What this process was told.

    Attributes:
        told: the name of the signal that came first; empty: none did.
        at: when, by `time.monotonic()`.
        heed: called once, by another thread, when it came.
    """

    def __init__(self) -> None:
        self.told = ""
        self.at = 0.0
        self.heed: Callable[[], None] = self._leave_before_anything_began

    def take(self, number: int) -> None:
        """A signal came; the second one ends the process."""
        name = signal.Signals(number).name
        if self.told:
            leave_at_once(EXIT_INTERRUPTED, f"{name} after {self.told}: left at once; the same command goes on")
        self.told, self.at = name, time.monotonic()
        self.heed()

    def _leave_before_anything_began(self) -> None:
        leave_at_once(EXIT_REQUEUE, f"told to leave by {self.told}, before anything began; the same command goes on")


def leave_at_once(code: int, words: str) -> NoReturn:
    """Ends this process from any thread."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{words}\n")
        sys.stderr.flush()
    os._exit(code)


@contextlib.contextmanager
def listening() -> Iterator[Signals]:
    """Inside, signals are taken by a thread. To be entered before any other thread starts, also by numpy or jax: each
    has the mask of the one that starts it. A signal that the process was started to ignore stays ignored.
    """
    signals = Signals()
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    if not heeded:
        yield signals
        return
    ended = threading.Event()

    def listen() -> None:
        while True:
            number = signal.sigwait(heeded)
            if ended.is_set():
                return
            signals.take(number)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded)
    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    try:
        yield signals
    finally:
        ended.set()
        assert thread.ident is not None, "it was started"
        signal.pthread_kill(thread.ident, heeded[0])
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Abandoned(Exception):
    """An evaluation ended before its last batch, on all processes before the same one."""


class AbandonedTogether:
    """Where all processes leave off evaluating, once any of them was told to leave.

    Process 0 names a batch that nobody has begun with. A process reads the results of a batch before it begins with the
    second one after it, and each result needs all processes; so by the time that it begins with the one that was named,
    process 0 has named it.

    Args:
        told: whether this process knows that the run is to leave.
    """

    def __init__(self, channel: "Channel", rank: int, told: Callable[[], bool]):
        self._channel = channel
        self._first = rank == 0
        self._told = told
        self._begun = 0
        self._last: int | None = None

    def before_a_batch(self) -> None:
        """To be called before each batch of each evaluation.

        Raises:
            Abandoned: here.
        """
        self._begun += 1
        if self._last is None and self._first and self._told():
            self._last = self._begun + _AHEAD
            self._channel.put("abandon", str(self._last))
        elif self._last is None and not self._first:
            named = self._channel.get("abandon")
            self._last = None if named is None else int(named)
        if self._last is not None and self._begun >= self._last:
            raise Abandoned
