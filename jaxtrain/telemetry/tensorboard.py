"""`RUN/tensorboard/`: the same numbers as the JSON files, as TensorBoard reads them.

Importing this takes a moment: import it only where such files are written.
"""

import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def _pretending_absent(*modules: str) -> Iterator[None]:
    """Importing one of these fails inside, as it does where it isn't installed; those that are imported stay."""
    absent = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None is Python's own way to say so
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]


with _pretending_absent("torch", "comet_ml"):  # tensorboardX would take seconds to import them, for nothing used here
    from google.protobuf.message import DecodeError
    from tensorboardX.proto.event_pb2 import Event, SessionLog
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import masked_crc32c
    from tensorboardX.summary import text

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")


class TensorBoardWriter:
    """Writes one event file a start, and cuts out of those of earlier starts what a resumed run will repeat.

    Each event is handed to the operating system as it comes, so that it outlives a killed process. It is not
    tensorboardX's own writer, whose thread dies on a full disk, whereupon the training waits for it for ever.

    A write that fails is a warning and the end of this file: the JSON files have the numbers too.
    """

    def __init__(self, directory: Path, resume_step: int, config: str):
        """Keeps what earlier starts wrote up to and with `resume_step`; nothing at 0, a new start.

        Args:
            config: the text to show as the run's config from the next step on.

        Raises:
            OSError: `directory` can't be written.
        """
        directory.mkdir(parents=True, exist_ok=True)
        drop_steps_after(directory, resume_step)
        self.path = _next_file(directory)
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        first = resume_step + 1
        self._append(file_version="brain.Event:2")
        # Tells a TensorBoard that is open to forget what it has read of these steps.
        self._append(step=first, session_log=SessionLog(status="START"))
        indented = "".join(f"    {line}\n" for line in config.splitlines())
        self._append(step=first, summary=text("config", indented))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """The values of one step by tag; the part of a tag before its first `/` is the group that shows it."""
        scalars = [Summary.Value(tag=tag, simple_value=float(value)) for tag, value in values.items()]
        self._append(step=step, summary=Summary(value=scalars))

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, **fields: Any) -> None:
        if self._file is None:
            return
        record = _record(Event(wall_time=time.time(), **fields).SerializeToString())
        try:
            if os.write(self._file, record) == len(record):
                return
            problem = "no space left"
        except OSError as error:
            problem = error.strerror or str(error)
        self.close()
        _log.warning(
            "%s: can't be written (%s); TensorBoard won't show this start's later steps, the JSON files have them",
            self.path,
            problem,
        )


def drop_steps_after(directory: Path, step: int) -> None:
    """Cuts the events after `step` out of all event files, and everything at 0.

    A file belongs to one start, whose steps only rise, so it is the end of a file that goes, or all of it. The end goes
    too from where a crash or a disk damaged the file: no reader gets past that.
    """
    for path in event_files(directory):
        kept, in_use = 0, False
        for end, event in _events_with_ends(path) if step else ():
            if event.step > step:
                break
            kept, in_use = end, in_use or event.HasField("summary")
        if not in_use:
            path.unlink()
        elif kept < path.stat().st_size:
            os.truncate(path, kept)


def event_files(directory: Path) -> list[Path]:
    """The event files in the order in which they were begun, which is the one TensorBoard reads them in."""
    return sorted(directory.glob("events.out.tfevents.*"))


def _record(data: bytes) -> bytes:
    """Length, its checksum, the data, their checksum."""
    length = _LENGTH.pack(len(data))
    return b"".join([length, _CHECKSUM.pack(masked_crc32c(length)), data, _CHECKSUM.pack(masked_crc32c(data))])


def _events_with_ends(path: Path) -> Iterator[tuple[int, Event]]:
    """Yields the events before the first damage, each with the position where its record ends.

    The checksum of the data is not computed: in Python, that would take minutes of a long run.
    """
    with path.open("rb") as file:
        while len(header := file.read(_LENGTH.size + _CHECKSUM.size)) == _LENGTH.size + _CHECKSUM.size:
            length, check = header[: _LENGTH.size], header[_LENGTH.size :]
            if _CHECKSUM.unpack(check)[0] != masked_crc32c(length):
                return
            data = file.read(_LENGTH.unpack(length)[0])
            if len(data) < _LENGTH.unpack(length)[0] or len(file.read(_CHECKSUM.size)) < _CHECKSUM.size:
                return
            try:
                event = Event.FromString(data)
            except DecodeError:
                return
            yield file.tell(), event


def _next_file(directory: Path) -> Path:
    """A name that sorts after those that are there, whatever this machine's clock says."""
    begun = [path.name.split(".")[3] for path in event_files(directory)]
    newest = max((int(number) for number in begun if number.isdecimal()), default=0)
    return directory / f"events.out.tfevents.{max(int(time.time()), newest + 1):010d}.{socket.gethostname()}"
