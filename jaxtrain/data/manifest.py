"""The prepared data set on disk, described by `manifest.json`, the file that is written last.

    DIRECTORY/
        manifest.json                          what is here, with sizes and checksums
        tokenizer.json                         of the `tokenizers` library
        train-00000-of-00004.arrayrecord       one document a record: token ids, little-endian, of `token_dtype`
        …
        train-lengths.npy                      int32 [documents]: tokens of each document, in the order of the records
        held_out-00000-of-00001.arrayrecord
        held_out-lengths.npy

Documents are numbered through the shards of a split in order. A directory without a manifest is no data set.
"""

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt, ValidationError

from jaxtrain.errors import ConfigError, DataError

MANIFEST_FILE = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
FORMAT_VERSION: Literal[1] = 1


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Record):
    """A file beside the manifest, its size in bytes and its checksum."""

    file: str
    bytes: NonNegativeInt
    sha256: str


class ShardRecord(FileRecord):
    """One ArrayRecord file."""

    documents: PositiveInt
    tokens: NonNegativeInt


class SplitRecord(_Record):
    """The documents of one split: `train` or `held_out`."""

    documents: NonNegativeInt
    tokens: NonNegativeInt
    lengths: FileRecord
    shards: tuple[ShardRecord, ...]


class TokenizerRecord(FileRecord):
    """The tokenizer: every id in the data is below `vocab_size`."""

    vocab_size: PositiveInt
    end_of_document: NonNegativeInt | None


class Manifest(_Record):
    """All that is known of a data set without reading it. `source` says what it was made from and how."""

    version: Literal[1] = FORMAT_VERSION
    token_dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerRecord
    splits: dict[str, SplitRecord]
    source: dict[str, Any]

    def files(self) -> list[FileRecord]:
        """Every file of the data set but the manifest itself."""
        files: list[FileRecord] = [self.tokenizer]
        for split in self.splits.values():
            files += [split.lengths, *split.shards]
        return files


def has_manifest(directory: Path) -> bool:
    """Whether `directory` holds a finished data set."""
    return (directory / MANIFEST_FILE).is_file()


def parse_manifest(directory: Path) -> tuple[Manifest, bytes]:
    """The manifest of `directory` and its bytes.

    Raises:
        ConfigError: there is no data set in `directory`.
        DataError: there is one, but the manifest is damaged or of another version.
    """
    path = directory / MANIFEST_FILE
    if not directory.is_dir():
        raise ConfigError(f"{directory}: no such directory, so no data set: prepare one, or name the right one")
    if not path.is_file():
        raise ConfigError(f"{directory}: not a prepared data set ({MANIFEST_FILE} is missing): prepare it again")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}; mend that, or name another data set") from None
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: damaged ({error}): delete {directory} and prepare it again") from None
    version = values.get("version") if isinstance(values, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: format version {version}, this jaxtrain reads version {FORMAT_VERSION}: "
            f"delete {directory} and prepare it again"
        )
    try:
        return Manifest.model_validate(values), content
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {key}: {first['msg']}: delete {directory} and prepare it again") from None
