"""Host batches onto the devices: each process brings the rows that its own devices hold."""

from collections.abc import Mapping

import jax
import numpy as np


class Placement:
    """Places one process's rows of a global batch.

    Args:
        abstract_batch: the global batch's shapes and shardings; dimension 0 is rows, split alike for all arrays.
    """

    def __init__(self, abstract_batch: Mapping[str, jax.ShapeDtypeStruct]):
        self._abstract = dict(abstract_batch)
        self._shardings = {name: leaf.sharding for name, leaf in self._abstract.items()}
        self.rows = local_rows(self._abstract)
        self._shards = {name: self._local_shards(leaf) for name, leaf in self._abstract.items()}

    def __call__(self, host_batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """The global arrays, from arrays whose row i is the global row `self.rows[i]`."""
        arrays = {name: np.asarray(host_batch[name], leaf.dtype) for name, leaf in self._abstract.items()}
        if jax.process_count() == 1:
            return jax.device_put(arrays, self._shardings)
        return {name: self._assemble(name, array) for name, array in arrays.items()}

    def _assemble(self, name: str, array: np.ndarray) -> jax.Array:
        devices, indices = self._shards[name]
        shards = jax.device_put([array[index] for index in indices], devices)
        shape, sharding = self._abstract[name].shape, self._shardings[name]
        return jax.make_array_from_single_device_arrays(shape, sharding, shards)

    def _local_shards(self, leaf: jax.ShapeDtypeStruct) -> tuple[list[jax.Device], list[tuple[slice, ...]]]:
        """This process's devices, and for each the part of this process's array that it holds."""
        devices, indices = [], []
        for device, (rows, *rest) in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
            start, stop, _ = rows.indices(leaf.shape[0])
            first = int(np.searchsorted(self.rows, start))
            devices.append(device)
            indices.append((slice(first, first + stop - start), *rest))
        return devices, indices


def local_rows(abstract_batch: Mapping[str, jax.ShapeDtypeStruct]) -> np.ndarray:
    """The global row indices (i64, rising) that this process's devices hold.

    Found from the sharding, not from the process index: processes that share a data shard get the same rows.
    """
    held: set[int] = set()
    for leaf in abstract_batch.values():
        for rows, *_ in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
            held.update(range(*rows.indices(leaf.shape[0])))
    return np.array(sorted(held), np.int64)
