"""The checksum sees every bit and no layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxtrain.checkpoint.checksum import as_text, content_sums
from tests.runs import make_layout

SHAPE = (16, 8, 4)
DTYPES = ["float32", "bfloat16", "int32", "uint8"]


def bits(dtype: str, seed: int = 0) -> np.ndarray:
    """Random bytes seen as `dtype`."""
    random = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    return random.integers(0, 256, (*SHAPE, kind.itemsize), np.uint8).view(kind)[..., 0]


def checksum(value: Any) -> str:
    return as_text(jax.device_get(jax.jit(content_sums)({"leaf": value})))["leaf"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({"fsdp": 8}, PartitionSpec("fsdp")),
        ({"fsdp": 8}, PartitionSpec(None, "fsdp")),
        ({"data": 2, "fsdp": 2, "tensor": 2}, PartitionSpec("fsdp", "tensor")),
        ({"data": 2, "fsdp": 2, "tensor": 2}, PartitionSpec(("data", "fsdp"), None, "tensor")),
    ],
)
def test_every_sharding_gives_the_same_checksum(dtype: str, sizes: dict[str, int], spec: PartitionSpec) -> None:
    value = bits(dtype)
    sharded = jax.device_put(value, NamedSharding(make_layout(**sizes).mesh, spec))
    assert checksum(sharded) == checksum(jax.device_put(value, jax.devices()[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_changes_the_checksum(dtype: str) -> None:
    value = bits(dtype)
    width = 8 * value.dtype.itemsize
    sums = {checksum(value)}
    for element, bit in [(0, 0), (0, width - 1), (255, width // 2), (511, 0), (511, width - 1)]:
        flipped = value.copy().reshape(-1, 1).view(np.uint8)
        flipped[element, bit // 8] ^= 1 << bit % 8
        sums.add(checksum(flipped.view(value.dtype).reshape(SHAPE)))
    assert len(sums) == 6


def test_swapped_elements_change_the_checksum() -> None:
    value = bits("float32")
    swapped = value.copy()
    swapped[0, 0, 0], swapped[7, 3, 1] = value[7, 3, 1], value[0, 0, 0]
    assert checksum(swapped) != checksum(value)


def test_lost_signs_change_the_checksum() -> None:
    value = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    assert len({checksum(value), checksum(-value), checksum(np.abs(value))}) == 3


def test_a_moved_row_changes_the_checksum() -> None:
    value = bits("float32")
    assert checksum(np.roll(value, 1, axis=0)) != checksum(value)


def test_scalars_and_truth_values_have_checksums_of_their_own() -> None:
    sums = {checksum(jnp.int32(number)) for number in range(4)}
    assert len(sums) == 4
    assert checksum(np.array([True, False])) != checksum(np.array([False, True]))


def test_each_leaf_has_its_sum_under_its_path() -> None:
    tree = {"params": {"embed": jnp.ones(3)}, "step": jnp.int32(2)}
    assert sorted(content_sums(tree)) == ["params.embed", "step"]


def test_no_copy_of_a_leaf_is_needed() -> None:
    leaf = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    memory = jax.jit(content_sums).lower({"leaf": leaf}).compile().memory_analysis()
    assert memory.temp_size_in_bytes < leaf.size
