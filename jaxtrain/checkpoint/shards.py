"""One process's part of a state, as a file: each array's pieces that its devices hold, with what the state is.

The file is an uncompressed `.npz`, whose members carry their own CRC-32: one that is cut or altered is noticed when it
is read. Pieces are named by the leaf and the slice of it, so they fit the same mesh alone.
"""

import json
import zipfile
from pathlib import Path
from typing import IO, Any

import jax
import numpy as np

from jaxtrain.checkpoint.meta import Meta, Unreadable, parse_meta
from jaxtrain.checkpoint.tree import from_plain, to_plain
from jaxtrain.errors import first_line
from jaxtrain.files import replacing
from jaxtrain.models.parameters import named_leaves

_META = "meta"

Pieces = dict[str, np.ndarray]
"""Copies in the host's memory, by `LEAF@START:STOP,…`."""


def copy_pieces(state: Any) -> Pieces:
    """What this process's devices hold, each piece once though several hold it; the state may be donated afterwards."""
    pieces = {
        _name(leaf_name, shard.index, leaf.shape): shard.data
        for leaf_name, leaf in named_leaves(to_plain(state)).items()
        for shard in leaf.addressable_shards
    }
    for piece in pieces.values():
        piece.copy_to_host_async()
    return {name: np.array(piece) for name, piece in pieces.items()}


def write_part(path: Path, pieces: Pieces, meta: Meta) -> None:
    """Writes the file; it is there, whole and on the disk, or not at all."""
    described = np.frombuffer(json.dumps(vars(meta)).encode(), np.uint8)
    members = {name: _storable(piece) for name, piece in pieces.items()}
    with replacing(path) as file:
        np.savez(file, **{_META: described}, **members)  # type: ignore[arg-type]


def read_part(file: Path | IO[bytes]) -> tuple[Meta, Pieces]:
    """What `write_part` wrote.

    Raises:
        Unreadable: it is missing, cut or altered.
    """
    try:
        with np.load(file) as members:
            pieces = {name: members[name] for name in members.files}
        described = pieces.pop(_META).tobytes()
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise Unreadable(f"{type(error).__name__}: {first_line(error)}") from error
    return parse_meta(described), pieces


def place_pieces(pieces: Pieces, abstract: Any) -> Any:
    """The state with the shardings of `abstract`, each device's piece from the file.

    Raises:
        Unreadable: the file was written on another mesh.
    """
    plain = to_plain(abstract)
    placed = {name: _place(name, leaf, pieces) for name, leaf in named_leaves(plain).items()}
    return from_plain(jax.tree.unflatten(jax.tree.structure(plain), list(placed.values())), abstract)


def _place(leaf_name: str, leaf: jax.ShapeDtypeStruct, pieces: Pieces) -> jax.Array:
    sharding = leaf.sharding
    assert sharding is not None, "a program's state has shardings"
    on_devices = []
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        name = _name(leaf_name, index, leaf.shape)
        if name not in pieces:
            raise Unreadable(f"it was saved on another mesh ({name} is not in it)")
        piece = pieces[name].view(leaf.dtype)
        memory = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        on_devices.append(jax.device_put(piece, memory))
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, on_devices)


def _name(leaf: str, index: Any, shape: tuple[int, ...]) -> str:
    slices = [part.indices(size) for part, size in zip(index or (), shape, strict=True)]
    return f"{leaf}@{','.join(f'{start}:{stop}' for start, stop, _ in slices)}"


def _storable(piece: np.ndarray) -> np.ndarray:
    """NumPy knows no bfloat16: its bits are stored."""
    return piece.view(f"u{piece.dtype.itemsize}") if piece.dtype.kind == "V" else piece
