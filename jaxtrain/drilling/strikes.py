"""How each fault is put into a running group, and by which events one sees that the run has seen it."""

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxtrain.checkpoint import list_checkpoints, step_path
from jaxtrain.drilling.plan import Fault
from jaxtrain.files import replace_file
from jaxtrain.run_directory import RunDirectory

Event = dict[str, Any]
Seen = Callable[[Fault, Event], bool]


class Target:
    """The running group that is struck.

    Args:
        pids: of the newest attempt, by rank.
    """

    def __init__(self, directory: RunDirectory, checkpoints: Path, pids: Sequence[int]):
        self.directory = directory
        self._checkpoints = checkpoints
        self._pids = pids

    def strike(self, fault: Fault) -> int | None:
        """Does to the group what the fault says; those inside a process have been there since its start.

        Returns the step of the checkpoint that was altered, if one was.
        """
        rank = fault.rank % len(self._pids)
        altered = None
        if fault.kind == "corrupt":
            self._signal_all(signal.SIGSTOP)  # one that survived could complete a newer checkpoint
            altered = self._alter_newest_checkpoint()
            self._signal_all(signal.SIGKILL)
        if fault.kind == "lost":
            lost = [{"slot": rank, "reason": "taken away by the drill"}]
            replace_file(self.directory.excluded, json.dumps(lost))
        if fault.kind in _SIGNALS:
            os.kill(self._pids[rank], _SIGNALS[fault.kind])
        return altered

    def give_back(self) -> None:
        """Puts the lost place back, and lets the next restart come."""
        self.directory.excluded.unlink()
        os.kill(self._pids[0], signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def _alter_newest_checkpoint(self) -> int:
        """One byte, in the middle of its largest file of arrays; returns its step."""
        step = list_checkpoints(self._checkpoints).steps[0]
        newest = step_path(self._checkpoints, step)
        files = [path for path in (newest / "state").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: (path.stat().st_size, str(path)))
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 0xFF
        largest.write_bytes(content)
        return step


_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "term": signal.SIGTERM,
    "lost": signal.SIGKILL,
}


def _names(fault: Fault, event: Event) -> bool:
    return event["kind"] == "fault" and event.get("rank") == fault.rank


SEEN: Mapping[str, Seen] = {
    "kill": lambda fault, event: _names(fault, event) and event["exit_code"] == -signal.SIGKILL,
    "stop": lambda fault, event: _names(fault, event) and event["what"] in ("silent", "stuck"),
    "term": lambda fault, event: event["kind"] == "preempt" and event.get("signal") == "SIGTERM",
    "nan": lambda fault, event: event["kind"] == "skip",
    "slow": lambda fault, event: event["kind"] == "health" and event["what"] == "slow" and event["rank"] == fault.rank,
    "corrupt": lambda fault, event: event["kind"] == "fault" and event["exit_code"] == -signal.SIGKILL,
    "full": lambda fault, event: event["kind"] == "stop" and "No space left" in str(event.get("reason")),
    "lost": lambda fault, event: _names(fault, event) and event["exit_code"] == -signal.SIGKILL,
}
"""Kind to whether an event tells of this fault, by its right name."""
