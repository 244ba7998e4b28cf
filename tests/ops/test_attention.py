import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops.attention import causal_attention

ROWS, HEAD_DIM = 2, 8


def naive_attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int | None) -> jax.Array:
    """One softmax over the whole square of scores, key heads repeated."""
    length, group = q.shape[1], q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    visible = (distance >= 0) & (distance < (window or length))
    visible = visible & (segments[:, :, None] == segments[:, None, :])
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(visible[:, None], scores, -1e30), -1), v)


def operands(length: int, heads: int, kv_heads: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(length), 3)
    return tuple(
        jax.random.normal(key, (ROWS, length, count, HEAD_DIM))
        for key, count in zip(keys, (heads, kv_heads, kv_heads), strict=True)
    )


def documents(length: int) -> jax.Array:
    """Row 0: three documents, one of a single token, then padding; row 1: one document."""
    cuts = (length // 3, length // 3 + 1, length - 2)
    first = np.concatenate([np.full(n, i + 1) for i, n in enumerate(np.diff([0, *cuts]))] + [np.zeros(2)])
    return jnp.asarray(np.stack([first, np.ones(length)]), jnp.int32)


def value_and_gradients(attend, q, k, v, segments, window):
    def weighted(q, k, v):
        out = attend(q, k, v, segments, window)
        return (out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(q, k, v)
    return {"output": out, **dict(zip("qkv", gradients, strict=True))}


@pytest.mark.parametrize(
    ("length", "kv_heads", "window", "packed"),
    [
        pytest.param(32, 4, None, False, id="shorter than a block"),
        pytest.param(130, 4, None, False, id="last block of two queries"),
        pytest.param(130, 2, None, True, id="grouped queries on packed rows"),
        pytest.param(150, 1, 5, True, id="window below a block, one key head"),
        pytest.param(200, 2, 100, True, id="window across blocks"),
        pytest.param(130, 2, 1, False, id="window of the query itself"),
        pytest.param(70, 4, 1000, False, id="window beyond the row"),
    ],
)
def test_blocked_attention_equals_one_masked_softmax(
    length: int, kv_heads: int, window: int | None, packed: bool
) -> None:
    q, k, v = operands(length, 4, kv_heads)
    segments = documents(length) if packed else jnp.ones((ROWS, length), jnp.int32)
    got = value_and_gradients(causal_attention, q, k, v, segments, window)
    want = value_and_gradients(naive_attention, q, k, v, segments, window)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=2e-5, err_msg=name)


def test_bfloat16_attention_is_close_to_float32() -> None:
    q, k, v = (array.astype(jnp.bfloat16) for array in operands(130, 4, 2))
    out = jax.jit(causal_attention)(q, k, v, documents(130))
    exact = naive_attention(*(array.astype(jnp.float32) for array in (q, k, v)), documents(130), None)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=0.03)


def test_large_scores_stay_finite() -> None:
    q, k, v = operands(70, 2, 2)
    out = value_and_gradients(causal_attention, 1e3 * q, 1e3 * k, v, documents(70), None)
    assert all(jnp.isfinite(array).all() for array in out.values())


def test_another_document_and_the_future_change_nothing_bit_for_bit() -> None:
    q, k, v = operands(130, 4, 2)
    segments = documents(130)
    before = causal_attention(q, k, v, segments)
    other = segments != 3
    k, v = (jnp.where(other[:, :, None, None], 7.0, array) for array in (k, v))
    k, v = (array.at[:, 100:].set(-3.0) for array in (k, v))
    after = causal_attention(q, k, v, segments)
    same = (segments[0] == 3) & (jnp.arange(130) < 100)
    assert same.sum() > 50
    np.testing.assert_array_equal(before[0, same], after[0, same])
