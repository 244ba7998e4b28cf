"""How a process ends with a verdict: its words, its stacks, its events, and its exit code; process 0 goes last."""

import contextlib
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

from jaxtrain.resilience.courier import Courier
from jaxtrain.resilience.verdict import Verdict
from jaxtrain.resilience.whereabouts import here
from jaxtrain.telemetry.events import EventLog

LOOK_AGAIN = 0.25
SILENT = 3.5
"""Seconds without word after which a process that others wait for is silent: words come each second."""
MOMENT = 3.0
"""Seconds that one process gives another one to speak for itself."""
_log = logging.getLogger(__name__)


class Ending:
    """Of one process of a run.

    Args:
        crash: the folder that gets stacks.
        events: the file that gets events.
        courier: what tells the others.
        rank: of this process, of `count`.

    Attributes:
        recording: whether the run directory is this run's, so that faults may go into it.
        last_words: what is called, from another thread, before this process ends.
    """

    def __init__(self, crash: Path, events: Path, courier: Courier, rank: int, count: int):
        self._crash = crash
        self._events = events
        self._courier = courier
        self._rank = rank
        self._count = count
        self._host = socket.gethostname()
        self.recording = False
        self.last_words: list[Callable[[], None]] = []

    def end(self, verdict: Verdict) -> NoReturn:
        """Of this process; the others hear of it."""
        fault = verdict.what != "preempted"
        if self._rank == 0:
            self._courier.say("verdict", verdict.text())
        show = f"error: {verdict.words}" if fault else verdict.words
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.write(f"{show}\n")
            sys.stderr.flush()
        _within_a_moment(lambda: self._write_stacks(verdict) if fault else None)
        if self._rank == 0:
            self._wait_for_the_others()
        else:
            self._courier.say(f"left-{self._rank}", "")
            self._courier.stop(1.0)
        _within_a_moment(lambda: self._write_events(verdict, fault))  # last: the main thread may still write some
        os._exit(verdict.code)

    def _wait_for_the_others(self) -> None:
        """Process 0 goes last: its end ends the others."""
        until = time.monotonic() + 2 * MOMENT
        while time.monotonic() < until:
            left = {int(key.removeprefix("left-")) for key in self._courier.words if key.startswith("left-")}
            gone = left | {rank for rank, status in self._courier.statuses.items() if status.ended}
            # One that has said nothing yet has only just begun.
            if all(rank in gone or self._courier.silent_for(rank) >= SILENT for rank in range(1, self._count)):
                break
            time.sleep(LOOK_AGAIN)

    def _write_events(self, verdict: Verdict, fault: bool) -> None:
        _log.info("the run ends: %s", verdict.words)
        for write in self.last_words:
            write()
        writes = self._rank == 0 or (self._rank == 1 and verdict.rank == 0 and verdict.what in ("died", "silent"))
        if not writes:
            return
        if fault:
            self.record(
                "fault",
                what=verdict.what,
                rank=verdict.rank,
                host=verdict.host,
                step=verdict.step,
                phase=verdict.phase,
                exit_code=verdict.code,
                seen_after=round(time.monotonic() - here.phases[0].since, 1),
            )
        self.record("stop", step=here.step, reason=verdict.words, exit_code=verdict.code)

    def _write_stacks(self, verdict: Verdict) -> None:
        """Of all threads of this process."""
        now = datetime.now(UTC)
        header = f"{now.isoformat(timespec='seconds')} process {self._rank} on {self._host}: {verdict.words}\n\n"
        if not self.recording:
            faulthandler.dump_traceback(sys.__stderr__ or 2)
            return
        self._crash.mkdir(parents=True, exist_ok=True)
        path = self._crash / f"{now:%Y%m%dT%H%M%S}-process-{self._rank}.txt"
        with path.open("w", encoding="utf-8") as file:
            file.write(header)
            file.flush()
            faulthandler.dump_traceback(file)

    def record(self, kind: str, **fields: Any) -> None:
        """An event, where the run directory is this run's."""
        if self.recording:
            with contextlib.suppress(OSError), EventLog(self._events, self._rank) as events:
                events.write(kind, **fields)


def _within_a_moment(write: Callable[[], None]) -> None:
    """Unless the file system is what is stuck."""

    def try_to() -> None:
        with contextlib.suppress(OSError):
            write()

    writer = threading.Thread(target=try_to, daemon=True)
    writer.start()
    writer.join(MOMENT)
