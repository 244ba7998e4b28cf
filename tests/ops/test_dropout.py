import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.dropout import dropout
from jaxtrain.sharding import use_layout
from tests.runs import make_layout

KEY = jax.random.key(3)
X = jnp.ones((8, 16, 32))
ROWS = jnp.arange(8)


def test_rate_zero_is_the_identity() -> None:
    assert dropout(X, 0.0, KEY, 0, ROWS) is X


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_kept_share_is_one_minus_the_rate_and_the_mean_stays(rate: float) -> None:
    y = np.asarray(dropout(X, rate, KEY, 0, ROWS))
    kept = (y != 0).mean()
    deviation = np.sqrt(rate * (1 - rate) / y.size)
    assert abs(kept - (1 - rate)) < 4 * deviation
    np.testing.assert_allclose(y[y != 0], 1 / (1 - rate), rtol=1e-6)


def test_the_mask_differs_by_key_by_site_and_by_row() -> None:
    y = dropout(X, 0.5, KEY, 0, ROWS)
    assert (y != dropout(X, 0.5, jax.random.key(4), 0, ROWS)).any()
    assert (y != dropout(X, 0.5, KEY, 1, ROWS)).any()
    assert len({row.tobytes() for row in np.asarray(y)}) == 8


def test_a_row_keeps_its_mask_in_every_micro_batch() -> None:
    whole = dropout(X, 0.5, KEY, 0, ROWS)
    part = dropout(X[:3], 0.5, KEY, 0, jnp.array([6, 1, 4]))
    np.testing.assert_array_equal(part, whole[jnp.array([6, 1, 4])])


@pytest.mark.parametrize("axes", [{"data": 8}, {"tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}], ids=str)
def test_a_row_keeps_its_mask_on_every_mesh(axes: dict[str, int]) -> None:
    layout = make_layout(**axes)
    split = layout.activation(("batch", "residual_seq", "embed"), X.shape, "x")
    with use_layout(layout):
        y = jax.jit(lambda x: dropout(x, 0.5, KEY, 0, ROWS), out_shardings=split)(jax.device_put(X, split))
    np.testing.assert_array_equal(y, dropout(X, 0.5, KEY, 0, ROWS))


def test_the_type_stays_and_the_gradient_follows_the_mask() -> None:
    assert dropout(X.astype(jnp.bfloat16), 0.5, KEY, 0, ROWS).dtype == jnp.bfloat16
    gradient = jax.grad(lambda x: dropout(x, 0.5, KEY, 0, ROWS).sum())(X)
    np.testing.assert_array_equal(gradient, dropout(X, 0.5, KEY, 0, ROWS))
