"""What a checkpoint says of itself beside the arrays."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
from etils import epath
from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from jaxtrain.checkpoint.directory import step_path
from jaxtrain.errors import CheckpointError, first_line

FORMAT = 1


@dataclass(frozen=True)
class Meta:
    """The description of a checkpoint.

    Attributes:
        position: rows of the data order consumed so far; a state of its own beside the step.
        skipped: updates skipped so far for non-finite numbers or spikes.
        config: the resolved config as plain data.
        data_hash: the data set's manifest hash.
        checksums: of each leaf's content, by path name.
        arrays: of each leaf, shape and dtype, by path name.
        metrics: finite ones of an evaluation at this very step, such as `eval_loss`; empty without one.
        saved_at: when the save began, in unix seconds by process 0's clock.
        abandoned: whether the evaluation of this step was left off, and is to be done when the run goes on.
        origin: what `init_from` gave where the run began, by `origin.describe`.
        spikes: what `resilience.spikes` judges later steps by.
    """

    step: NonNegativeInt
    position: NonNegativeInt
    skipped: NonNegativeInt
    config: dict[str, Any]
    data_hash: str
    checksums: dict[str, str] = field(default_factory=dict)
    arrays: dict[str, list[Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    saved_at: float = 0.0
    abandoned: bool = False
    origin: dict[str, Any] | None = None
    spikes: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


_META = TypeAdapter(Meta)


class Unreadable(Exception):
    """A checkpoint that is there and can't be read."""


def parse_meta(text: str | bytes) -> Meta:
    """A description from JSON; raises Unreadable where it is none."""
    try:
        return _META.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Unreadable(f"its description is damaged: {where}: {first['msg']}") from error


def read_meta(directory: Path, step: int) -> Meta:
    """The description of the checkpoint of `step` in `directory`.

    Raises:
        Unreadable: it is missing or damaged.
        CheckpointError: it is of another format: a good checkpoint of another version, to be left alone.
    """
    try:
        content = ocp.JsonCheckpointHandler().restore(epath.Path(step_path(directory, step) / "meta"))
        format_ = content.get("format")
        if isinstance(format_, int) and format_ != FORMAT:
            # Not unreadable: a good checkpoint of another version must not be set aside for an older one.
            raise CheckpointError(
                f"{step_path(directory, step)} has format {format_}; this program reads format {FORMAT}"
            )
        meta = parse_meta(json.dumps(content))
    except (CheckpointError, Unreadable):
        raise
    except Exception as error:
        raise Unreadable(f"its description can't be read: {first_line(error)}") from error
    if meta.step != step:
        raise Unreadable(f"its description is that of step {meta.step}")
    return meta
