"""Where this process is: what its main thread does, since when, and whether it waits for somebody.

The main thread says so here, at a microsecond a word; the watchdog's threads read. Nothing of it needs a device.

A phase has a limit: seconds within which it must make progress, by the watchdog's clock. It begins anew when an inner
phase has ended, and with every `progress`.
"""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

DEVICES = "devices"
"""What a main thread waits for that waits for no other process in particular."""
_MEDIAN_OF = 64


@dataclass
class Phase:
    """What is under way.

    Attributes:
        limit: the key of the section `watchdog` whose value is its limit.
        since: when it began, or made progress last, by `time.monotonic()`.
    """

    name: str
    limit: str
    since: float


class Whereabouts:
    """Of one process; written by the main thread, but for `background`.

    Attributes:
        step: the last one that was finished.
        waiting: what the main thread waits for; empty: for nobody.
        watched: whether a watchdog looks.
        failed_in: the innermost phase that an error has ended since the last finished step; empty: none has.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """As at the start of a process; for a process that runs several trainings."""
        self.step = 0
        self.waiting = ""
        self.watched = False
        self.failed_in = ""
        self._phases = [Phase("start", "start", time.monotonic())]
        self._behind: list[Phase] = []
        self._seconds: deque[float] = deque(maxlen=_MEDIAN_OF)

    @contextlib.contextmanager
    def phase(self, name: str, limit: str | None = None) -> Iterator[None]:
        """The main thread does `name` inside, which may take as long as the key `watchdog.LIMIT` (or NAME) says."""
        self._phases.append(Phase(name, limit or name, time.monotonic()))
        try:
            yield
        except BaseException:
            self.failed_in = self.failed_in or name
            raise
        finally:
            self._phases.pop()
            self._phases[-1].since = time.monotonic()

    @contextlib.contextmanager
    def wait(self, what: str) -> Iterator[None]:
        """Inside, the main thread only waits: for `devices`, or for the other processes at a barrier of this name."""
        before, self.waiting = self.waiting, what
        try:
            yield
        finally:
            self.waiting = before

    @contextlib.contextmanager
    def background(self, name: str) -> Iterator[None]:
        """Another thread does `name` inside, such as writing a checkpoint; the limit is `watchdog.NAME`."""
        mine = Phase(name, name, time.monotonic())
        with self._lock:
            self._behind.append(mine)
        try:
            yield
        finally:
            with self._lock:
                self._behind.remove(mine)

    def progress(self) -> None:
        """The phase goes on well; its limit counts from now."""
        self._phases[-1].since = time.monotonic()

    def finished(self, step: int, seconds: float) -> None:
        """A step has ended, having taken so long."""
        self.failed_in = ""
        self.step = step
        self._seconds.append(seconds)
        self.progress()

    @property
    def phases(self) -> list[Phase]:
        """What is under way now: the innermost phase of the main thread, then what goes on behind it."""
        with self._lock:
            return [self._phases[-1], *self._behind]

    def median(self) -> float | None:
        """Seconds of a step, of the last ones; None before there are some."""
        seconds = sorted(self._seconds)
        return seconds[len(seconds) // 2] if len(seconds) >= 3 else None


here = Whereabouts()
"""This process's."""
