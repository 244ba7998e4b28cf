"""A process's sign of life, in a file that a supervisor on the same machine reads.

The supervisor names a folder in the environment variable `JAXTRAIN_BEATS`; each process replaces its own file there
every second, from a thread of its own, and says where it is. A process whose file grows old is stopped, or gone.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from jaxtrain.files import read_json, replace_file

FOLDER_VARIABLE = "JAXTRAIN_BEATS"
ATTEMPT_VARIABLE = "JAXTRAIN_ATTEMPT"
"""Which start of the run this is, counted by the supervisor from 1."""


@dataclass(frozen=True)
class Beat:
    """Where a process was when it last wrote.

    Attributes:
        step: the last one that it finished.
        phase: what it does, as the watchdog calls it: `start`, `compile`, `restore`, `step`, `save`, ….
        since: when the phase began, in unix seconds.
        time: when this was written, in unix seconds.
        leaving: whether its run has ended: it may still wait for the others, and writes no more.
    """

    process: int
    pid: int
    host: str
    step: int
    phase: str
    since: float
    time: float
    leaving: bool = False


def write_beat(folder: Path, beat: Beat) -> None:
    """Replaces this process's file."""
    replace_file(_path(folder, beat.process), json.dumps(asdict(beat)))


def read_beats(folder: Path) -> dict[int, Beat]:
    """The last beat of each process that wrote one."""
    return {beat.process: beat for path in sorted(folder.glob("*.json")) if (beat := _read(path)) is not None}


def folder_of_beats() -> Path | None:
    """Where this process writes; None without a supervisor."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else None


def _path(folder: Path, process: int) -> Path:
    return folder / f"{process}.json"


def _read(path: Path) -> Beat | None:
    try:
        return Beat(**read_json(path))
    except (OSError, ValueError, TypeError):
        return None
