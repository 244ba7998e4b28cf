"""`RUN/timeline/rank-N.jsonl`: what the last steps of each rank were spent on.

The first line tells `rank` and `hostname`; each later one is a step, with seconds of four kinds that add up to the
loop's:

- `data`: the loop waited for a batch while no step was computing.
- `host`: all else that this process did itself: Python, placing rows, dispatching programs, writing metrics.
- `device`: the loop waited for the devices. In step with others that is also the time in which these were late.
- `probe`: the health probe, where one was run; `probe_seconds` is then what it took on the slowest device.

So a rank that others wait for is the one with *less* `device` than they have, and its own `data` or `host` says why;
where neither does, its device is slow, which only the probe can tell, since no other rank has a part in that.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jaxtrain.files import replace_file
from jaxtrain.telemetry import jsonl

RING = 256
"""Steps that are kept."""
WRITE_SECONDS = 30
PARTS = ("data", "host", "device")

_log = logging.getLogger(__name__)


class Timeline:
    """The last steps of this process, written at the end, at a crash and every half minute, beside the loop.

    Args:
        folder: `RUN/timeline`.
        after: the last finished step; what an earlier start told of later ones is dropped, since they come again.
        ranks: how many there are; process 0 removes the files of those that an earlier start had and this one lacks.
    """

    def __init__(self, folder: Path, rank: int, ranks: int, after: int):
        self._path = _path(folder, rank)
        self._head = {"rank": rank, "hostname": socket.gethostname()}
        self._lines: deque[dict[str, Any]] = deque(_kept(self._path, after), maxlen=RING)
        self._lock = threading.Lock()
        self._now = dict.fromkeys((*PARTS, "probe"), 0.0)
        self._probe_seconds: float | None = None
        self._steps = 0
        self._since_probe = dict.fromkeys(PARTS, 0.0)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="timeline")
        self._writing: Future[None] | None = None
        self._written = time.monotonic()
        if rank == 0:
            for other, path in _files(folder):
                if other >= ranks:
                    path.unlink(missing_ok=True)

    def add(self, part: str, seconds: float) -> None:
        """Time that the loop spent on a part since the last step."""
        self._now[part] += seconds

    def probed(self, seconds: float) -> None:
        """What a probe's computation took on the slowest device."""
        self._probe_seconds = seconds

    @property
    def step_seconds(self) -> float:
        """Mean of the steps since the last probe, without what lay between them; 0 where there was none."""
        return sum(self._since_probe.values()) / max(1, self._steps)

    def shares(self) -> dict[str, float]:
        """The share of each part since this was last asked, from 0 to 1."""
        total = sum(self._since_probe.values())
        shares = {name: seconds / total if total else 0.0 for name, seconds in self._since_probe.items()}
        self._since_probe, self._steps = dict.fromkeys(PARTS, 0.0), 0
        return shares

    def step(self, step: int, seconds: float) -> None:
        """A finished step; `seconds` since the one before. What no part was told of is the host's."""
        parts, self._now = self._now, dict.fromkeys(self._now, 0.0)
        known = parts["data"] + parts["device"] + parts["probe"]
        parts["host"] = max(0.0, seconds - known)
        self._steps += 1
        for name in PARTS:
            self._since_probe[name] += parts[name]
        line: dict[str, Any] = {"step": step} | {name: round(spent, 6) for name, spent in parts.items()}
        if not line["probe"]:
            del line["probe"]
        if self._probe_seconds is not None:
            line["probe_seconds"], self._probe_seconds = round(self._probe_seconds, 6), None
        with self._lock:
            self._lines.append(line)
        if time.monotonic() > self._written + WRITE_SECONDS and (self._writing is None or self._writing.done()):
            self._written = time.monotonic()
            self._writing = self._writer.submit(self.write)

    def write(self) -> None:
        """Replaces the file; from any thread. What can't be written is logged: it is worth no run."""
        with self._lock:
            lines = list(self._lines)
        try:
            replace_file(self._path, "".join(map(jsonl.encode, [self._head, *lines])))
        except OSError as error:
            _log.info("the timeline can't be written: %s", error)

    def close(self) -> None:
        """Writes what there is."""
        self._writer.shutdown()
        self.write()


def read_timeline(folder: Path) -> dict[int, tuple[str, list[dict[str, Any]]]]:
    """Rank to its host and its steps, rising; without those whose file can't be read."""
    ranks = {}
    for rank, path in _files(folder):
        with contextlib.suppress(OSError):
            lines = jsonl.read(path)
            steps = [line for line in lines if _is_step(line)]
            hosts = [str(line["hostname"]) for line in lines if "hostname" in line]
            if steps:
                ranks[rank] = (hosts[0] if hosts else "?", steps)
    return ranks


def _is_step(line: dict[str, Any]) -> bool:
    measured = [line.get(name) for name in PARTS] + [line.get(name, 0.0) for name in ("probe", "probe_seconds")]
    return type(line.get("step")) is int and all(type(value) in (int, float) for value in measured)


def _files(folder: Path) -> list[tuple[int, Path]]:
    named = ((path.stem.removeprefix("rank-"), path) for path in folder.glob("rank-*.jsonl"))
    return sorted((int(rank), path) for rank, path in named if rank.isdecimal())


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


def _kept(path: Path, after: int) -> list[dict[str, Any]]:
    try:
        return [line for line in jsonl.read(path) if isinstance(line.get("step"), int) and line["step"] <= after]
    except OSError:
        return []
