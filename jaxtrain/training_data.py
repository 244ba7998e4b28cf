"""The data of a run, of whatever kind: which rows there are, in which order, and the held-out ones."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxtrain import distributed
from jaxtrain.config import Config, DigitsDataConfig, MixtureDataConfig, OwnDataConfig, TokenDataConfig, TokenRowsConfig
from jaxtrain.config.data import SET_NAME, may_name_a_set
from jaxtrain.data import FILLER, MixtureTable, Order, RowOrder, Table, Tables, load_digits
from jaxtrain.data.arrays import rows_of
from jaxtrain.errors import ConfigError
from jaxtrain.target import call_target
from jaxtrain.token_data import EvalSet, open_eval_sets, open_mixture, open_tokens


@dataclass(frozen=True)
class TrainingData:
    """What a run trains on.

    Attributes:
        where: the data in words, for messages: the key that chooses them, and its value.
        table: the rows of the training split.
        order: which row stands at which position.
        hash: of the content; the same data give the same hash.
        held_out: the rows for evaluation, where the config asks for them and there are some.
        summary: what a person should know of the rows, in lines; perhaps none.
        eval_sets: more of them, by name.
    """

    where: str
    table: Table
    order: RowOrder
    hash: str
    held_out: Table | None
    summary: str = ""
    eval_sets: Mapping[str, EvalSet] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows of one epoch."""
        return len(self.table)

    def describe_rows(self, row_ids: npt.NDArray[np.int64]) -> list[str | int]:
        """The rows of these ids as a log names them: a mixture's with the data set that each is of."""
        return self.table.describe_rows(row_ids) if isinstance(self.table, MixtureTable) else row_ids.tolist()


def open_data(config: Config, *, held_out_needed: bool = True) -> TrainingData:
    """The data that `config.data` describes, prepared first if they have a source and aren't there yet.

    Args:
        held_out_needed: refuse data that hold nothing out, where the config evaluates.

    Raises:
        ConfigError, DataError: the data set is missing, broken, or doesn't fit the model.
    """
    data, summary, order = config.data, "", None
    if isinstance(data, TokenDataConfig):
        where, opened = f"data.dir={data.dir}", open_tokens(data, config)
        tables, order, summary = opened.tables, opened.order, opened.summary
    elif isinstance(data, MixtureDataConfig):
        where, opened = "data.mixture", open_mixture(data, config)
        tables, order, summary = opened.tables, opened.order, opened.summary
    elif isinstance(data, DigitsDataConfig):
        where, tables = f"data.kind={data.kind}", load_digits(data.held_out)
    else:
        where, tables = f"data.target={data.target}", _open_own(data, config)
    if config.eval.every and held_out_needed and tables.held_out is None:
        raise ConfigError(
            f"eval.every={config.eval.every}, but {where} holds nothing out to evaluate on; set eval.every=0"
        )
    order = order or Order(len(tables.train), config.seed, data.shuffle, data.epochs)
    if not config.eval.every:
        return TrainingData(where, tables.train, order, tables.hash, None, summary)
    if isinstance(data, TokenRowsConfig):
        eval_sets = open_eval_sets(data, config)
    else:
        eval_sets = {name: EvalSet(table, tables.hash) for name, table in tables.sets.items()}
    return TrainingData(where, tables.train, order, tables.hash, tables.held_out, summary, eval_sets)


def _open_own(data: OwnDataConfig, config: Config) -> Tables:
    """What somebody's own callable gives, judged."""
    made = call_target("data", data.target, data.own_keys, {}, config.origins)
    what = f"data.target={data.target} gives a {type(made).__name__}"
    missing = [name for name in ("train", "held_out", "hash") if not hasattr(made, name)]
    if missing:
        raise ConfigError(f"{what} without {', '.join(missing)}; return jaxtrain.data.Tables(train, held_out)")
    sets = getattr(made, "sets", {})
    for name in sets:
        if not may_name_a_set(name):
            raise ConfigError(f"{what} with a set named {name!r}; {SET_NAME}")
    for name, table in {"train": made.train, "held_out": made.held_out, **sets}.items():
        if table is None and name == "held_out":
            continue
        rows = rows_of(table)
        if rows is None:
            kind = type(table).__name__
            raise ConfigError(f"{what} whose {name} is a {kind}, no table; it needs len() and assemble(row_ids)")
        if rows == 0:
            raise ConfigError(f"{what} whose {name} has no row")
    if not isinstance(made.hash, str) or not re.fullmatch(r"[0-9a-f]{12,}", made.hash):
        raise ConfigError(f"{what} whose hash is {made.hash!r}; it must be 12 hexadecimal digits or more")
    return Tables(made.train, made.held_out, made.hash, sets)


def agree_on_data(data: TrainingData) -> None:
    """Raises a ConfigError where the processes see different data."""
    if not distributed.same_everywhere(data.hash):
        raise ConfigError(f"{data.where}: the processes see different data sets; give all of them the same files")
    sets = {name: given.hash for name, given in data.eval_sets.items()}
    if not distributed.same_everywhere(sets):
        raise ConfigError(f"eval.sets: the processes see different data sets (here: {', '.join(sets) or 'none'})")


def refuse_other_fields(data: TrainingData, example: Mapping[str, Any]) -> None:
    """Raises where the rows aren't what the task reads.

    Args:
        example: name to what a batch must hold, with `shape` (rows first) and `dtype`; other fields may be there too.

    Raises:
        ConfigError: names the first field with its shape and dtype, and those that the task reads.
    """
    evaluated = [data.held_out, *(one.table for one in data.eval_sets.values())]
    for table in [data.table, *(table for table in evaluated if table is not None)]:
        batch = table.assemble(np.array([0, FILLER], np.int64))
        for name, wanted in example.items():
            reads = f"the model reads {name} of shape {wanted.shape[1:]} and dtype {np.dtype(wanted.dtype)} in each row"
            if name not in batch:
                raise ConfigError(f"{data.where}: rows have {', '.join(batch)}, but {reads}")
            found = np.asarray(batch[name])
            if found.shape[1:] != tuple(wanted.shape[1:]) or found.dtype != wanted.dtype:
                raise ConfigError(
                    f"{data.where}: {name} has shape {found.shape[1:]} and dtype {found.dtype}, but {reads}"
                )
