"""Only the parameters of a checkpoint, or another part of the state, on any mesh; nothing else is read or allocated."""

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import jax

from jaxtrain.checkpoint.arrays import Types, array_types, read_arrays, read_by_all, verify
from jaxtrain.checkpoint.checksum import content_sums
from jaxtrain.checkpoint.directory import list_checkpoints, state_path, step_path
from jaxtrain.checkpoint.meta import Meta, Unreadable, read_meta
from jaxtrain.errors import CheckpointError, ConfigError


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint whose description was read.

    Attributes:
        directory: where it lies with the other steps.
    """

    directory: Path
    meta: Meta

    @property
    def path(self) -> Path:
        """The directory of its step."""
        return step_path(self.directory, self.meta.step)

    @property
    def parts(self) -> list[str]:
        """What its state consists of: `params`, `optimizer`, `step` …"""
        return list(dict.fromkeys(name.partition(".")[0] for name in self.meta.arrays))


def open_saved(directory: Path, step: int | None = None) -> Saved:
    """The checkpoint of `step` in a directory of checkpoints, or the newest complete one. Deletes and renames nothing.

    Raises:
        ConfigError: there is none, or not of this step.
        CheckpointError: it is there and can't be read.
    """
    steps = list_checkpoints(directory).steps
    if not steps:
        raise ConfigError(f"{directory}: no complete checkpoint is there")
    step = steps[0] if step is None else step
    if step not in steps:
        raise ConfigError(f"{directory}: no complete checkpoint of step {step}; there are {_listed(steps)}")
    try:
        return Saved(directory, read_meta(directory, step))
    except Unreadable as problem:
        raise _damaged(directory, step, problem) from problem


def restore_part(saved: Saved, abstract: Any, part: str = "params") -> Any:
    """The state's `part` of a checkpoint, straight into the shardings of `abstract`, verified by its checksums.

    Args:
        abstract: a tree of `jax.ShapeDtypeStruct` with shardings, such as `program.state["params"]`, on any mesh.
        part: `params`, or another one that has the structure of `abstract`, such as `ema`.

    Raises:
        ConfigError: the checkpoint has no such part, or other arrays in it: all of them are named.
        CheckpointError: what is there can't be read, or isn't what was saved.
    """
    if part not in saved.parts:
        raise ConfigError(f"{saved.path} has no {part}; it has {', '.join(saved.parts)}")
    if problems := list(mismatches(saved, abstract, part)):
        raise ConfigError("\n".join(problems))
    try:
        path = state_path(saved.directory, saved.meta.step)
        restored = read_by_all(lambda: read_arrays(path, {part: abstract}, partial=True))
        verify(jax.jit(content_sums)(restored), saved.meta.checksums)
    except Unreadable as problem:
        if not saved.path.is_dir():
            raise deleted_meanwhile(saved) from problem
        raise _damaged(saved.directory, saved.meta.step, problem) from problem
    return restored[part]


def mismatches(saved: Saved, abstract: Any, part: str = "params") -> Iterator[str]:
    """A line for each array of `part` that one side lacks, with the nearest name, or has otherwise, below a headline;
    nothing where all are the same."""
    lines = list(_mismatches(saved.meta.arrays, array_types({part: abstract}), part))
    if lines:
        yield f"{saved.path} has other {part} than this model:"
        yield from (f"  {line}" for line in lines)


def _mismatches(saved: Types, wanted: Types, part: str) -> Iterator[str]:
    there = {name: kind for name, kind in saved.items() if name.startswith(f"{part}.")}
    missing, left = sorted(wanted.keys() - there.keys()), sorted(there.keys() - wanted.keys())
    for name in missing:
        yield f"{name} {_shown(wanted[name])} is not in the checkpoint{_nearest(name, left)}"
    for name in left:
        yield f"{name} {_shown(there[name])} of the checkpoint has no place here{_nearest(name, missing)}"
    for name in sorted(wanted.keys() & there.keys()):
        if wanted[name] != there[name]:
            yield f"{name} is {_shown(there[name])} in the checkpoint, {_shown(wanted[name])} here"


def _nearest(name: str, names: list[str]) -> str:
    part = name.partition(".")[0]  # all begin with it, so it would make anything look alike
    close = get_close_matches(name.removeprefix(part), [other.removeprefix(part) for other in names], n=1)
    return f"; the nearest is {part}{close[0]}" if close else ""


def _shown(kind: list[Any]) -> str:
    shape, dtype = kind
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _listed(steps: list[int]) -> str:
    shown = [str(step) for step in sorted(steps)]
    return ", ".join(shown if len(shown) <= 12 else [*shown[:4], "…", *shown[-8:]])


def deleted_meanwhile(saved: Saved) -> CheckpointError:
    """To raise where a checkpoint is gone that was there: nothing is wrong with it."""
    now = _listed(list_checkpoints(saved.directory).steps) or "none"
    return CheckpointError(
        f"{saved.path} was deleted while it was read, as a run that goes on does with those that it doesn't keep; "
        f"there are {now} now: give the same command again, or name a step that checkpoint.keep leaves longer"
    )


def _damaged(directory: Path, step: int, problem: Unreadable) -> CheckpointError:
    others = [other for other in list_checkpoints(directory).steps if other != step]
    remedy = f"other steps there: {_listed(others)}" if others else "it is the only one there"
    return CheckpointError(f"{step_path(directory, step)} can't be read: {problem}; {remedy}")
