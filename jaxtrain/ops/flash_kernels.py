"""The three kernels of flash attention (arXiv 2205.14135, 2307.08691), in Pallas for Triton.

A program of the grid owns one block of queries (or keys) of one row and head, and loops over the blocks on the other
side that it has to visit; those that are visible whole go without a mask. Scores are float32 and in powers of two. No
two programs add to the same place, so results are the same bits in every run.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from jaxtrain.ops.visibility import Visit

_LOWEST = float(jnp.finfo(jnp.float32).min) / 2
"""A running maximum to begin with: below every score, and not infinite, so that no difference is NaN."""


@dataclass(frozen=True)
class Tile:
    """Block sizes of a kernel, the warps that work on a program, and how far loads run ahead."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched; `interpret` runs it without a GPU."""

    tile: Tile
    interpret: bool = False

    def __call__(
        self, kernel: Callable[..., None], grid: tuple[int, ...], name: str, **specs: Any
    ) -> Callable[..., Any]:
        parameters = triton.CompilerParams(num_warps=self.tile.warps, num_stages=self.tile.stages)
        launched: Callable[..., Any] = pl.pallas_call(
            kernel, grid=grid, name=name, compiler_params=parameters, interpret=self.interpret, **specs
        )
        return launched


def forward(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    first_key: Int[Array, "rows seq"],
    visit: Visit,
    launch: Launch,
) -> tuple[Float[Array, "rows seq heads head_dim"], Float[Array, "rows heads seq"]]:
    """The attention's output, and the base-2 logarithm of each query's softmax normaliser in float32."""
    specs = _QuerySpecs(q, k, launch.tile.queries)
    return launch(
        partial(_forward, tile=launch.tile),
        specs.grid,
        "flash_forward",
        in_specs=[specs.visit, specs.positions, specs.queries, specs.keys, specs.keys],
        out_specs=[specs.queries, specs.scalars],
        out_shape=[jax.ShapeDtypeStruct(q.shape, q.dtype), _scalars(q)],
    )(jnp.stack(visit, -1), first_key, q, k, v)


def query_gradient(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    gradient: Float[Array, "rows seq heads head_dim"],
    lse: Float[Array, "rows heads seq"],
    delta: Float[Array, "rows heads seq"],
    first_key: Int[Array, "rows seq"],
    visit: Visit,
    launch: Launch,
) -> Float[Array, "rows seq heads head_dim"]:
    """The gradient of `q` from that of the output; `delta` is Σ over head_dim of output · gradient."""
    specs = _QuerySpecs(q, k, launch.tile.queries)
    return launch(
        partial(_query_gradient, tile=launch.tile),
        specs.grid,
        "flash_query_gradient",
        in_specs=[
            specs.visit,
            specs.positions,
            specs.queries,
            specs.keys,
            specs.keys,
            specs.queries,
            specs.scalars,
            specs.scalars,
        ],
        out_specs=specs.queries,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
    )(jnp.stack(visit, -1), first_key, q, k, v, gradient, lse, delta)


def key_gradients(
    q: Float[Array, "rows seq heads head_dim"],
    k: Float[Array, "rows seq kv_heads head_dim"],
    v: Float[Array, "rows seq kv_heads head_dim"],
    gradient: Float[Array, "rows seq heads head_dim"],
    lse: Float[Array, "rows heads seq"],
    delta: Float[Array, "rows heads seq"],
    last_query: Int[Array, "rows seq"],
    visit: Visit,
    launch: Launch,
) -> tuple[Float[Array, "rows seq kv_heads head_dim"], Float[Array, "rows seq kv_heads head_dim"]]:
    """The gradients of `k` and `v`, each summed in float32 over the query heads that share it."""
    rows, length, heads, head_dim = q.shape
    kv_heads, block = k.shape[2], launch.tile.keys
    group = heads // kv_heads
    keys = pl.BlockSpec((None, block, None, head_dim), lambda i, head, row: (row, i, head, 0))
    queries = pl.BlockSpec((None, length, group, head_dim), lambda i, head, row: (row, 0, head, 0))
    scalars = pl.BlockSpec((None, group, length), lambda i, head, row: (row, head, 0))
    return launch(
        partial(_key_gradients, tile=launch.tile, group=group),
        (length // block, kv_heads, rows),
        "flash_key_gradients",
        in_specs=[
            pl.BlockSpec((None, None, 4), lambda i, head, row: (row, i, 0)),
            pl.BlockSpec((None, block), lambda i, head, row: (row, i)),
            queries,
            keys,
            keys,
            queries,
            scalars,
            scalars,
        ],
        out_specs=[keys, keys],
        out_shape=[jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)],
    )(jnp.stack(visit, -1), last_query, q, k, v, gradient, lse, delta)


class _QuerySpecs:
    """Where a program of a block of queries finds what it reads and writes. The longest loops come first."""

    def __init__(self, q: Array, k: Array, block: int):
        rows, length, heads, head_dim = q.shape
        group, last = heads // k.shape[2], length // block - 1
        self.grid = (length // block, heads, rows)
        self.visit = pl.BlockSpec((None, None, 4), lambda i, head, row: (row, last - i, 0))
        self.positions = pl.BlockSpec((None, block), lambda i, head, row: (row, last - i))
        self.queries = pl.BlockSpec((None, block, None, head_dim), lambda i, head, row: (row, last - i, head, 0))
        self.keys = pl.BlockSpec((None, length, None, head_dim), lambda i, head, row: (row, 0, head // group, 0))
        self.scalars = pl.BlockSpec((None, None, block), lambda i, head, row: (row, head, last - i))


def _scalars(q: Array) -> jax.ShapeDtypeStruct:
    rows, length, heads, _ = q.shape
    return jax.ShapeDtypeStruct((rows, heads, length), jnp.float32)


def _forward(visit: Any, first_key: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, tile: Tile) -> None:
    queries = q[...]
    position = _own_block() * tile.queries + jnp.arange(tile.queries, dtype=jnp.int32)
    first = first_key[...]

    def step(block: Array, carry: tuple[Array, Array, Array], masked: bool) -> tuple[Array, Array, Array]:
        mixed, highest, total = carry
        at = pl.ds(block * tile.keys, tile.keys)
        scores = _times_transposed(queries, k[at, :]) * _scale(q)
        if masked:
            key = block * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)[None, :]
            scores = jnp.where((key >= first[:, None]) & (key <= position[:, None]), scores, -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(axis=1))
        probabilities = jnp.exp2(scores - new_highest[:, None])
        correction = jnp.exp2(highest - new_highest)
        total = total * correction + probabilities.sum(axis=1)
        mixed = mixed * correction[:, None] + _times(probabilities.astype(v.dtype), v[at, :])
        return mixed, new_highest, total

    start = (
        jnp.zeros(q.shape, jnp.float32),
        jnp.full(tile.queries, _LOWEST, jnp.float32),
        jnp.zeros(tile.queries, jnp.float32),
    )
    mixed, highest, total = _visit(visit, step, start)
    out[...] = (mixed / total[:, None]).astype(out.dtype)
    lse[...] = highest + jnp.log2(total)


def _query_gradient(
    visit: Any, first_key: Any, q: Any, k: Any, v: Any, gradient: Any, lse: Any, delta: Any, dq: Any, *, tile: Tile
) -> None:
    queries, gradients = q[...], gradient[...]
    normaliser, shift = lse[...][:, None], delta[...][:, None]
    position = _own_block() * tile.queries + jnp.arange(tile.queries, dtype=jnp.int32)
    first = first_key[...]

    def step(block: Array, total: Array, masked: bool) -> Array:
        at = pl.ds(block * tile.keys, tile.keys)
        keys = k[at, :]
        scores = _times_transposed(queries, keys) * _scale(q)
        if masked:
            key = block * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)[None, :]
            scores = jnp.where((key >= first[:, None]) & (key <= position[:, None]), scores, -jnp.inf)
        probabilities = jnp.exp2(scores - normaliser)
        score_gradient = probabilities * (_times_transposed(gradients, v[at, :]) - shift)
        return total + _times(score_gradient.astype(keys.dtype), keys)

    total = _visit(visit, step, jnp.zeros(q.shape, jnp.float32))
    dq[...] = (total / math.sqrt(q.shape[-1])).astype(dq.dtype)


def _key_gradients(
    visit: Any,
    last_query: Any,
    q: Any,
    k: Any,
    v: Any,
    gradient: Any,
    lse: Any,
    delta: Any,
    dk: Any,
    dv: Any,
    *,
    tile: Tile,
    group: int,
) -> None:
    """Scores are [keys, queries] here, so that both gradients multiply them from the left as they are."""
    keys, values = k[...], v[...]
    position = pl.program_id(0) * tile.keys + jnp.arange(tile.keys, dtype=jnp.int32)
    last = last_query[...]

    def step(head: Array, block: Array, totals: tuple[Array, Array], masked: bool) -> tuple[Array, Array]:
        total_k, total_v = totals
        at = pl.ds(block * tile.queries, tile.queries)
        queries, gradients = q[at, head, :], gradient[at, head, :]
        scores = _times_transposed(keys, queries) * _scale(q)
        if masked:
            query = block * tile.queries + jnp.arange(tile.queries, dtype=jnp.int32)[None, :]
            scores = jnp.where((query >= position[:, None]) & (query <= last[:, None]), scores, -jnp.inf)
        probabilities = jnp.exp2(scores - lse[head, at][None, :])
        total_v += _times(probabilities.astype(gradients.dtype), gradients)
        score_gradient = probabilities * (_times_transposed(values, gradients) - delta[head, at][None, :])
        return total_k + _times(score_gradient.astype(queries.dtype), queries), total_v

    def of_head(head: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        return _visit(visit, partial(step, head), totals)

    zeros = jnp.zeros(k.shape, jnp.float32)
    total_k, total_v = jax.lax.fori_loop(0, group, of_head, (zeros, zeros))
    dk[...] = (total_k / math.sqrt(q.shape[-1])).astype(dk.dtype)
    dv[...] = total_v.astype(dv.dtype)


def _own_block() -> Array:
    return pl.num_programs(0) - 1 - pl.program_id(0)


def _visit(visit: Any, step: Callable[..., Any], carry: Any) -> Any:
    """`step(block, carry, masked)` over the blocks that are visible whole, then over those at both ends."""
    begin, whole_begin, whole_end, end = visit[0], visit[1], visit[2], visit[3]
    whole = whole_end - whole_begin
    carry = jax.lax.fori_loop(whole_begin, whole_end, partial(step, masked=False), carry)

    def at_an_end(block: Array, carry: Any) -> Any:
        return step(jnp.where(block < whole_begin, block, block + whole), carry, masked=True)

    return jax.lax.fori_loop(begin, end - whole, at_an_end, carry)


def _scale(q: Any) -> float:
    """1/√head_dim, times log₂e for softmax in powers of two."""
    return math.log2(math.e) / math.sqrt(q.shape[-1])


def _times(x: Array, y: Array) -> Array:
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def _times_transposed(x: Array, y: Array) -> Array:
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
