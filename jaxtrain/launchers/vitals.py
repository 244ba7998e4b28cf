"""How the processes of a group are, as far as one can tell from outside: from their beats and the run's files."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtrain.launchers.local import Group
from jaxtrain.resilience.beat import Beat, read_beats
from jaxtrain.run_directory import RunDirectory
from jaxtrain.telemetry.events import decode_event
from jaxtrain.telemetry.jsonl import decode_line

_GAP_SECONDS = 5.0
_LEAVING_SECONDS = 60.0
"""For a process whose run has ended, to say so to the others and to end."""
_END_BYTES = 1 << 16


@dataclass
class _Sign:
    """The last sign of life of a rank.

    Attributes:
        written: what the newest beat gives as its time; None: none came yet.
        seen: when that was first seen here, by the monotonic clock: the wall clock may jump.
        stopped: when the process was first found stopped, since it last ran.
    """

    written: float | None
    seen: float
    stopped: float | None = None


class Vitals:
    """Watches one group.

    Args:
        silence: seconds without a sign of life after which a process that had given one counts as silent.
        start: seconds in which each must give its first one, once another has.
    """

    def __init__(self, group: Group, silence: float, start: float):
        self._group = group
        self._silence, self._start = silence, start
        self._looked = time.monotonic()
        self._signs = {rank: _Sign(None, self._looked) for rank in range(len(group.processes))}

    def beats(self) -> dict[int, Beat]:
        """The last beat of each rank that gave any."""
        return read_beats(self._group.beats)

    def silent(self) -> tuple[int, float] | None:
        """The rank that has been silent for longest, if for too long, and the seconds.

        Where it can't be told (no beat can be written, or this process itself was held up), nobody is silent.
        """
        now, beats = time.monotonic(), self.beats()
        held_up, self._looked = now - self._looked > _GAP_SECONDS, now
        found: dict[int, float] = {}
        for rank, process in enumerate(self._group.processes):
            sign, beat = self._signs[rank], beats.get(rank)
            if held_up or (beat is not None and beat.time != sign.written):
                sign.seen, sign.written = now, None if beat is None else beat.time
            sign.stopped = (sign.stopped or now) if process.is_stopped() else None
            limit = self._silence if beat is not None or sign.stopped is not None else self._silence + self._start
            if beat is not None and beat.leaving:
                limit = max(limit, _LEAVING_SECONDS)
            since = sign.seen if beat is not None or sign.stopped is None else sign.stopped
            if process.code is None and (beats or sign.stopped is not None) and now - since > limit:
                found[rank] = now - since
        if not found or not self._can_be_written():
            return None
        rank = max(found, key=found.__getitem__)
        return rank, found[rank]

    def stopped(self) -> list[int]:
        """The ranks that somebody has stopped."""
        return [rank for rank, process in enumerate(self._group.processes) if process.is_stopped()]

    def _can_be_written(self) -> bool:
        probe = self._group.beats / "probe"
        try:
            probe.write_text("x" * 512)
            probe.unlink()
        except OSError:
            return False
        return True


class Progress:
    """How far a run has come, over all its attempts, as its files tell.

    Attributes:
        stepped: whether the attempt has finished a step, as far as `look` has seen.
    """

    def __init__(self, directory: RunDirectory):
        self._directory = directory
        self._read = _stat(directory.events)[1]
        self._saved = 0
        self._metrics = _stat(directory.metrics)
        self._blamed: list[dict[str, Any]] = []
        self.stepped = False

    def begin(self) -> None:
        """An attempt begins."""
        self._update()
        self._metrics, self.stepped, self._blamed = _stat(self._directory.metrics), False, []

    def look(self) -> bool:
        """Sees whether metrics have been written since the last look; returns `stepped`.

        An attempt begins with taking lines out, which makes a new file, or a shorter one.
        """
        (file, size), (now_file, now_size) = self._metrics, _stat(self._directory.metrics)
        self.stepped = self.stepped or (now_size > size and (file is None or file == now_file))
        self._metrics = (now_file, now_size)
        return self.stepped

    @property
    def saved(self) -> int:
        """The step of the newest checkpoint that an event has told of since the supervisor began; 0: none."""
        self._update()
        return self._saved

    @property
    def step(self) -> int | None:
        """The last finished step that is written down; None: none is."""
        try:
            with self._directory.metrics.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - _END_BYTES))
                lines = file.read().split(b"\n")[:-1]
        except OSError:
            return None
        for line in reversed(lines):
            if type(step := (decode_line(line.decode(errors="replace") + "\n") or {}).get("step")) is int:
                return step
        return None

    def blamed(self, code: int | None) -> dict[str, Any] | None:
        """The event by which a process that then ended with `code` said in this attempt what went wrong; None: none."""
        self._update()
        return next((event for event in self._blamed if code is not None and event.get("exit_code") == code), None)

    def _update(self) -> None:
        """Reads what was added to the events since the last time."""
        try:
            with self._directory.events.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read:
                    self._read = 0  # another file: somebody has removed or cut it
                file.seek(self._read)
                added = file.read()
        except OSError:
            return
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            event = decode_event(line.decode(errors="replace") + "\n") or {}
            if event.get("kind") == "save":
                self._saved = max(self._saved, event.get("step") or 0)
            elif event.get("kind") == "fault" and event["process"] >= 0:
                self._blamed.append(event)


def _stat(path: Path) -> tuple[int | None, int]:
    """Which file this is, and its bytes."""
    try:
        found = path.stat()
    except OSError:
        return None, 0
    return found.st_ino, found.st_size
