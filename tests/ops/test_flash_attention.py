"""The flash kernels, interpreted on the CPU, against attention in XLA."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_policies

from jaxtrain.config import resolve_mesh
from jaxtrain.config.schema import MeshConfig
from jaxtrain.ops.attention import causal_attention
from jaxtrain.ops.flash_attention import ATTENTION, Tiles, flash_attention, why_not
from jaxtrain.ops.flash_kernels import Tile
from jaxtrain.sharding import Layout, make_mesh, use_layout

ROWS, LENGTH, HEAD_DIM = 2, 96, 16
TILES = Tiles(Tile(32, 16, 4, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 2))
PACKED = [[20, 12, 41, 23], [1, 63, 32]]
"""Lengths of a row's documents, the last one padding: edges inside blocks of 16 and 32, and on them."""


def layout(**axes: int) -> Layout:
    devices = int(np.prod(list(axes.values())))
    sizes = resolve_mesh(MeshConfig(**{"data": 1, **axes}), devices)
    return Layout.on(make_mesh(sizes, jax.devices()[:devices]))


def segments(documents: list[list[int]]) -> jax.Array:
    rows = [np.repeat([*range(1, len(lengths)), 0], lengths) for lengths in documents]
    return jnp.asarray(np.stack(rows), jnp.int32)


def operands(heads: int, kv_heads: int) -> list[jax.Array]:
    """q, k, v and the output's gradient."""
    keys = jax.random.split(jax.random.key(3), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    return [jax.random.normal(key, (ROWS, LENGTH, n, HEAD_DIM)) for key, n in zip(keys, counts, strict=True)]


@partial(jax.jit, static_argnames=("attend", "window"))
def output_and_gradients(attend: Any, operands: list[jax.Array], ids: jax.Array, window: int | None) -> dict:
    *qkv, gradient = operands
    out, vjp = jax.vjp(lambda q, k, v: attend(q, k, v, ids, window=window), *qkv)
    return {"output": out, **dict(zip("qkv", vjp(gradient), strict=True))}


FLASH = partial(flash_attention, layout=layout(data=1), tiles=TILES, interpret=True)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window", "documents"),
    [
        pytest.param(2, 2, None, PACKED, id="packed and padded"),
        pytest.param(4, 1, None, [[LENGTH, 0]] * ROWS, id="one document, groups of 4"),
        pytest.param(4, 1, None, PACKED, id="packed and padded, groups of 4"),
        pytest.param(4, 2, 48, [[LENGTH, 0]] * ROWS, id="one document, window, groups of 2"),
        pytest.param(4, 2, 48, PACKED, id="packed and padded, window, groups of 2"),
    ],
)
def test_kernels_equal_attention_in_xla(
    heads: int, kv_heads: int, window: int | None, documents: list[list[int]]
) -> None:
    given, ids = operands(heads, kv_heads), segments(documents)
    got = output_and_gradients(FLASH, given, ids, window)
    want = output_and_gradients(causal_attention, given, ids, window)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_another_document_and_the_future_change_nothing_bit_for_bit() -> None:
    given, ids = operands(4, 1), segments(PACKED)
    before = output_and_gradients(FLASH, given, ids, None)
    other = (ids != 3)[..., None, None]
    after = output_and_gradients(FLASH, [jnp.where(other, 7.0, array) for array in given], ids, None)
    for name, array in before.items():
        np.testing.assert_array_equal(array[0, 32:73], after[name][0, 32:73], err_msg=name)
    late = jnp.arange(LENGTH)[None, :, None, None] >= 60
    after = output_and_gradients(FLASH, [jnp.where(late, -3.0, array) for array in given], ids, None)
    np.testing.assert_array_equal(before["output"][0, 32:60], after["output"][0, 32:60])


@pytest.mark.parametrize(("kv_heads", "window"), [(1, None), (2, 48)])
def test_blocks_that_nobody_sees_are_never_read(kv_heads: int, window: int | None) -> None:
    """Zero times NaN would be NaN, so a block that is read shows, however well it is masked."""
    given, ids = operands(4, kv_heads), segments([[32, 32, 32]] * ROWS)
    poisoned = [array.at[:, 32:64].set(jnp.nan) for array in given]
    got = output_and_gradients(FLASH, poisoned, ids, window)
    for name, array in got.items():
        assert jnp.isnan(array[:, 32:64]).all(), name
        assert not jnp.isnan(array[:, :32]).any(), name
        assert not jnp.isnan(array[:, 64:]).any(), name


def test_blocks_before_the_window_are_never_read() -> None:
    q, k, v, gradient = operands(4, 2)
    k, v = (array.at[:, :16].set(jnp.nan) for array in (k, v))
    got = output_and_gradients(FLASH, [q, k, v, gradient], segments([[LENGTH, 0]] * ROWS), 48)
    assert jnp.isnan(got["output"][:, :48]).all()
    assert not jnp.isnan(got["output"][:, 64:]).any()


def test_large_scores_stay_finite() -> None:
    q, k, v, gradient = operands(4, 1)
    got = output_and_gradients(FLASH, [1e3 * q, 1e3 * k, v, gradient], segments(PACKED), None)
    assert all(jnp.isfinite(array).all() for array in got.values())


def test_every_device_attends_for_its_own_rows_and_heads() -> None:
    given, ids = operands(4, 2), segments(PACKED)
    whole = layout(fsdp=2, tensor=2)
    split = partial(flash_attention, layout=whole, tiles=TILES, interpret=True)
    got = output_and_gradients(split, given, ids, 48)
    want = output_and_gradients(FLASH, given, ids, 48)
    assert got["output"].sharding.shard_shape(got["output"].shape) == (ROWS // 2, LENGTH, 2, HEAD_DIM)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_backward_pass_keeps_operands_output_and_one_number_per_query() -> None:
    q, k, v, _ = operands(4, 1)
    ids = segments(PACKED)
    _, vjp = jax.eval_shape(lambda *qkv: jax.vjp(lambda q, k, v: FLASH(q, k, v, ids), *qkv), q, k, v)
    assert (
        sum(leaf.size for leaf in jax.tree.leaves(vjp)) == 2 * q.size + k.size + v.size + ids.size + q.size // HEAD_DIM
    )


@pytest.mark.parametrize(("names", "times"), [((), 2), ((ATTENTION,), 1)])
def test_remat_can_keep_the_output_so_that_the_kernel_runs_once(names: tuple[str, ...], times: int) -> None:
    policy = checkpoint_policies.save_only_these_names(*names)
    q, k, v, _ = operands(4, 1)

    def loss(q: jax.Array) -> jax.Array:
        return jax.checkpoint(lambda q: FLASH(q, k, v, segments(PACKED)).sum(), policy=policy)(q)

    assert str(jax.make_jaxpr(jax.grad(loss))(q)).count("name=flash_forward") == times


def test_what_the_kernels_cannot_do_is_said() -> None:
    assert why_not("gpu", jnp.dtype(jnp.bfloat16), 8192, 128) is None
    assert "cpu" in str(why_not("cpu", jnp.dtype(jnp.bfloat16), 8192, 128))
    assert "TF32" in str(why_not("gpu", jnp.dtype(jnp.float32), 8192, 128))
    assert "head_dim 96" in str(why_not("gpu", jnp.dtype(jnp.bfloat16), 8192, 96))
    assert "8200 is not a multiple" in str(why_not("gpu", jnp.dtype(jnp.bfloat16), 8200, 128))


def test_the_choice_and_its_reason_stand_in_the_layout() -> None:
    q, k, v, _ = operands(2, 2)
    here = layout(data=1)
    with use_layout(here):
        jax.eval_shape(lambda q: causal_attention(q, k, v, segments(PACKED)), q)
    assert here.choices["attention"] == "blocks in XLA (there is no flash kernel for cpu)"
