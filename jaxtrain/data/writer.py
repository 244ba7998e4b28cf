"""Writing a data set so that it is complete or absent."""

import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from array_record.python.array_record_module import ArrayRecordWriter

from jaxtrain.data.dataset import Dataset, open_dataset, sha256_of
from jaxtrain.data.lock import exclusive
from jaxtrain.data.manifest import (
    MANIFEST_FILE,
    TOKENIZER_FILE,
    FileRecord,
    Manifest,
    ShardRecord,
    SplitRecord,
    TokenizerRecord,
    has_manifest,
)
from jaxtrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Tokens = npt.ArrayLike
SHARD_TOKENS = 100_000_000


def write_dataset(
    directory: Path | str,
    splits: Mapping[str, Iterable[Tokens]],
    tokenizer: "Tokenizer",
    end_of_document: int | None,
    source: Mapping[str, Any],
    shard_tokens: int = SHARD_TOKENS,
) -> Dataset:
    """Writes a data set to `directory`, which must not hold anything yet, and opens it.

    Args:
        directory: where it will be; built beside it as `DIRECTORY.partial` and renamed when complete.
        splits: for each name the documents in order, each a 1-d array of token ids. May be generators.
        tokenizer: stored with the data; every id must be one of its own.
        end_of_document: the id with which each document must end, or None.
        source: what the data were made from, for the manifest.
        shard_tokens: a new shard begins when the last one holds at least so many tokens.

    Raises:
        ConfigError: `directory` already holds something.
        DataError: an id is outside the tokenizer's, or a document doesn't end as it should.
    """
    directory = Path(directory).absolute()
    with exclusive(directory):
        return write_locked(directory, splits, tokenizer, end_of_document, source, shard_tokens)


def write_locked(
    directory: Path,
    splits: Mapping[str, Iterable[Tokens]],
    tokenizer: "Tokenizer",
    end_of_document: int | None,
    source: Mapping[str, Any],
    shard_tokens: int = SHARD_TOKENS,
) -> Dataset:
    """`write_dataset` for callers that already hold the directory's lock."""
    vocab_size = tokenizer.get_vocab_size()
    dtype = np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")
    with _complete_or_absent(directory) as partial:
        (partial / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
        checked = {name: _check_documents(name, split, vocab_size, end_of_document) for name, split in splits.items()}
        manifest = Manifest(
            token_dtype="uint16" if dtype.itemsize == 2 else "uint32",
            tokenizer=TokenizerRecord(
                **_describe(partial / TOKENIZER_FILE), vocab_size=vocab_size, end_of_document=end_of_document
            ),
            splits={name: _write_split(partial, name, split, dtype, shard_tokens) for name, split in checked.items()},
            source=dict(source),
        )
        (partial / MANIFEST_FILE).write_text(json.dumps(manifest.model_dump(), indent=1) + "\n", encoding="utf-8")
        _sync(partial / MANIFEST_FILE)
    return open_dataset(directory)


@contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """A directory to build in, which takes the place of `directory` at the end; after an error it is removed."""
    if has_manifest(directory):
        raise ConfigError(f"{directory}: there is a data set already: delete it or choose another directory")
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        # Never cleared by us: a path typed wrongly may be somebody's home.
        raise ConfigError(f"{directory}: not empty and not a data set: choose another directory or empty this one")
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        _sync(partial)
        partial.rename(directory)
        _sync(directory.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _check_documents(
    split: str, documents: Iterable[Tokens], vocab_size: int, end_of_document: int | None
) -> Iterator[npt.NDArray[np.integer[Any]]]:
    for number, document in enumerate(documents):
        tokens = np.asarray(document)
        if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(f"split {split}, document {number}: token ids must be whole numbers, not {tokens.dtype}")
        outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if outside.size:
            raise DataError(
                f"split {split}, document {number}: token id {outside[0]} is outside the tokenizer's {vocab_size} "
                "entries: tokenise with the tokenizer that is stored"
            )
        if end_of_document is not None and (not tokens.size or tokens[-1] != end_of_document):
            raise DataError(f"split {split}, document {number}: must end with the end-of-document id {end_of_document}")
        yield tokens


def _write_split(
    partial: Path, name: str, documents: Iterator[npt.NDArray[np.integer[Any]]], dtype: np.dtype[Any], shard_tokens: int
) -> SplitRecord:
    shards: list[_Shard] = []
    for tokens in documents:
        if not shards or shards[-1].tokens >= shard_tokens:
            if shards:
                shards[-1].close()
            shards.append(_Shard(partial / f"{name}-{len(shards):05d}"))
        shards[-1].write(tokens.astype(dtype))
    if shards:
        shards[-1].close()

    records = []
    for index, shard in enumerate(shards):
        path = shard.path.rename(partial / f"{name}-{index:05d}-of-{len(shards):05d}.arrayrecord")
        records.append(ShardRecord(**_describe(path), documents=len(shard.lengths), tokens=shard.tokens))

    lengths_path = partial / f"{name}-lengths.npy"
    np.save(lengths_path, np.fromiter(itertools.chain.from_iterable(shard.lengths for shard in shards), np.int32))
    return SplitRecord(
        documents=sum(record.documents for record in records),
        tokens=sum(record.tokens for record in records),
        lengths=FileRecord(**_describe(lengths_path)),
        shards=tuple(records),
    )


class _Shard:
    """One ArrayRecord file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = 0
        self.lengths: list[int] = []
        # With one record in a group, reading one document decompresses only that document.
        self._writer = ArrayRecordWriter(str(path), "group_size:1")

    def write(self, tokens: npt.NDArray[Any]) -> None:
        with self._told():
            self._writer.write(tokens.tobytes())
        self.lengths.append(len(tokens))
        self.tokens += len(tokens)

    def close(self) -> None:
        with self._told():
            self._writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise DataError(f"{self.path}: can't be written: {error}") from None


def _describe(path: Path) -> dict[str, Any]:
    """The fields of a `FileRecord`, after the file has reached the disk."""
    _sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
