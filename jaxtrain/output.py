"""What a run shows is for whoever looks: nobody looking any more must not end it."""

import contextlib
import io
import os
import sys
from collections.abc import Collection, Sequence
from typing import TextIO


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Rows of text as columns two spaces apart, as wide as they need; the columns numbered in `right` end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if i in right else text.ljust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines) + "\n"


def size_text(count: int) -> str:
    """Bytes in the largest unit that leaves a whole one."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.1f} {unit}"
    return f"{count} B"


def write_once(text: str, stream: TextIO | None = None) -> None:
    """Shows on stdout, or on `stream`, what all processes of a group computed: only the first of them does, at once."""
    import jax

    if jax.process_index() == 0:
        stream = sys.stdout if stream is None else stream
        stream.write(text)
        stream.flush()


class _Optional(io.TextIOWrapper):
    """A text stream that goes quiet where nothing can be written any more, such as to `| head` once it has ended."""

    def write(self, text: str, /) -> int:
        try:
            return super().write(text)
        except OSError:
            self._go_quiet()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError:
            self._go_quiet()

    def _go_quiet(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        with contextlib.suppress(OSError):
            super().flush()


def outlive_the_terminal() -> None:
    """From here on no write to stdout or stderr raises, whether the stream is closed, full, or can't show a letter."""
    for descriptor in range(3):
        _occupy(descriptor)
    sys.stdout = _optional(sys.stdout, 1)
    sys.stderr = _optional(sys.stderr, 2)


def _occupy(descriptor: int) -> None:
    """Where a standard stream was closed, the next file that is opened would get its number, and all that is shown."""
    try:
        os.fstat(descriptor)
    except OSError:
        nowhere = os.open(os.devnull, os.O_RDWR)
        if nowhere != descriptor:
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _optional(stream: TextIO | None, descriptor: int) -> TextIO:
    return _Optional(
        os.fdopen(descriptor, "wb", closefd=False),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace",
        line_buffering=descriptor == 2 or (stream is not None and stream.isatty()),
    )
