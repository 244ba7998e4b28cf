"""What a directory of checkpoints holds, told by names, descriptions and file sizes; only `damaged_leaves` reads."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from jaxtrain.checkpoint.arrays import read_arrays, state_handler
from jaxtrain.checkpoint.checksum import as_text, content_sums
from jaxtrain.checkpoint.directory import state_path
from jaxtrain.checkpoint.meta import Meta, Unreadable, read_meta
from jaxtrain.checkpoint.part import Saved
from jaxtrain.config import Difference, flat
from jaxtrain.errors import CheckpointError, first_line
from jaxtrain.models.parameters import path_name


@dataclass(frozen=True)
class Leaf:
    """One array of a checkpoint, as its description has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Of the array, uncompressed."""
        return self.size * jax.numpy.dtype(self.dtype).itemsize


def leaves(meta: Meta) -> list[Leaf]:
    """All arrays, in the order in which they were saved."""
    return [
        Leaf(name, tuple(shape), dtype, meta.checksums.get(name, "")) for name, (shape, dtype) in meta.arrays.items()
    ]


def bytes_on_disk(path: Path) -> int:
    """Of all files below `path`; of those that are left, where a run deletes it meanwhile."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(folder, name).stat().st_size
    return total


def config_changes(directory: Path, steps: Sequence[int]) -> dict[int, list[Difference]]:
    """What differs, for each step that was saved with another config than the step before it; unreadable ones and
    those of another format are not looked at."""
    changes: dict[int, list[Difference]] = {}
    before: Mapping[str, Any] | None = None
    for step in sorted(steps):
        try:
            now = flat(read_meta(directory, step).config)
        except (Unreadable, CheckpointError):
            continue
        if before is not None and now != before:
            names = [*now, *(name for name in before if name not in now)]
            changes[step] = [
                Difference(name, before.get(name), now.get(name), may_change=True)
                for name in names
                if before.get(name) != now.get(name)
            ]
        before = now
    return changes


def damaged_leaves(saved: Saved) -> Iterator[tuple[str, str | None]]:
    """Reads one array after the other on the first device, and compares its content with its checksum.

    Yields:
        Each array's name, and what is wrong with it, or None. An array that only one side knows of is wrong.
    """
    path = state_path(saved.directory, saved.meta.step)
    try:
        there = _arrays_there(path)
    except Exception as error:
        yield from ((name, f"can't be read: {first_line(error)}") for name in saved.meta.arrays)
        return
    for name in [*saved.meta.arrays, *(name for name in there if name not in saved.meta.arrays)]:
        if name not in there:
            yield name, "is missing"
        elif name not in saved.meta.arrays:
            yield name, "is not in the description"
        else:
            keys, found = there[name]
            yield name, _damage(path, keys, found, saved.meta, name)


def _damage(path: Path, keys: Sequence[str], found: Any, meta: Meta, name: str) -> str | None:
    shape, dtype = meta.arrays[name]
    if (list(found.shape), str(np.dtype(found.dtype))) != (shape, dtype):
        return f"is {np.dtype(found.dtype)}{list(found.shape)}, not {dtype}{shape}"
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree: Any = jax.ShapeDtypeStruct(found.shape, found.dtype, sharding=sharding)
    for key in reversed(keys):
        tree = {key: tree}
    try:
        (leaf,) = jax.tree.leaves(read_arrays(path, tree, partial=True))
    except Unreadable as problem:
        return f"can't be read: {problem}"
    # All under one name, so that arrays of one shape share a compiled program.
    checksum = as_text(jax.device_get(_sums({"leaf": leaf})))["leaf"]
    return None if checksum == meta.checksums.get(name) else "has another content than was saved"


_sums = jax.jit(content_sums)


def _arrays_there(path: Path) -> dict[str, tuple[list[str], Any]]:
    """By name: the keys that lead to an array on disk, and its shape and dtype; no array is read."""
    tree = state_handler().metadata(epath.Path(path)).tree
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(keys): ([path_name((key,)) for key in keys], leaf) for keys, leaf in found}
