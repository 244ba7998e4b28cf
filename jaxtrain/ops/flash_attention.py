"""Attention on GPUs by flash kernels of ours (arXiv 2205.14135): no scores are ever stored.

Packed rows cost the sum of the squares of their documents' lengths: blocks between documents, and before a window, are
passed over. Grouped query heads read the key head that they share where it lies. The kernels sit in a `shard_map` over
every mesh axis that splits their operands: outside of one, the partitioner would gather the whole global batch to every
device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jaxtrain.ops.flash_kernels import Launch, Tile, forward, key_gradients, query_gradient
from jaxtrain.ops.visibility import intervals, key_blocks, query_blocks
from jaxtrain.sharding import Layout


@dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels."""

    forward: Tile
    query_gradient: Tile
    key_gradients: Tile

    @property
    def block(self) -> int:
        """What the sequence has to be a multiple of: the largest block, as all are powers of two."""
        return max(size for tile in vars(self).values() for size in (tile.queries, tile.keys))


_NARROW = Tiles(Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3))
_TILES = {
    32: _NARROW,
    64: _NARROW,
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(32, 128, 8, 3)),
    256: Tiles(Tile(64, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 64, 8, 2)),
}
"""By head_dim. They fit the shared memory of an A100 (166,912 bytes) and spill no registers on an H100."""

ATTENTION = "attention"
"""The name by which rematerialisation may keep the output (and with it the normalisers, which are small)."""


def why_not(platform: str, dtype: jnp.dtype, length: int, head_dim: int) -> str | None:
    """Why the kernels can't compute such an attention, or None where they can."""
    if platform != "gpu":
        return f"there is no flash kernel for {platform}"
    if dtype != jnp.bfloat16:
        return f"the flash kernel multiplies {dtype} in TF32"
    if head_dim not in _TILES:
        return f"the flash kernel has no tiles for head_dim {head_dim}, only for {', '.join(map(str, _TILES))}"
    block = _TILES[head_dim].block
    if length % block:
        return f"the flash kernel takes sequences in blocks of {block}, and {length} is not a multiple"
    return None


def flash_attention(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    segments: Int[Array, "rows seq"],
    layout: Layout,
    window: int | None = None,
    tiles: Tiles | None = None,
    interpret: bool = False,
) -> Float[Array, "rows seq heads head_dim"]:
    """What `attention.causal_attention` computes, where `why_not` has no objection and documents are runs of one id.

    For the backward pass it keeps its operands unrepeated, its output, and a float32 per query and head.

    Args:
        tiles: replaces what head_dim would choose.
        interpret: runs the kernels without a GPU, for tests.
    """
    return _attend(_Settings(layout, window, tiles or _TILES[q.shape[-1]], interpret), q, k, v, segments)


@dataclass(frozen=True)
class _Settings:
    layout: Layout
    window: int | None
    tiles: Tiles
    interpret: bool

    def on_each_device(self, function: Callable[..., Any], given: str, returned: str) -> Callable[..., Any]:
        """`function` on the rows and heads that a device has of each argument and result.

        A letter says what an array is: `x` [rows, seq, heads, head_dim], `n` [rows, heads, seq], `s` [rows, seq].
        """
        batch, tensor = self.layout.batch_axes or None, self.layout.split_axes("tensor") or None
        specs = {"x": PartitionSpec(batch, None, tensor), "n": PartitionSpec(batch, tensor), "s": PartitionSpec(batch)}
        arguments, results = (tuple(specs[each] for each in letters) for letters in (given, returned))
        return self.layout.shard_map(partial(function, self), arguments, results)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: _Settings, q: Array, k: Array, v: Array, segments: Array) -> Array:
    return _forward(settings, q, k, v, segments)[0]


def _forward(settings: _Settings, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, tuple[Array, ...]]:
    # Outside of the shard_map, what is kept here and what the caller gets is one array, so remat keeps it once.
    out, lse = settings.on_each_device(_forward_here, "xxxs", "xn")(q, k, v, segments)
    out, lse = checkpoint_name(out, ATTENTION), checkpoint_name(lse, ATTENTION)
    return out, (q, k, v, segments, out, lse)


def _backward(settings: _Settings, kept: tuple[Array, ...], gradient: Array) -> tuple[Array | None, ...]:
    return (*settings.on_each_device(_backward_here, "xxxsxnx", "xxx")(*kept, gradient), None)


_attend.defvjp(_forward, _backward)


def _forward_here(settings: _Settings, q: Array, k: Array, v: Array, segments: Array) -> tuple[Array, Array]:
    tile = settings.tiles.forward
    first_key = intervals(segments, settings.window).first_key
    visit = key_blocks(first_key, tile.queries, tile.keys)
    return forward(q, k, v, first_key, visit, Launch(tile, settings.interpret))


def _backward_here(
    settings: _Settings, q: Array, k: Array, v: Array, segments: Array, out: Array, lse: Array, gradient: Array
) -> tuple[Array, Array, Array]:
    delta = (out.astype(jnp.float32) * gradient.astype(jnp.float32)).sum(-1).swapaxes(1, 2)
    operands = (q, k, v, gradient, lse, delta)
    first_key, last_query = intervals(segments, settings.window)
    tile = settings.tiles.query_gradient
    visit = key_blocks(first_key, tile.queries, tile.keys)
    dq = query_gradient(*operands, first_key, visit, Launch(tile, settings.interpret))
    tile = settings.tiles.key_gradients
    visit = query_blocks(last_query, tile.keys, tile.queries)
    dk, dv = key_gradients(*operands, last_query, visit, Launch(tile, settings.interpret))
    return dq, dk, dv
