"""Which checkpoints a directory holds, judged by what is in them and not by their names."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

COMMITTED_MARKER = "_CHECKPOINT_METADATA"
"""Orbax writes this file before it renames a finished checkpoint to its final name."""

TEMPORARY_MARK = ".orbax-checkpoint-tmp"
_DELETING_SUFFIX = ".deleting"
_SET_ASIDE = re.compile(r"\d+\.(?:incomplete|unreadable)(?:-\d+)?")


@dataclass(frozen=True)
class Listing:
    """What was found.

    Attributes:
        steps: complete ones, newest first.
        incomplete: have the name of a step and are not complete.
        leftovers: of saves or deletions that are under way, or were interrupted.
        set_aside: could not be used when a run went on, and were renamed.
    """

    steps: list[int]
    incomplete: list[Path]
    leftovers: list[Path]
    set_aside: list[Path]


def step_path(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / str(step)


def state_path(directory: Path, step: int) -> Path:
    """What `StandardCheckpointer().restore(...)` reads."""
    return step_path(directory, step) / "state"


def is_complete(path: Path) -> bool:
    """Whether a step's directory was committed and has both of its items."""
    return all((path / name).exists() for name in (COMMITTED_MARKER, "state", "meta"))


def list_checkpoints(directory: Path) -> Listing:
    """Everything in `directory`; a missing directory holds nothing."""
    steps, incomplete, leftovers, renamed = [], [], [], []
    for path in sorted(directory.iterdir()) if directory.is_dir() else []:
        if TEMPORARY_MARK in path.name or path.name.endswith(_DELETING_SUFFIX):
            leftovers.append(path)
        elif _is_step(path.name):
            steps.append(int(path.name)) if is_complete(path) else incomplete.append(path)
        elif _SET_ASIDE.fullmatch(path.name):
            renamed.append(path)
    return Listing(sorted(steps, reverse=True), incomplete, leftovers, renamed)


def _is_step(name: str) -> bool:
    """Whether `step_path` would give this name: `007` is not step 7."""
    return name.isdecimal() and name == str(int(name))


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint that can't be used, so that its step can be saved anew and nothing is lost."""
    number = 0
    while (target := path.with_name(f"{path.name}.{why}{f'-{number}' if number else ''}")).exists():
        number += 1
    return path.rename(target)


def delete(path: Path) -> None:
    """Removes a checkpoint; it stops being one at once, however long the removal takes."""
    doomed = path.with_name(path.name + _DELETING_SUFFIX) if not path.name.endswith(_DELETING_SUFFIX) else path
    if path != doomed:
        path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
