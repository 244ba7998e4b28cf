"""`RUN/events.jsonl`: what happened to a run and when, over all its restarts."""

import math
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from jaxtrain.telemetry import jsonl

_NUMBERS = (
    "step", "steps", "position", "seconds", "stall", "data_wait", "wait", "seen_after", "stopped_after", "attempt",
    "processes", "exit_code", "rank", "to", "first", "last",
)  # fmt: skip
_END_OF_TIME = 1e11
"""In unix seconds, some millennia from now."""
STAMP = ("time", "date", "kind", "process")


class EventLog:
    """Appends events; unlike metrics, none is ever dropped. Several processes of one machine may share the file.

    Each carries `time` (unix seconds), `date` (ISO 8601, UTC), `kind` and `process`. The kinds that jaxtrain
    writes and reads, with their other fields:

    | kind    | fields                                     |
    |---------|--------------------------------------------|
    | start   | `step`: last finished one (0: none), `steps`: planned, `seconds` since this start began, `attempt` |
    | init_from | `run`, `checkpoint`, `step` of that run, `seconds` |
    | restore | `step`, `position`, `seconds`, `tier` (durable, local); none where a run begins |
    | compile | `what` (`others`: the wait for other processes), `seconds` |
    | save    | `step`, `seconds`, `stall`: those of them that the loop stood still |
    | save_local | the same, of process 0's part and its copy |
    | left_out | `step` that was due to be saved, `reason`  |
    | interval | `seconds` between saves, chosen from `stall`, `write`, `failures_per_day`; `source` of the last |
    | eval    | `step`, `loss`, `seconds`                  |
    | profile | `first`, `last` traced step, `seconds`     |
    | skip    | `step`, `position`, `reason`               |
    | stop    | `step`, `reason`, `exit_code`              |
    | progress | `step`, `steps` tried since the last such event, `seconds` of them, `data_wait` seconds of these |
    | preempt | `step`, `signal`, `rank` that was told to leave |
    | spike   | `step`, `position`, `loss`, `grad_norm`, `limit` of those too high, `action`: … or none |
    | rewind  | `step` left, `to` which checkpoint, `position` to go on from, `seconds` |
    | health  | `rank`, `host`, `device`, `what` is bad (checksum, slow, data, host), `score`, `step`, `action`, |
    |         | `detail` in words                          |
    | fault   | `what` (died, silent, stuck, …), `rank`, `host`, `step`, `phase`, `exit_code`, `seen_after` seconds |
    | launch  | `attempt`, `processes`, `slots`, `pids`, `warm`: how many of them were, `seconds`; by the supervisor |
    | restart | `attempt`, `processes`, `wait` seconds, `stopped_after` seconds; by the supervisor |

    The supervisor's have process -1. Its `fault`, one for each attempt that failed, carries `slot` too; `stopped_after`
    counts from there until no process was left.
    """

    def __init__(self, path: Path, process: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Each event is one write to an O_APPEND file: lines of several processes don't mix.
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._process = process
        self._end_torn_line()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Appends one event. A `stop` is on the disk when this returns: nothing may come after it.

        Raises:
            ValueError: a field has the name of one that each event carries.
        """
        if taken := sorted(set(fields) & set(STAMP)):
            raise ValueError(f"event {kind!r} can't have a field {taken[0]!r}: each event carries its own")
        now = time.time()
        date = datetime.fromtimestamp(now, UTC).isoformat(timespec="milliseconds")
        line = jsonl.encode({"time": round(now, 3), "date": date, "kind": kind, "process": self._process, **fields})
        os.write(self._file, line.encode())
        if kind == "stop":
            os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_torn_line(self) -> None:
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")


def read_events(path: Path) -> list[dict[str, Any]]:
    """The events in order; a line torn by a crash, or that is no event, is passed over."""
    return jsonl.read(path, decode_event)


def decode_event(line: str) -> dict[str, Any] | None:
    """The event of a whole line: it has a time, a kind and a process, and each number is one, or null."""
    event = jsonl.decode_line(line)
    if event is None or not isinstance(event.get("kind"), str) or not _is_number(event.get("process")):
        return None
    if not _is_number(event.get("time")) or not 0 <= event["time"] < _END_OF_TIME:
        return None
    return event if all(event.get(name) is None or _is_number(event[name]) for name in _NUMBERS) else None


def _is_number(value: Any) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))
