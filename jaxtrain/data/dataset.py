"""Reading a prepared data set: any document of any split, by its number."""

import bisect
import hashlib
import itertools
import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from array_record.python.array_record_module import ArrayRecordReader

from jaxtrain.data.manifest import FileRecord, Manifest, ShardRecord, SplitRecord, parse_manifest
from jaxtrain.errors import ConfigError, DataError

# Without read-ahead and with a small buffer a random record costs one small read instead of a megabyte.
_RANDOM_ACCESS = {"options": "readahead_buffer_size:0,max_parallelism:0", "file_reader_buffer_size": 32768}


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Dataset:
    """A prepared data set, open for reading; made by `open_dataset`.

    Safe to use from several threads. Pickles as its path and manifest: each process opens its own files, when it
    first reads from them.
    """

    def __init__(self, directory: Path, manifest: Manifest, manifest_hash: str) -> None:
        self.directory = directory
        self.manifest = manifest
        self.manifest_hash = manifest_hash
        """SHA-256 of the manifest's bytes, in hex: two data sets with the same hash hold the same rows."""
        self._readers: dict[str, Any] = {}
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[type["Dataset"], tuple[Path, Manifest, str]]:
        return Dataset, (self.directory, self.manifest, self.manifest_hash)

    def lengths(self, split: str) -> npt.NDArray[np.int32]:
        """int32 [documents]: tokens of each document of `split`.

        Raises:
            ConfigError: there is no such split.
            DataError: the file can't be read.
        """
        path = self.directory / self._split(split).lengths.file
        try:
            lengths: npt.NDArray[np.int32] = np.load(path, mmap_mode="r")
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: can't be read ({error}): {self._again}") from None
        return lengths

    def lengths_checksum(self, split: str) -> str:
        """SHA-256 of the file of `lengths`, in hex, after reading it to see that it is what was written.

        Raises:
            DataError: it is not.
        """
        record = self._split(split).lengths
        self._compare(record)
        return record.sha256

    def read(self, split: str, document: int) -> npt.NDArray[np.unsignedinteger[Any]]:
        """The token ids of one document: uint16 or uint32 [tokens].

        Raises:
            IndexError: `document` is not in the split.
            DataError: the shard is damaged.
        """
        shard, record = self._locate(split, document)
        try:
            content = self._reader(shard).read([record])[0]
            return np.frombuffer(content, np.dtype(self.manifest.token_dtype).newbyteorder("<"))
        except (OSError, ValueError, RuntimeError, IndexError) as error:
            where = self.directory / shard.file
            raise DataError(f"{where}: record {record} can't be read ({error}): {self._again}") from None

    def where(self, split: str, document: int) -> str:
        """The place of a document in words, for messages."""
        shard, record = self._locate(split, document)
        return f"{self.directory / shard.file}: split {split}, document {document} (record {record})"

    def verify(self, report: Callable[[str, int, int], None] | None = None) -> None:
        """Reads every file and compares its checksum: seconds per gigabyte. `report` is told of progress.

        Raises:
            DataError: a file is not what was written; names the first one.
        """
        files = self.manifest.files()
        for number, record in enumerate(files, start=1):
            self._compare(record)
            if report is not None:
                report("comparing files", number, len(files))

    def _compare(self, record: FileRecord) -> None:
        path = self.directory / record.file
        try:
            found = sha256_of(path)
        except OSError as error:
            raise DataError(f"{path}: can't be read ({error.strerror}): {self._again}") from None
        if found != record.sha256:
            raise DataError(f"{path}: the checksum differs from the manifest's: {self._again}")

    @property
    def _again(self) -> str:
        return f"delete {self.directory} and prepare it again"

    def _split(self, name: str) -> SplitRecord:
        try:
            return self.manifest.splits[name]
        except KeyError:
            known = ", ".join(self.manifest.splits)
            raise ConfigError(f"{self.directory}: the data set has no split {name!r}, only {known}") from None

    @cached_property
    def _shard_ends(self) -> dict[str, list[int]]:
        """For each split and shard, the number of documents up to and with it."""
        return {
            name: list(itertools.accumulate(shard.documents for shard in split.shards))
            for name, split in self.manifest.splits.items()
        }

    def _locate(self, split: str, document: int) -> tuple[ShardRecord, int]:
        record = self._split(split)
        if not 0 <= document < record.documents:
            raise IndexError(f"document {document} of split {split}, which has {record.documents}")
        ends = self._shard_ends[split]
        index = bisect.bisect_right(ends, document)
        return record.shards[index], document - (ends[index - 1] if index else 0)

    def _reader(self, shard: ShardRecord) -> Any:
        reader = self._readers.get(shard.file)
        if reader is None:
            with self._opening:
                if shard.file not in self._readers:
                    self._readers[shard.file] = ArrayRecordReader(str(self.directory / shard.file), **_RANDOM_ACCESS)
                reader = self._readers[shard.file]
        return reader


def open_dataset(directory: Path | str) -> Dataset:
    """Opens a prepared data set and checks that all its files are there in their full size.

    Checksums are not compared, since that reads everything: `Dataset.verify` does.

    Raises:
        ConfigError: there is no data set in `directory`.
        DataError: its manifest is damaged or of another version, a file is missing, or sizes or counts disagree.
    """
    directory = Path(directory).absolute()
    manifest, content = parse_manifest(directory)
    dataset = Dataset(directory, manifest, hashlib.sha256(content).hexdigest())
    for record in manifest.files():
        _check_size(directory, record)
    for name, split in manifest.splits.items():
        _check_counts(dataset, name, split)
    return dataset


def _check_size(directory: Path, record: FileRecord) -> None:
    path = directory / record.file
    again = f"copy it again, or delete {directory} and prepare it again"
    if not path.is_file():
        raise DataError(f"{path}: missing, though the manifest names it: {again}")
    if (size := path.stat().st_size) != record.bytes:
        raise DataError(f"{path}: {size} bytes, the manifest says {record.bytes}: {again}")


def _check_counts(dataset: Dataset, name: str, split: SplitRecord) -> None:
    lengths = dataset.lengths(name)
    starts = [0, *itertools.accumulate(shard.documents for shard in split.shards)]
    agree = lengths.shape == (split.documents,) == (starts[-1],) and all(
        int(lengths[start : start + shard.documents].sum(dtype=np.int64)) == shard.tokens
        for start, shard in zip(starts, split.shards, strict=False)
    )
    if not agree or split.tokens != sum(shard.tokens for shard in split.shards):
        path = dataset.directory / split.lengths.file
        raise DataError(
            f"{path}: the manifest counts other documents or tokens for split {name}: "
            f"delete {dataset.directory} and prepare it again"
        )
