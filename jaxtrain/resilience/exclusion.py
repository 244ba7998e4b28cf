"""`RUN/excluded.json`: hosts that a run should go on without. Launchers read it."""

import time
from pathlib import Path

from jaxtrain.files import read_json, replace_json


def exclude(path: Path, host: str, rank: int, device: str, reason: str, step: int) -> None:
    """Adds an entry; a crash at any moment leaves the old list or the new one. One process of a run does so.

    Whoever wrote what is there, it stays: a person may leave out what a launcher doesn't need.

    Args:
        host: its name, as `hostname` says on it.
        rank: of the process there in the start that found it.
        device: the bad one, or several, such as `cuda:3`.
        reason: in words.
        step: the run's, when it was found.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError):
        found = []
    entry = {"host": host, "rank": rank, "device": device, "reason": reason, "step": step}
    kept = found if isinstance(found, list) else []
    replace_json(path, [*kept, {**entry, "time": round(time.time(), 3)}])
