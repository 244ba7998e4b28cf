"""The second pass: the runs are merged by key into the shards of the data set.

Each shard holds a range of keys, and a run holds each range in one stretch, so that a shard is made by reading one
stretch of every run. The memory that takes is that of a shard's tokens.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxtrain.data.manifest import FileRecord, ShardRecord, SplitRecord
from jaxtrain.data.prepare.runs import SPLITS
from jaxtrain.data.writer import ShardWriter, describe, save_array, shard_file
from jaxtrain.files import replace_file

_BUCKET_BITS = 16
_SHIFT = 64 - _BUCKET_BITS


@dataclass(frozen=True)
class ShardPlan:
    """A shard to be made: number `number` of `count`, of the documents whose keys begin with these 16 bits."""

    split: int
    number: int
    count: int
    first_bucket: int
    end_bucket: int

    @property
    def file(self) -> str:
        return shard_file(SPLITS[self.split], self.number, self.count)


def plan_shards(units: Path, shard_tokens: int) -> list[ShardPlan]:
    """The shards of each split: a new one begins when the last one holds at least so many tokens."""
    return [plan for split in range(len(SPLITS)) for plan in _cut(split, _tokens_by_key(split, units), shard_tokens)]


def _tokens_by_key(split: int, units: Path) -> npt.NDArray[np.int64]:
    """How many tokens the documents have whose keys begin with each 16 bits."""
    buckets = 1 << _BUCKET_BITS
    tokens = np.zeros(buckets, np.int64)
    for run in _runs(units, split):
        keys, ends = np.load(run)
        lengths = np.diff(ends.astype(np.int64), prepend=0)
        places = (keys >> np.uint64(_SHIFT)).astype(np.int64)
        tokens += np.bincount(places, lengths, buckets).astype(np.int64)  # exact: whole numbers below 2⁵³
    return tokens


def _cut(split: int, tokens: npt.NDArray[np.int64], shard_tokens: int) -> list[ShardPlan]:
    starts, held = [], shard_tokens
    for bucket in np.flatnonzero(tokens).tolist():
        if held >= shard_tokens:
            starts.append(bucket)
            held = 0
        held += int(tokens[bucket])
    ends = [*starts[1:], 1 << _BUCKET_BITS]
    return [
        ShardPlan(split, number, len(starts), start, end)
        for number, (start, end) in enumerate(zip(starts, ends[: len(starts)], strict=True))
    ]


@dataclass(frozen=True)
class WriteShards:
    """The second pass, to be done by several processes.

    Attributes:
        units: where the runs are; lengths and markers lie beside it.
        dataset: where the shards go.
        dtype: of the stored ids.
        made_by: what the runs hold.
    """

    plans: tuple[ShardPlan, ...]
    units: Path
    dataset: Path
    dtype: str
    made_by: str

    def __call__(self, index: int, count: int) -> Iterator[ShardRecord]:
        """The records of the shards index, index+count, …, each made now or found in order.

        Raises:
            ConfigError: one can't be written.
        """
        for plan in self.plans[index::count]:
            yield self._finished(plan) or self._write(plan)

    def _finished(self, plan: ShardPlan) -> ShardRecord | None:
        try:
            description = json.loads(_marker(plan, self.units).read_text())
            record = ShardRecord.model_validate(description["shard"])
            found = [describe(self.dataset / plan.file), describe(_lengths_file(plan, self.units))]
            if description["made_by"] == self.made_by and description["files"] == found:
                return record
        except (OSError, ValueError, KeyError, TypeError):
            pass  # never finished, or torn by a crash: it is made again
        return None

    def _write(self, plan: ShardPlan) -> ShardRecord:
        keys, lengths, tokens = _gather(plan, self.units, np.dtype(self.dtype).newbyteorder("<"))
        ends = np.cumsum(lengths, dtype=np.int64)
        order = np.argsort(keys, kind="stable")  # of equal keys, the order of the runs
        shard = ShardWriter(self.dataset / plan.file)
        for place in order:
            shard.write(tokens[ends[place] - lengths[place] : ends[place]])
        shard.close()
        save_array(_lengths_file(plan, self.units), lengths[order])
        files = [describe(shard.path), describe(_lengths_file(plan, self.units))]
        record = ShardRecord(**files[0], documents=len(keys), tokens=len(tokens))
        description = {"made_by": self.made_by, "shard": record.model_dump(), "files": files}
        replace_file(_marker(plan, self.units), json.dumps(description))
        return record


def join_lengths(
    plans: list[ShardPlan], records: list[ShardRecord], units: Path, dataset: Path
) -> dict[str, SplitRecord]:
    """Writes each split's lengths, from those of its shards; returns what the manifest says of the splits."""
    splits = {}
    for split, name in enumerate(SPLITS):
        own = [(plan, record) for plan, record in zip(plans, records, strict=True) if plan.split == split]
        parts = [np.load(_lengths_file(plan, units)) for plan, _ in own]
        path = dataset / f"{name}-lengths.npy"
        save_array(path, np.concatenate([np.empty(0, np.int32), *parts]))
        splits[name] = SplitRecord(
            documents=sum(record.documents for _, record in own),
            tokens=sum(record.tokens for _, record in own),
            lengths=FileRecord(**describe(path)),
            shards=tuple(record for _, record in own),
        )
    return splits


def _gather(
    plan: ShardPlan, units: Path, dtype: np.dtype[Any]
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32], npt.NDArray[Any]]:
    """The keys, the lengths and, one after the other, the tokens of a shard's documents, run after run."""
    low, high = plan.first_bucket << _SHIFT, (plan.end_bucket << _SHIFT) - 1
    keys, lengths, stretches = [], [], []
    for run in _runs(units, plan.split):
        own, ends = np.load(run, mmap_mode="r")
        start = int(np.searchsorted(own, np.uint64(low)))
        stop = int(np.searchsorted(own, np.uint64(high), side="right"))
        if start < stop:
            bounds = ends[max(start - 1, 0) : stop].astype(np.int64)
            bounds = bounds if start else np.concatenate([[0], bounds])
            keys.append(own[start:stop].copy())
            lengths.append(np.diff(bounds).astype(np.int32))
            stretches.append((run.with_suffix(".tokens"), int(bounds[0]), int(bounds[-1] - bounds[0])))
    tokens = np.empty(sum(count for _, _, count in stretches), dtype)
    filled = 0
    for file, first, count in stretches:
        tokens[filled : filled + count] = np.fromfile(file, dtype, count, offset=first * dtype.itemsize)
        filled += count
    return np.concatenate(keys), np.concatenate(lengths), tokens


def _runs(units: Path, split: int) -> list[Path]:
    return sorted(units.glob(f"{SPLITS[split]}-*.npy"))


def _marker(plan: ShardPlan, units: Path) -> Path:
    return units.parent / f"{plan.file}.json"


def _lengths_file(plan: ShardPlan, units: Path) -> Path:
    return units.parent / f"{plan.file}.lengths.npy"
