import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.embedding import embed
from jaxtrain.sharding import use_layout
from tests.runs import make_layout

LAYOUTS = [{}, {"data": 8}, {"fsdp": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
VOCAB, EMBED = 32, 16


def operands() -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    ids = jax.random.randint(keys[1], (8, 12), 0, VOCAB).at[0, :2].set(jnp.array([0, VOCAB - 1]))
    return jax.random.normal(keys[0], (VOCAB, EMBED)), ids, jax.random.normal(keys[2], (8, 12, EMBED))


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_lookup_and_gradient_equal_plain_indexing(axes: dict[str, int]) -> None:
    table, ids, weight = operands()
    layout = make_layout(**axes)
    table = jax.device_put(table, layout.parameter(("vocab", "embed"), table.shape, "table"))

    def weighted(table):
        x = embed(table, ids, jnp.float32)
        return (weight * x).sum(), x

    with use_layout(layout):
        (_, x), gradient = jax.jit(jax.value_and_grad(weighted, has_aux=True))(table)
    np.testing.assert_array_equal(x, np.asarray(table)[ids])
    want = np.zeros((VOCAB, EMBED), np.float32)
    np.add.at(want, np.asarray(ids), weight)
    np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axes", [{}, {"fsdp": 2, "tensor": 2}], ids=str)
def test_a_token_that_is_used_often_gets_its_whole_gradient_in_bfloat16(axes: dict[str, int]) -> None:
    # bfloat16 counts 1, 2, … only up to 256: 4,096 ones added in it stay far below 4,096.
    table = jnp.ones((VOCAB, EMBED))
    ids = jnp.full((8, 512), 3)
    with use_layout(make_layout(**axes)):
        gradient = jax.jit(jax.grad(lambda table: embed(table, ids, jnp.bfloat16).sum(dtype=jnp.float32)))(table)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(gradient[3], 8 * 512, rtol=1e-6)
