"""The probe's answers are those of whole numbers, on every device; one bit that differs is told by its part."""

from dataclasses import replace

import jax
import numpy as np
import numpy.typing as npt
import pytest

from jaxtrain.resilience import probe
from jaxtrain.resilience.probe import DEPTH, LARGE, PARTS, SEED, SMALL, Probe, Size

Words = npt.NDArray[np.uint32]


def mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def index(*shape: int) -> Words:
    return np.arange(np.prod(shape), dtype=np.uint32).reshape(shape)


def words(salt: int, *shape: int) -> Words:
    return mix(index(*shape) * np.uint32(0x9E3779B1) + np.uint32(SEED) + np.uint32(salt))


def small(salt: int, *shape: int) -> npt.NDArray[np.float64]:
    return (words(salt, *shape) & np.uint32(0xFF)).astype(np.float64) - 128


def checksum(bits: Words) -> int:
    return int(mix(bits ^ (index(*bits.shape) * np.uint32(0x85EBCA77))).sum(dtype=np.uint32))


def answer(size: Size) -> tuple[int, ...]:
    """By whole numbers alone: float64 holds each of these sums exactly, and uint32 counts as int32 does."""
    products = [small(left, size.rows, DEPTH) @ small(left + 1, size.rows, DEPTH).T for left in (1, 3)]
    left, right = words(5, DEPTH, DEPTH), words(6, DEPTH, DEPTH)
    integers = np.stack([(row * right).sum(axis=1, dtype=np.uint32) for row in left])
    floats = ((words(7, size.words) >> np.uint32(9)) | np.uint32(0x3F800000)).view(np.float32)
    results = [*(product.astype(np.float32).view(np.uint32) for product in products), integers]
    return tuple(checksum(bits) for bits in [*results, (floats * floats[::-1]).view(np.uint32)])


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_the_known_answers_are_those_of_whole_numbers(size: Size) -> None:
    assert size.answer == answer(size)


def test_every_device_gives_the_known_answer_and_its_time() -> None:
    results = Probe(jax.devices()[:2])(repeats=1)
    assert [result.wrong for result in results] == [(), ()]
    assert all(result.seconds > 0 for result in results)


@pytest.mark.parametrize("part", range(len(PARTS)))
def test_one_bit_of_one_part_is_told_by_its_name(part: int) -> None:
    program = probe._compiled(jax.devices()[0])
    seed, known = program.operands
    flipped = known.at[part].set(known[part] ^ np.uint32(1 << 31))
    assert probe._run(replace(program, operands=(seed, flipped)), repeats=1).wrong == (PARTS[part],)
