"""A reader of TensorBoard's event files that shares no code with the writer, and takes nothing that is damaged."""

import struct
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import Message
from tensorboardX.proto.event_pb2 import Event

Scalars = dict[str, list[tuple[int, float]]]
"""Tag to its (step, value) in the order of the files."""


def crc32c(data: bytes) -> int:
    """Castagnoli's checksum (RFC 3309), bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(crc: int) -> int:
    """As TFRecord files store a checksum."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def records(path: Path) -> Iterator[bytes]:
    """Yields the data of each record; one that is damaged or cut off fails the test."""
    content = path.read_bytes()
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        header, data, rest = content[:12], content[12 : 12 + length], content[12 + length :]
        assert struct.unpack("<I", header[8:]) == (masked(crc32c(header[:8])),)
        assert struct.unpack("<I", rest[:4]) == (masked(crc32c(data)),)
        yield data
        content = rest[4:]


def read_events(directory: Path) -> list[Message]:
    """The events of all files of a run, in the order in which TensorBoard reads them."""
    return [Event.FromString(data) for path in sorted(directory.iterdir()) for data in records(path)]


def read_scalars(directory: Path) -> Scalars:
    """Every value of every tag: one that stands twice is there twice."""
    scalars: Scalars = {}
    for event in read_events(directory):
        for value in event.summary.value:
            if value.HasField("simple_value"):
                scalars.setdefault(value.tag, []).append((event.step, value.simple_value))
    return scalars


def read_texts(directory: Path) -> list[tuple[int, str, str]]:
    """(step, tag, text) of every text."""
    return [
        (event.step, value.tag, value.tensor.string_val[0].decode())
        for event in read_events(directory)
        for value in event.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    ]
