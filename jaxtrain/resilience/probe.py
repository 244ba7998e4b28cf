"""A short computation whose answer is known, on each device of this process: is it right, and how long does it take?

Matrix products in bfloat16, float32 and int32, and words that go through memory. Operands are whole numbers so small
that no sum is ever rounded, and the one product of other floats is rounded once, as IEEE 754 says: so the bits of
every result, and their checksum, are the same on every kind of device, whatever algorithm a library picks and in
whatever order it adds. A device is judged by itself, in its first second; nobody has to be in the majority.
"""

import functools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from jaxtrain.executables import compile_or_load

PARTS = ("bfloat16 product", "float32 product", "int32 product", "memory")
DEPTH = 256
"""Terms of each sum: of products of two numbers from -128 to 127, all sums are below 2²² and exact in float32."""
REPEATS = 3
SEED = 0x6A617874


@dataclass(frozen=True)
class Size:
    """How much is computed: about 5 ms on one core, or on a GPU.

    Attributes:
        rows: of both factors of the floating-point products; the int32 product has `DEPTH`.
        words: that go through memory, 4 bytes each: more than a cache of this kind of device holds.
        rounds: how often, in one program.
        answer: the checksum of each part.
    """

    rows: int
    words: int
    rounds: int
    answer: tuple[int, int, int, int]


SMALL = Size(rows=256, words=2**18, rounds=3, answer=(0xEB632058, 0x17E11744, 0x80CD3201, 0xA533461B))
LARGE = Size(rows=4096, words=2**25, rounds=8, answer=(0x164F6C85, 0x708E7398, 0x80CD3201, 0x96FAAEBA))


@dataclass(frozen=True)
class Result:
    """What one device gave.

    Attributes:
        seconds: the median of the repeats, from dispatch to the end on the device.
        wrong: the parts whose checksum is not the known one.
    """

    seconds: float
    wrong: tuple[str, ...] = ()


class Probe:
    """The computation, compiled for some devices of this process, which are probed one after the other.

    One at a time, since virtual devices share their processor's cores.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self._programs = [_compiled(device) for device in devices]

    def __call__(self, repeats: int = REPEATS) -> list[Result]:
        """Waits for the devices; the loop must have nothing in flight on them, or its step is timed too."""
        return [_run(program, repeats) for program in self._programs]


def size_for(platform: str) -> Size:
    """What fits a kind of device."""
    return SMALL if platform == "cpu" else LARGE


def checksums(size: Size, seed: Array) -> UInt32[Array, "parts"]:
    """The sum of each part, in the order of `PARTS`."""
    rows = (size.rows, DEPTH)
    square = (DEPTH, DEPTH)

    def small(salt: int, dtype: Any) -> Array:
        return ((_words(seed, rows, salt) & 0xFF) - 128).astype(dtype)

    results = [
        _product(small(1, jnp.bfloat16), small(2, jnp.bfloat16), jnp.float32),
        _product(small(3, jnp.float32), small(4, jnp.float32), jnp.float32),
        _product(_words(seed, square, 5), _words(seed, square, 6), jnp.int32),
        _through_memory(_words(seed, (size.words,), 7)),
    ]
    return jnp.stack([_sum(_bits(result)) for result in results])


def _work(seed: Array, answer: Array, size: Size) -> UInt32[Array, "parts"]:
    """The bits of each sum that are wrong in the first round that isn't right."""

    def once(_: Any, wrong: Array) -> Array:
        # With operands that depend on the round before, no compiler can compute one round for all.
        found = checksums(size, seed + wrong.sum(dtype=jnp.uint32)) ^ answer
        return jnp.where(wrong.any(), wrong, found)

    return jax.lax.fori_loop(0, size.rounds, once, jnp.zeros(len(PARTS), jnp.uint32))


def _run(program: "_Program", repeats: int) -> Result:
    times, wrong = [], set()
    for _ in range(repeats):
        began = time.perf_counter()
        bits = program.work(*program.operands)
        bits.block_until_ready()
        times.append(time.perf_counter() - began)
        wrong |= {part for part, differs in zip(PARTS, jax.device_get(bits), strict=True) if differs}
    return Result(statistics.median(times), tuple(part for part in PARTS if part in wrong))


@dataclass(frozen=True)
class _Program:
    work: Any
    operands: tuple[Array, Array]


@functools.cache
def _compiled(device: jax.Device) -> _Program:
    """For a device, once in a process."""
    size = size_for(device.platform)
    seed, answer = jnp.uint32(SEED), jnp.array(size.answer, jnp.uint32)
    operands = jax.device_put((seed, answer), device)
    work = compile_or_load(jax.jit(functools.partial(_work, size=size)).lower(*operands), [device])
    jax.block_until_ready(work(*operands))  # the first call of a program takes longer
    return _Program(work, operands)


def _product(left: Array, right: Array, result: Any) -> Array:
    contracting = (((1,), (1,)), ((), ()))
    highest = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(left, right, contracting, precision=highest, preferred_element_type=result)


def _through_memory(words: Array) -> Array:
    """Written, then read from both ends: each word as a float from 1 to 2, times its partner."""
    written = _bits(jax.lax.optimization_barrier(words))
    fraction = (written >> 9) | jnp.uint32(0x3F800000)
    floats = jax.lax.bitcast_convert_type(fraction, jnp.float32)
    return floats * floats[::-1]


def _words(seed: Array, shape: tuple[int, ...], salt: int) -> Array:
    """Numbers that look random, as int32."""
    words = _mix(_index(shape) * jnp.uint32(0x9E3779B1) + seed + jnp.uint32(salt))
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def _sum(bits: Array) -> Array:
    """Bits and place of each number, mixed and added: no order of addition changes it, and no single bit is lost."""
    return _mix(bits ^ (_index(bits.shape) * jnp.uint32(0x85EBCA77))).sum(dtype=jnp.uint32)


def _bits(numbers: Array) -> Array:
    return jax.lax.bitcast_convert_type(numbers, jnp.uint32)


def _index(shape: tuple[int, ...]) -> Array:
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def _mix(x: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
