"""Compiled programs of CPU processes other than the first, kept from start to start beside JAX's own compile cache.

JAX's cache holds what process 0 compiled, under a key that on CPUs has the process in it: without this, a restart of
several processes would wait for all but one to compile. On GPUs the key is the same everywhere, and JAX's cache serves.
"""

import contextlib
import hashlib
import logging
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.stages import Compiled, Lowered

from jaxtrain.errors import first_line
from jaxtrain.files import replace_bytes

_log = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size


def compile_or_load(lowered: Lowered, devices: Sequence[jax.Device]) -> Compiled:
    """`lowered.compile()`, or what an earlier start of this process has made of the same program.

    Args:
        devices: all that the program runs on, in the order of its mesh.
    """
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")  # as runtime.configure has set it
    wanted = os.environ.get("JAX_ENABLE_COMPILATION_CACHE") == "true"
    if not folder or not wanted or jax.process_index() == 0 or devices[0].platform != "cpu":
        return lowered.compile()
    return load_or_compile(lowered, devices, Path(folder))


def load_or_compile(lowered: Lowered, devices: Sequence[jax.Device], folder: Path) -> Compiled:
    """The executable in `folder` that was compiled from `lowered` for these devices; compiled and kept if there is
    none, or one that is torn, altered, or can't be loaded."""
    path = folder / f"{_key(lowered, devices)}.executable"
    payload = _read(path)
    if payload is not None:
        try:
            return serialize_executable.deserialize_and_load(
                payload, lowered.in_tree, lowered.out_tree, execution_devices=devices
            )
        except Exception as error:  # whatever unpickling meets, or XLA of another build
            _log.warning("%s can't be loaded and is compiled again: %s", path, first_line(error))
    with without_compile_cache():  # what was loaded from there can be run, but not be written again
        compiled = lowered.compile()
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
        replace_bytes(path, hashlib.sha256(payload).digest() + payload)
    except Exception as error:  # whatever pickling meets, such as a callback into Python, or a full disk
        _log.info("a program can't be kept, and is compiled at each start: %s", first_line(error))
    return compiled


@contextlib.contextmanager
def without_compile_cache() -> Iterator[None]:
    """Compiles inside really compile: JAX's cache can't hold programs for absent devices, and forgets their names."""
    changes = {
        "jax_persistent_cache_min_compile_time_secs": math.inf,  # nothing is written
        "jax_compilation_cache_include_metadata_in_key": True,  # nothing with other names is read
    }
    before = {name: getattr(jax.config, name) for name in changes}
    try:
        for name, value in changes.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def _key(lowered: Lowered, devices: Sequence[jax.Device]) -> str:
    """Of everything that the executable depends on: program, devices, compiler and its flags."""
    parts = (
        lowered.as_text(),
        [(device.id, device.process_index, device.device_kind) for device in devices],
        jax.process_index(),
        jax.__version__,
        jaxlib.__version__,
        devices[0].client.platform_version,
        os.environ.get("XLA_FLAGS"),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    return payload if hashlib.sha256(payload).digest() == digest else None
