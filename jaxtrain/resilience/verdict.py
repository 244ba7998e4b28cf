"""Who is to blame: from what all processes say of themselves to one name and one exit code.

A process that waits, for the devices or at a barrier, waits for another one; so the name is that of a process which is
silent, or of one that doesn't wait. Only where all of them wait for the devices is it the program there.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Self

from jaxtrain.errors import (
    EXIT_LOST_PROCESS,
    EXIT_STUCK,
    EXIT_STUCK_CHECKPOINT,
    EXIT_STUCK_DATA,
    EXIT_STUCK_DEVICE,
)
from jaxtrain.resilience.whereabouts import DEVICES

_CODES = {
    "data": EXIT_STUCK_DATA,
    "prepare": EXIT_STUCK_DATA,
    "save": EXIT_STUCK_CHECKPOINT,
    "restore": EXIT_STUCK_CHECKPOINT,
}


class _Told:
    """Fields that go from process to process as text."""

    def text(self) -> str:
        """To be read by `read`."""
        return json.dumps(vars(self))

    @classmethod
    def read(cls, text: str) -> Self:
        """The inverse of `text`."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Status(_Told):
    """What a process says of itself, once a second.

    Attributes:
        beat: counts these words: one whose count stays the same is silent.
        step: the last one that it finished.
        phase: what it does.
        seconds: since the phase began or made progress.
        waiting: for `devices`, or at which barrier; empty: for nobody.
        limit: the key that says how long the phase may take, with its value; empty: for ever.
        over: whether it takes longer.
        behind: what goes on in the background and takes longer than it may, with its limit; mostly nothing.
        behind_waits: whether that waits for other processes.
        failed: the error that ended its work, in one line.
        theirs: whether that error is what comes of the loss of another process.
        ended: it has left the run in good order.
        machine: where its process number means something; empty: nowhere else.
        pid: its process number there.
    """

    rank: int
    host: str
    beat: int = 0
    step: int = 0
    phase: str = "start"
    seconds: float = 0.0
    waiting: str = ""
    limit: str = ""
    over: bool = False
    behind: str = ""
    behind_waits: bool = False
    failed: str = ""
    theirs: bool = False
    ended: bool = False
    machine: str = ""
    pid: int = 0

    @property
    def name(self) -> str:
        """Which process, for a person."""
        return f"process {self.rank} on {self.host}"

    @property
    def place(self) -> str:
        """Where it is, for a person."""
        return f"in phase {self.phase} after step {self.step}"


@dataclass(frozen=True)
class Verdict(_Told):
    """Why all processes end, in words and as an exit code.

    Attributes:
        what: `died`, `silent`, `failed`, `stuck`, `device`; `preempted` is no fault.
        rank: the process that is to blame; None where none is, as when all wait for the devices.
    """

    code: int
    what: str
    words: str
    rank: int | None = None
    host: str = ""
    step: int = 0
    phase: str = ""


def lost(status: Status, what: str, evidence: str) -> Verdict:
    """A process is gone, `died` or `silent`, or has `failed`."""
    words = f"{status.name} {evidence}; it was {status.place}"
    return Verdict(EXIT_LOST_PROCESS, what, words, status.rank, status.host, status.step, status.phase)


def judge(statuses: Mapping[int, Status], silent: Collection[int]) -> Verdict | None:
    """The verdict once a limit has passed somewhere; None where no limit has, or where the one that all wait for is
    still within its own.

    Args:
        statuses: the last word of each process.
        silent: those that have said nothing for some seconds.
    """
    there = {rank: status for rank, status in statuses.items() if not status.ended}
    if not any(status.over or status.behind for status in there.values()):
        return None
    if gone := sorted(rank for rank in silent if rank in there):
        return lost(there[gone[0]], "silent", "does not answer, and others wait for it")
    if behind := [status for status in there.values() if status.behind]:
        late = next((status for status in there.values() if not status.behind_waits), behind[0])
        return _stuck(late, late.behind or behind[0].behind, "save")
    busy = [status for status in there.values() if not status.waiting]
    if busy:
        # The one that is behind; of equals, the one that takes longest.
        late = min(busy, key=lambda status: (status.step, -status.seconds))
        return _stuck(late, f"{late.place} for {late.seconds:.0f} s ({late.limit})") if late.over else None
    on_devices = [status for status in there.values() if status.waiting == DEVICES]
    if on_devices:
        return _stuck_device(on_devices, alone=len(there) == 1)
    late = min(there.values(), key=lambda status: (status.step, -status.seconds))
    return _stuck(late, f"{late.place} at {late.waiting!r} for {late.seconds:.0f} s ({late.limit})")


def _stuck(late: Status, how: str, phase: str | None = None) -> Verdict:
    phase = phase or late.phase
    words = f"{late.name} makes no progress: {how}"
    return Verdict(_CODES.get(phase, EXIT_STUCK), "stuck", words, late.rank, late.host, late.step, phase)


def _stuck_device(waiting: list[Status], alone: bool) -> Verdict:
    """A process whose devices are at an earlier step than the others' is named."""
    late = min(waiting, key=lambda status: (status.step, status.rank))
    named = alone or any(status.step > late.step for status in waiting)
    who = late.name if named else f"all {len(waiting)} processes"
    words = (
        f"the program on the devices does not end: {who} waited for it after step {late.step} "
        f"for {late.seconds:.0f} s ({late.limit})"
    )
    return Verdict(
        EXIT_STUCK_DEVICE,
        "device",
        words,
        late.rank if named else None,
        late.host if named else "",
        late.step,
        late.phase,
    )
