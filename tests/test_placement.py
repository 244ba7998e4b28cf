import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.placement import Placement, local_rows
from tests.runs import make_layout

MESHES = [{}, {"data": 8}, {"fsdp": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]


def abstract_batch(**axes: int) -> dict[str, jax.ShapeDtypeStruct]:
    layout = make_layout(**axes)
    sharding = layout.activation(("batch", "seq"), (8, 4), "batch")
    dtypes = {"tokens": jnp.int32, "weights": jnp.float32}
    return {name: jax.ShapeDtypeStruct((8, 4), dtype, sharding=sharding) for name, dtype in dtypes.items()}


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_placed_arrays_are_the_host_arrays_in_their_shards(axes: dict[str, int]) -> None:
    abstract = abstract_batch(**axes)
    host = {"tokens": np.arange(32).reshape(8, 4), "weights": np.linspace(0, 1, 32).reshape(8, 4)}
    placed = Placement(abstract)(host)
    assert placed.keys() == host.keys()
    for name, array in placed.items():
        assert array.sharding == abstract[name].sharding
        assert array.dtype == abstract[name].dtype
        np.testing.assert_array_equal(array, host[name].astype(array.dtype))
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, host[name][shard.index].astype(array.dtype))


def test_a_lone_process_needs_every_row() -> None:
    for axes in MESHES:
        assert Placement(abstract_batch(**axes)).rows.tolist() == list(range(8))


class _DevicesOfOneProcess:
    """A sharding of which this process holds only some devices."""

    def __init__(self, sharding: jax.sharding.Sharding, devices: list[jax.Device]) -> None:
        self._sharding, self._devices = sharding, devices

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[jax.Device, tuple[slice, ...]]:
        everywhere = self._sharding.devices_indices_map(shape)
        return {device: everywhere[device] for device in self._devices}


@pytest.mark.parametrize(
    ("axes", "devices", "rows"),
    [
        ({"data": 8}, range(4, 8), [4, 5, 6, 7]),
        ({"data": 2, "tensor": 4}, range(4, 8), [4, 5, 6, 7]),
        ({"tensor": 8}, range(4, 8), list(range(8))),
        ({"data": 4, "tensor": 2}, [0, 1, 6, 7], [0, 1, 6, 7]),
    ],
    ids=str,
)
def test_a_process_needs_the_rows_that_its_own_devices_hold(
    axes: dict[str, int], devices: list[int], rows: list[int]
) -> None:
    leaf = abstract_batch(**axes)["tokens"]
    mine = [jax.devices()[i] for i in devices]
    part = type("Leaf", (), {"shape": leaf.shape, "sharding": _DevicesOfOneProcess(leaf.sharding, mine)})
    assert local_rows({"tokens": part}).tolist() == rows  # type: ignore[dict-item]
