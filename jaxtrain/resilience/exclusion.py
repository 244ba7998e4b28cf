"""`RUN/excluded.json`: hosts that a run should go on without. Launchers read it."""

import contextlib
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxtrain.telemetry.jsonl import read_json, replace_file


@dataclass(frozen=True)
class Excluded:
    """One entry of the list.

    Attributes:
        host: its name, as `hostname` says on it.
        rank: of the process there in the start that found it.
        device: the bad one, or several, such as `cuda:3`.
        reason: in words.
        step: the run's, when it was found.
        time: unix seconds.
    """

    host: str
    rank: int
    device: str
    reason: str
    step: int
    time: float


def exclude(path: Path, host: str, rank: int, device: str, reason: str, step: int) -> None:
    """Adds an entry; a crash at any moment leaves the old list or the new one. One process of a run does so."""
    entry = Excluded(host, rank, device, reason, step, round(time.time(), 3))
    replace_file(path, json.dumps([*_listed(path), asdict(entry)], indent=2) + os.linesep)


def read_excluded(path: Path) -> list[Excluded]:
    """The entries that a run wrote, oldest first; none where there is no file, or no list in it."""
    entries = []
    for entry in _listed(path):
        with contextlib.suppress(TypeError):
            entries.append(Excluded(**entry))
    return entries


def _listed(path: Path) -> list[Any]:
    """What is there, whoever wrote it: a person may leave out what a launcher doesn't need."""
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return []
    return found if isinstance(found, list) else []
