"""Rows that lie in memory as arrays, and the pair of tables that a data set is made of."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxtrain.data.rows import FILLER, Batch, Table
from jaxtrain.errors import ConfigError

WEIGHTS = "weights"


class ArrayTable:
    """A table of arrays in memory: row i is index i of each array.

    A field `weights` says how much each row counts (float32, 1.0 for all where none is given). Filler rows hold zeros,
    so their weight is 0. Pickles with its arrays: each data worker gets a copy.

    Args:
        fields: name to an array [rows, …]; their dtypes are those of the batches.

    Raises:
        ConfigError: no field or no row, fields of different lengths, an array of objects.
    """

    def __init__(self, fields: Mapping[str, npt.ArrayLike]) -> None:
        self.fields = {name: np.asarray(values) for name, values in fields.items()}
        lengths = {name: len(array) if array.ndim else 0 for name, array in self.fields.items()}
        if not lengths or min(lengths.values()) == 0:
            raise ConfigError(f"an ArrayTable needs arrays with at least one row, not {_listed(lengths)}")
        if len(set(lengths.values())) > 1:
            raise ConfigError(f"the fields of an ArrayTable must have as many rows each, not {_listed(lengths)}")
        for name, array in self.fields.items():
            if array.dtype.kind not in "biuf":
                raise ConfigError(f"field {name!r} of an ArrayTable has dtype {array.dtype}; give it as numbers")
        self._rows = next(iter(lengths.values()))
        if WEIGHTS not in self.fields:
            self.fields[WEIGHTS] = np.ones(self._rows, np.float32)

    def __len__(self) -> int:
        return self._rows

    def assemble(self, row_ids: npt.NDArray[np.int64]) -> Batch:
        """The rows of these ids in this order; `FILLER` gives zeros.

        Raises:
            IndexError: an id is neither a row nor `FILLER`.
        """
        outside = row_ids[(row_ids != FILLER) & ((row_ids < 0) | (row_ids >= self._rows))]
        if len(outside):
            raise IndexError(f"row {outside[0]} of {self._rows}")
        fillers = row_ids == FILLER
        batch = {name: array[np.where(fillers, 0, row_ids)] for name, array in self.fields.items()}
        for array in batch.values():
            array[fillers] = 0
        return batch

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all names, dtypes, shapes and values, in hex: other content gives another hash."""
        total = hashlib.sha256()
        for name in sorted(self.fields):
            array = np.ascontiguousarray(self.fields[name])
            total.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            total.update(array.data.cast("B") if array.size else b"")
        return total.hexdigest()


@dataclass(frozen=True)
class Tables:
    """A data set: what is trained on, and what is held out. Anything with these attributes is as good.

    Attributes:
        train: the rows of an epoch.
        held_out: the rows for evaluation, or None.
        sets: more of them by name, evaluated beside `held_out`: their metrics are called eval_NAME_loss.
        hash: identifies the content in hex, so that a run never goes on with other data. Tables that lie in memory
            have one of their own; others need it given.

    Raises:
        ConfigError: no hash is given, and a table has none.
    """

    train: Table
    held_out: Table | None = None
    hash: str = ""
    sets: Mapping[str, Table] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.hash:
            return
        tables = [self.train, self.held_out, *self.sets.values()]
        parts = [getattr(table, "hash", None) for table in tables if table is not None]
        if not all(isinstance(part, str) and part for part in parts):
            kind = type(self.train).__name__
            raise ConfigError(f"{kind} doesn't know a hash of its content; give Tables(…, hash=…) one, in hex")
        object.__setattr__(self, "hash", hashlib.sha256(" ".join([*map(str, parts), *self.sets]).encode()).hexdigest())


def _listed(lengths: Mapping[str, int]) -> str:
    return ", ".join(f"{name} with {length}" for name, length in lengths.items()) or "none"


def rows_of(table: Any) -> int | None:
    """The rows of a table, or None for what is no table."""
    if not callable(getattr(table, "assemble", None)):
        return None
    try:
        return len(table)
    except TypeError:
        return None
