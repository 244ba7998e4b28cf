"""Files that are written whole or not at all: a reader, or a crash at any moment, finds the old one or the new one."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes its name when the block has ended well, and is on the disk then; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_bytes(path: Path, content: bytes) -> None:
    """Writes a whole file."""
    with replacing(path) as file:
        file.write(content)


def replace_file(path: Path, text: str) -> None:
    """Writes a whole file of text."""
    replace_bytes(path, text.encode())


def replace_json(path: Path, value: Any) -> None:
    """Writes a whole file of JSON.

    Raises:
        ValueError: a number is NaN or infinite, which JSON has not.
    """
    replace_file(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """What a file of one JSON value holds.

    Raises:
        OSError: it can't be read.
        ValueError: it isn't JSON, or nested deeper than can be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("too deeply nested") from error
