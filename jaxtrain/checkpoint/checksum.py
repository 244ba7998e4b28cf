"""Checksums of a state's content that don't depend on how it is sharded.

Each element's bits are hashed together with its index, and the hashes are added modulo 2³², twice with different salts.
Addition commutes, so every mesh and process count gives the same number, computed on the devices that hold the shards.
(Bits times a hash of the index would not do: a sign bit times any odd number is 2³¹, so two lost signs would cancel.)
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from jaxtrain.models.parameters import named_leaves

_SALTS = (0x9E3779B9, 0x7F4A7C15)


def content_sums(tree: Any) -> dict[str, UInt32[Array, "2"]]:
    """Two 32-bit sums per leaf, by path name; to be traced under `jax.jit`."""
    return {name: _leaf_sums(leaf) for name, leaf in named_leaves(tree).items()}


def as_text(sums: dict[str, Array]) -> dict[str, str]:
    """The sums as 16 hexadecimal digits per leaf."""
    return {name: "".join(f"{int(part):08x}" for part in np.asarray(value)) for name, value in sums.items()}


def _leaf_sums(leaf: Array) -> UInt32[Array, "2"]:
    bits = _bits(leaf)
    index = jnp.zeros(leaf.shape, jnp.uint32)
    for axis, size in enumerate(leaf.shape):
        index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    terms = tuple(_mix(bits ^ _mix(index + jnp.uint32(salt))) for salt in _SALTS)
    # One reduction for both sums: XLA fuses it with all of the above, where a sum for each would store the terms.
    zeros = (jnp.uint32(0),) * len(terms)
    sums = jax.lax.reduce(terms, zeros, lambda x, y: tuple(map(jnp.add, x, y)), tuple(range(leaf.ndim)))
    return jnp.stack(sums)


def _bits(leaf: Array) -> Array:
    """The elements' bits as uint32; 64-bit elements can't occur, since JAX's x64 mode is off."""
    width = leaf.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[width]
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(leaf, unsigned).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """The 32-bit finaliser of MurmurHash3: a bijection, so no single change of an element is lost."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
