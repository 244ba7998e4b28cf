"""Writing a data set so that it is complete or absent."""

import io
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from jaxtrain.errors import ConfigError, DataError, first_line

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
        ConfigError: `directory` already holds something, or can't be written.
        DataError: an id is outside the tokenizer's, or a document doesn't end as it should.
    """
    directory = Path(directory).absolute()
    vocab_size = id_bound(tokenizer)
    dtype = np.dtype(token_dtype(vocab_size)).newbyteorder("<")
    checked = {split: _check_documents(split, each, vocab_size, end_of_document) for split, each in splits.items()}
    with exclusive(directory), _complete_or_absent(directory) as partial:
        (partial / TOKENIZER_FILE).write_text(tokenizer.to_str(), encoding="utf-8")
        records = {split: _write_split(partial, split, each, dtype, shard_tokens) for split, each in checked.items()}
        write_manifest(partial, vocab_size, end_of_document, records, source)
    return open_dataset(directory)


def id_bound(tokenizer: "Tokenizer") -> int:
    """The largest id of a tokenizer, plus one: there may be gaps below."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values())) + 1


def token_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The type that holds every id of such a tokenizer."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_manifest(
    directory: Path,
    vocab_size: int,
    end_of_document: int | None,
    splits: Mapping[str, SplitRecord],
    source: Mapping[str, Any],
) -> None:
    """Describes the files that stand in `directory`, its tokenizer among them, and brings them to the disk."""
    tokenizer = TokenizerRecord(
        **describe(directory / TOKENIZER_FILE), vocab_size=vocab_size, end_of_document=end_of_document
    )
    manifest = Manifest(
        token_dtype=token_dtype(vocab_size), tokenizer=tokenizer, splits=dict(splits), source=dict(source)
    )
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest.model_dump(), indent=1) + "\n", encoding="utf-8")
    sync(directory / MANIFEST_FILE)
    sync(directory)


def put_in_place(built: Path, directory: Path) -> None:
    """Lets a complete directory take the place of one that is absent or empty."""
    built.rename(directory)
    sync(directory.parent)


def refuse_occupied(directory: Path) -> None:
    """Raises ConfigError where `directory` holds a data set or anything else."""
    if has_manifest(directory):
        raise ConfigError(f"{directory}: there is a data set already: delete it or choose another directory")
    if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
        # Never cleared by us: a path typed wrongly may be somebody's home.
        raise ConfigError(f"{directory}: not empty and not a data set: choose another directory or empty this one")


@contextmanager
def _complete_or_absent(directory: Path) -> Iterator[Path]:
    """A directory to build in, which takes the place of `directory` at the end; after an error it is removed."""
    refuse_occupied(directory)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        put_in_place(partial, directory)
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
    shards: list[ShardWriter] = []
    for tokens in documents:
        if not shards or shards[-1].tokens >= shard_tokens:
            if shards:
                shards[-1].close()
            shards.append(ShardWriter(partial / f"{name}-{len(shards):05d}"))
        shards[-1].write(tokens.astype(dtype))
    if shards:
        shards[-1].close()

    records = []
    for index, shard in enumerate(shards):
        path = shard.path.rename(partial / shard_file(name, index, len(shards)))
        records.append(ShardRecord(**describe(path), documents=len(shard.lengths), tokens=shard.tokens))

    lengths_path = partial / f"{name}-lengths.npy"
    lengths = itertools.chain.from_iterable(shard.lengths for shard in shards)
    save_array(lengths_path, np.fromiter(lengths, np.int32))
    return SplitRecord(
        documents=sum(record.documents for record in records),
        tokens=sum(record.tokens for record in records),
        lengths=FileRecord(**describe(lengths_path)),
        shards=tuple(records),
    )


def shard_file(split: str, number: int, count: int) -> str:
    """The name of a shard."""
    return f"{split}-{number:05d}-of-{count:05d}.arrayrecord"


class ShardWriter:
    """One ArrayRecord file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens = 0
        self.lengths: list[int] = []
        # With one record in a group, reading one document decompresses only that document.
        self._writer = ArrayRecordWriter(str(path), "group_size:1")

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """Appends a document."""
        with self._told():
            self._writer.write(tokens.tobytes())
        self.lengths.append(len(tokens))
        self.tokens += len(tokens)

    def close(self) -> None:
        """Completes the file."""
        with self._told():
            self._writer.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ConfigError(
                f"{self.path}: can't be written: {first_line(error)}; free some space or choose another directory"
            ) from None


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """`np.save`, but on a full disk the error says so: numpy's own has no reason."""
    content = io.BytesIO()
    np.save(content, array)
    path.write_bytes(content.getbuffer())


def describe(path: Path) -> dict[str, Any]:
    """The fields of a `FileRecord`, after the file has reached the disk."""
    sync(path)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def sync(path: Path) -> None:
    """Waits until a file's content, or a directory's entries, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
