"""The logs of all ranks as one, on stdout: whole lines, each with its rank."""

import contextlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TextIO

MOST_BYTES_AT_ONCE = 1 << 18
MOST_BEHIND = 1 << 22
"""Bytes of a log not shown yet, beyond which the view passes over what came before the last of them."""
LONGEST_LINE = 1 << 14
TICK_SECONDS = 0.05
PATIENCE_SECONDS = 5.0
SAID_BY_ALL = b"error: "
"""What all ranks say alike, such as that the data are missing, is shown once."""


@dataclass
class _Tail:
    """A log that is read while it grows."""

    path: Path
    prefix: bytes
    file: BinaryIO
    rest: bytes = b""

    def lines(self) -> list[bytes]:
        """The lines that have come, without their ends."""
        behind = os.fstat(self.file.fileno()).st_size - self.file.tell()
        passed = []
        if behind > MOST_BEHIND:
            self.file.seek(behind - MOST_BYTES_AT_ONCE, os.SEEK_CUR)
            passed = [b"... (%d bytes are only in %s)" % (behind - MOST_BYTES_AT_ONCE, os.fsencode(self.path))]
            self.rest = b""
        *lines, self.rest = (self.rest + self.file.read(MOST_BYTES_AT_ONCE)).split(b"\n")
        if len(self.rest) > LONGEST_LINE:
            lines, self.rest = [*lines, self.rest], b""
        return [*passed, *lines]

    def behind(self) -> bool:
        return os.fstat(self.file.fileno()).st_size > self.file.tell()


class View:
    """Shows logs as they grow, from a thread of its own: whoever watches the processes never waits for the terminal.

    A terminal that is slow, or a log that is flooded, costs lines of the view, and none of the logs.
    """

    def __init__(self, stream: TextIO | None = None):
        self._stream = sys.stdout if stream is None else stream
        self._tails: list[_Tail] = []
        self._coming: deque[list[_Tail]] = deque()
        self._said: deque[str] = deque()
        self._shown: set[bytes] = set()
        self._settling: deque[threading.Event] = deque()
        self._wanted = threading.Event()
        self._ending = False
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self._thread.start()

    def watch(self, logs: list[Path], *, prefixed: bool = True, begins: Sequence[int] = ()) -> None:
        """Shows these logs from now on, one for each rank, and those before to their end.

        Args:
            begins: from which byte on, where an earlier launch has written into them too.
        """
        tails = []
        for rank, path in enumerate(logs):
            with contextlib.suppress(OSError):
                file = path.open("rb", buffering=0)
                file.seek(begins[rank] if begins else 0)
                tails.append(_Tail(path, b"[%d] " % rank if prefixed else b"", file))
        self._coming.append(tails)
        self._wanted.set()

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._said.append(text)
        self._wanted.set()

    def settle(self) -> bool:
        """Shows what is there, half lines too, once no process writes; False: the terminal is stuck, and given up."""
        done = threading.Event()
        self._settling.append(done)
        self._wanted.set()
        return done.wait(PATIENCE_SECONDS)

    def close(self) -> bool:
        """Shows what is left, and ends; False: the terminal is stuck."""
        settled = self.settle()
        self._ending = True
        self._wanted.set()
        return settled

    def _run(self) -> None:
        """Alone in writing, and in reading logs: it may be stuck in either."""
        while not self._ending:
            self._wanted.wait(TICK_SECONDS)
            self._wanted.clear()
            settling = [self._settling.popleft() for _ in range(len(self._settling))]
            while self._coming:
                self._show_to_the_end()
                for tail in self._tails:
                    tail.file.close()
                self._tails, self._shown = self._coming.popleft(), set()
            self._show()
            if settling:
                self._show_to_the_end()
            self._show_said()
            for done in settling:
                done.set()

    def _show_to_the_end(self) -> None:
        until = time.monotonic() + PATIENCE_SECONDS
        while any(tail.behind() for tail in self._tails) and time.monotonic() < until:
            self._show()
        for tail in self._tails:
            if tail.rest:
                self._write(tail.prefix + tail.rest)
                tail.rest = b""

    def _show(self) -> None:
        for tail in self._tails:
            for line in tail.lines():
                if line.startswith(SAID_BY_ALL):
                    if line in self._shown:
                        continue
                    self._shown.add(line)
                self._write(tail.prefix + line)
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _show_said(self) -> None:
        while self._said:
            with contextlib.suppress(IndexError):
                self._write(b"launch: " + self._said.popleft().encode())
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line.decode(errors="replace") + "\n")


def last_lines(path: Path, count: int = 20, most: int = 1 << 15) -> str:
    """The end of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-count:])
    except OSError:
        return ""
