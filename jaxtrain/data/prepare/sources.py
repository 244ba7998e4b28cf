"""Which files a data set is made from, and how their reading is divided into units of work."""

import glob
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxtrain.errors import ConfigError, first_line

JSON_LINES = (".jsonl", ".ndjson", ".json")
PARQUET = ".parquet"
UNIT_BYTES = 1 << 25
MOST_UNITS = 4096

Kind = Literal["text", "jsonl", "parquet"]


@dataclass(frozen=True)
class SourceFile:
    """A file of documents.

    Attributes:
        name: how it is called below its SOURCE: the same wherever the SOURCE lies.
        bytes: its size when it was found.
        modified: its time of modification then, in nanoseconds.
    """

    path: Path
    name: str
    bytes: int
    modified: int

    @property
    def compressed(self) -> bool:
        return self.path.name.lower().endswith(".gz")

    @property
    def kind(self) -> Kind:
        """By its name: Parquet, JSON Lines, or else plain text, which is one document."""
        name = self.path.name.lower().removesuffix(".gz")
        return "parquet" if name.endswith(PARQUET) else "jsonl" if name.endswith(JSON_LINES) else "text"

    def refuse_if_changed(self) -> None:
        """Raises ConfigError where the file is another one than was found."""
        try:
            now = self.path.stat()
        except OSError as error:
            raise ConfigError(f"{self.path}: gone while it was prepared ({error.strerror}): run it again") from None
        if (now.st_size, now.st_mtime_ns) != (self.bytes, self.modified):
            raise ConfigError(f"{self.path}: changed while it was prepared: run it again when nothing writes to it")


@dataclass(frozen=True)
class Part:
    """What of a file belongs to a unit: of JSON Lines the lines that begin at bytes `start` to `stop`, of Parquet the
    row groups `start` to `stop`, of everything else all."""

    file: SourceFile
    start: int
    stop: int


@dataclass(frozen=True)
class Unit:
    """A piece of work: read and tokenised by one process, and kept when the preparation is killed."""

    number: int
    parts: tuple[Part, ...]
    bytes: int

    @property
    def identity(self) -> list[list[str | int]]:
        """What the unit's result depends on: the same files, unchanged, in the same parts."""
        return [[part.file.name, part.file.bytes, part.file.modified, part.start, part.stop] for part in self.parts]


def find_files(sources: Sequence[str], output: Path | None = None) -> list[SourceFile]:
    """The files of these files, folders and globs, each once, in the order of their names.

    A folder gives every file below it, and a glob every match, whose path has no part that begins with a dot.

    Args:
        output: the data set that is made of them. It may lie in one of them: what it has there, finished or not, is
            left out, so that the same command finds the same files again.

    Raises:
        ConfigError: a source gives no file, or one that can't be read.
    """
    found: dict[str, tuple[Path, str]] = {}
    for source in sources:
        files = [(path, name) for path, name in _files_of(source) if output is None or not _is_of(output, path)]
        if not files:
            raise ConfigError(
                f"{source}: matches no file; name files, folders, or a glob in quotes such as 'text/*.jsonl'"
            )
        for path, name in files:
            found.setdefault(os.path.realpath(path), (path, name))
    seen: Counter[str] = Counter()
    named = []
    for path, name in sorted(found.values(), key=lambda entry: entry[1]):
        seen[name] += 1
        named.append(source_file(path, name if seen[name] == 1 else f"{name}#{seen[name]}"))
    return named


def _is_of(output: Path, path: Path) -> bool:
    """Whether a file belongs to a data set, or to one that is being prepared (see `job`)."""
    made, real = os.path.realpath(output.expanduser()), os.path.realpath(path)
    return real == f"{made}.lock" or real.startswith((f"{made}{os.sep}", f"{made}.unfinished{os.sep}"))


def source_file(path: Path, name: str) -> SourceFile:
    """The file as it is now.

    Raises:
        ConfigError: it can't be read, or not twice.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(
                f"{path}: is a pipe or a device, and sources are read twice; write what it gives to a file"
            )
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from None
    return SourceFile(path, name, status.st_size, status.st_mtime_ns)


def _files_of(source: str) -> Iterator[tuple[Path, str]]:
    path = Path(source).expanduser()
    if path.is_dir():
        yield from _files_below(path)
    elif path.exists():
        yield path, path.name
    elif magic := [part for part in path.parts if glob.has_magic(part)]:
        first = path.parts.index(magic[0])
        base = Path(*path.parts[:first])
        for match in base.glob(str(Path(*path.parts[first:]))):
            below = match.relative_to(base)
            if match.is_file() and not any(part.startswith(".") for part in below.parts):
                yield match, below.as_posix()


def _files_below(folder: Path) -> Iterator[tuple[Path, str]]:
    visited: set[str] = set()
    for where, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(where)
        if real in visited:  # a link to a folder around it
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            path = Path(where, name)
            if not name.startswith(".") and path.is_file():
                yield path, path.relative_to(folder).as_posix()


def plan_units(files: Iterable[SourceFile], text_key: str, unit_bytes: int | None = None) -> list[Unit]:
    """Divides the reading: a function of the files alone, whatever number of processes will work.

    Args:
        text_key: the column of Parquet files.
        unit_bytes: about the size of a unit; by default 32 MiB, or more where there would be too many of them.

    Raises:
        ConfigError: a Parquet file can't be read, or has no such column of text.
    """
    files = list(files)
    size = unit_bytes or max(UNIT_BYTES, sum(file.bytes for file in files) // MOST_UNITS)
    units: list[Unit] = []
    parts: list[Part] = []
    filled = 0
    for part, weight in (entry for file in files for entry in _parts(file, text_key, size)):
        parts.append(part)
        filled += weight
        if filled >= size:
            units.append(Unit(len(units), tuple(parts), filled))
            parts, filled = [], 0
    if parts:
        units.append(Unit(len(units), tuple(parts), filled))
    return units


def _parts(file: SourceFile, text_key: str, size: int) -> Iterator[tuple[Part, int]]:
    """The parts of a file with the bytes of each."""
    if file.kind == "parquet":
        yield from _row_groups(file, text_key, size)
    elif file.kind == "jsonl" and not file.compressed:
        for start in range(0, file.bytes, size):
            stop = min(start + size, file.bytes)
            yield Part(file, start, stop), stop - start
    else:
        yield Part(file, 0, file.bytes), file.bytes


def _row_groups(file: SourceFile, text_key: str, size: int) -> Iterator[tuple[Part, int]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file.path) as parquet:
            schema, metadata = parquet.schema_arrow, parquet.metadata
            weights = [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"{file.path}: not a Parquet file that can be read: {first_line(error)}") from None
    if text_key not in schema.names:
        raise ConfigError(
            f"{file.path}: has no column {text_key!r}; there are {', '.join(schema.names)}: choose one with --text-key"
        )
    kind = schema.field(text_key).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        texts = [
            field.name for field in schema if pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        ]
        raise ConfigError(
            f"{file.path}: column {text_key!r} holds {kind}, not text; "
            f"columns of text are {', '.join(texts) or 'none'}: choose one with --text-key"
        )
    start, filled = 0, 0
    for number, weight in enumerate(weights):
        filled += weight
        if filled >= size or number == len(weights) - 1:
            yield Part(file, start, number + 1), filled
            start, filled = number + 1, 0
