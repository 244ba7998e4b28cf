"""Reading the documents of a unit, a piece of text at a time, whatever their files look like."""

import codecs
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxtrain.data.prepare.sources import Part, SourceFile, Unit
from jaxtrain.errors import ConfigError, first_line

PIECE_CHARACTERS = 1 << 20
"""A longer text is tokenised in pieces, so that memory stays bounded; each ends with a line where it has one."""

_ROWS_AT_ONCE = 1000


class Piece(NamedTuple):
    """A piece of a document; the document is the `position`-th of the file called `file`.

    `text` is None where the document can't be read and is passed over; that is its only piece.
    """

    file: str
    position: int
    text: str | None
    last: bool


class _Invalid(Exception):
    """A document that can't be read; the message says where and why."""


def read_unit(unit: Unit, text_key: str, skip_invalid: bool) -> Iterator[Piece]:
    """The documents of a unit in order, each as one piece or several.

    Args:
        text_key: the column of Parquet files and the key of JSON Lines that holds the text.
        skip_invalid: pass over what isn't UTF-8, JSON, or an object with text under that key, instead of refusing it.

    Raises:
        ConfigError: a file can't be read, changed since it was found, or holds something invalid; names file and line.
    """
    for part in unit.parts:
        part.file.refuse_if_changed()
        with _told(part.file):
            yield from _READERS[part.file.kind](part, text_key, skip_invalid)
        part.file.refuse_if_changed()


@contextmanager
def _told(file: SourceFile) -> Iterator[None]:
    try:
        yield
    except _Invalid as error:
        raise ConfigError(f"{error}; mend it, or pass over such documents with --skip-invalid") from None
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{file.path}: can't be read: {first_line(error)}") from None


def split_text(chunks: Iterable[str], most: int = PIECE_CHARACTERS) -> Iterator[tuple[str, bool]]:
    """The same text in pieces of at most `most` characters, each with whether it is the last one.

    Where the text is cut depends on the text alone: after the last line end, or else the last space, or else anywhere.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > most:
            cut = held.rfind("\n", 0, most) + 1 or held.rfind(" ", 0, most) + 1 or most
            yield held[:cut], False
            held = held[cut:]
    yield held, True


def _read_text(part: Part, text_key: str, skip_invalid: bool) -> Iterator[Piece]:
    try:
        if skip_invalid:  # read twice, since what is wrong may come after pieces that would be used by then
            for _ in _decoded(part.file):
                pass
        for text, last in split_text(_decoded(part.file)):
            yield Piece(part.file.name, 0, text, last)
    except _Invalid:
        if not skip_invalid:
            raise
        yield Piece(part.file.name, 0, None, True)


def _decoded(file: SourceFile) -> Iterator[str]:
    """The text of a file, a mebibyte at a time."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = 0
    with _opened(file) as stream:
        while True:
            content = stream.read(PIECE_CHARACTERS)
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                line = _line_of(file, done + error.start)
                raise _Invalid(f"{file.path}:{line}: not UTF-8 ({error.reason})") from None
            yield text.removeprefix("\ufeff") if done == 0 else text
            if not content:
                return
            done = stream.tell() - len(decoder.getstate()[0])


def _read_json_lines(part: Part, text_key: str, skip_invalid: bool) -> Iterator[Piece]:
    file = part.file
    with _opened(file) as stream:
        position = part.start
        if position:
            stream.seek(position - 1)
            position += len(stream.readline()) - 1  # the rest of a line that begins in the part before
        while file.compressed or position < part.stop:
            line = stream.readline()
            if not line:
                return
            start, position = position, position + len(line)
            if not line.strip():
                continue
            try:
                text = _text_of(line, text_key)
            except _Invalid as error:
                if not skip_invalid:
                    raise _Invalid(f"{file.path}:{_line_of(file, start)}: {error}") from None
                yield Piece(file.name, start, None, True)
                continue
            yield from (Piece(file.name, start, piece, last) for piece, last in split_text([text]))


def _text_of(line: bytes, key: str) -> str:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _Invalid(f"not UTF-8 ({error.reason})") from None
    except (ValueError, RecursionError) as error:
        raise _Invalid(f"not JSON, of which each line must be one object ({first_line(error)})") from None
    if not isinstance(record, dict):
        raise _Invalid("not a JSON object: each line must be one, with the text under a key")
    if key not in record:
        raise _Invalid(f"has no key {key!r}; there are {', '.join(record) or 'none'}: choose one with --text-key")
    return _checked(record[key], key)


def _read_parquet(part: Part, text_key: str, skip_invalid: bool) -> Iterator[Piece]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = part.file
    groups = list(range(part.start, part.stop))
    try:
        with pq.ParquetFile(file.path) as parquet:
            row = sum(parquet.metadata.row_group(number).num_rows for number in range(part.start))
            for batch in parquet.iter_batches(_ROWS_AT_ONCE, groups, [text_key], use_threads=False):
                for value in batch.column(0):
                    try:
                        text = _checked(value.as_py(), text_key)
                    except (_Invalid, UnicodeDecodeError) as error:
                        if not skip_invalid:
                            raise _Invalid(f"{file.path}: row {row}: {first_line(error)}") from None
                        yield Piece(file.name, row, None, True)
                    else:
                        yield from (Piece(file.name, row, piece, last) for piece, last in split_text([text]))
                    row += 1
    except pa.ArrowException as error:
        raise ConfigError(f"{file.path}: damaged: {first_line(error)}") from None


_READERS = {"text": _read_text, "jsonl": _read_json_lines, "parquet": _read_parquet}


def _checked(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise _Invalid(f"{key!r} holds {json.dumps(value, default=str)[:40]}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:  # JSON can spell half of a character
        raise _Invalid(f"{key!r} holds a lone surrogate, which is no text") from None
    return value


def _opened(file: SourceFile) -> IO[bytes]:
    return open_maybe_compressed(file.path, file.compressed)


def open_maybe_compressed(path: Path, compressed: bool) -> IO[bytes]:
    """The bytes of a file, decompressed where it is."""
    if compressed:
        return io.BufferedReader(gzip.open(path))
    return path.open("rb")


def _line_of(file: SourceFile, position: int) -> int:
    """The number, from 1, of the line that holds a byte."""
    lines, left = 1, position
    with _opened(file) as stream:
        while left > 0 and (content := stream.read(min(left, 1 << 20))):
            lines += content.count(b"\n")
            left -= len(content)
    return lines
