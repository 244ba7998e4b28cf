from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtrain.ops import projection
from jaxtrain.ops.projection import enter, leave
from jaxtrain.sharding import Layout, use_layout
from tests.runs import make_layout

ROWS, SEQUENCE, EMBED, HEADS, HEAD_DIM, MLP = 8, 8, 16, 4, 2, 12
QUERY, UP, OUTPUT = ("embed", "heads", "head_dim"), ("embed", "mlp"), ("heads", "head_dim", "embed")
MESHES = {
    "data=8": {"data": 8},
    "fsdp=8": {"fsdp": 8},
    "tensor=4": {"tensor": 4},
    "2×2×2": {"data": 2, "fsdp": 2, "tensor": 2},
}


def whole_sequence_layout(**sizes: int) -> Layout:
    layout = make_layout(**sizes)
    return replace(layout, activation_rules={**layout.activation_rules, "residual_seq": ()})


def operands(rows: int = ROWS) -> dict[str, jax.Array]:
    shapes = {"x": (rows, SEQUENCE, EMBED), "query": (EMBED, HEADS, HEAD_DIM), "up": (EMBED, MLP)}
    shapes["output"] = (HEADS, HEAD_DIM, EMBED)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(key, shape) / 4 for (name, shape), key in zip(shapes.items(), keys, strict=True)}


def through_a_tensor_region(operands: dict[str, jax.Array]) -> jax.Array:
    q, up = enter(operands["x"], (operands["query"], QUERY), (operands["up"], UP))
    y = leave(jnp.tanh(q) * up.sum(-1)[:, :, None, None], operands["output"], OUTPUT)
    return (jnp.sin(y) * jnp.arange(y.size).reshape(y.shape) / y.size).sum()


def value_and_gradients(layout: Layout | None, rows: int = ROWS) -> tuple[jax.Array, dict[str, jax.Array]]:
    function = jax.value_and_grad(through_a_tensor_region)
    if layout is None:
        return function(operands(rows))
    with use_layout(layout):
        return jax.jit(function)(operands(rows))


@pytest.mark.parametrize("make", [make_layout, whole_sequence_layout], ids=["sequence split", "sequence whole"])
@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_value_and_gradients_are_those_of_plain_products_on_every_mesh(make, sizes):
    value, gradients = value_and_gradients(make(**sizes))
    plain_value, plain = value_and_gradients(None)
    np.testing.assert_allclose(value, plain_value, rtol=1e-5)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, plain[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("sizes", [{"tensor": 4}, {"fsdp": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("rows", [8, 2], ids=["rows", "the sequence, of rows that are too few"])
def test_rows_in_parts_give_the_same(sizes, rows, monkeypatch):
    rows += rows == 2 and "fsdp" not in sizes  # 1 or 3 on a device
    whole_value, whole = value_and_gradients(make_layout(**sizes), rows)
    monkeypatch.setattr(projection, "SMALLEST_PART", 1)
    value, gradients = value_and_gradients(make_layout(**sizes), rows)
    np.testing.assert_allclose(value, whole_value, rtol=1e-6)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, whole[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_each_part_is_gathered_by_itself(monkeypatch):
    monkeypatch.setattr(projection, "SMALLEST_PART", 1)
    with use_layout(make_layout(fsdp=2, tensor=4)):
        jaxpr = str(jax.make_jaxpr(through_a_tensor_region)(operands()))
    assert len([line for line in jaxpr.splitlines() if "= all_gather" in line]) == 4 + 3, "4 parts of a row, 3 weights"


def test_weights_and_residual_travel_in_their_own_dtype_and_the_residual_once():
    layout = make_layout(fsdp=2, tensor=4)
    halves = jax.tree.map(lambda array: array.astype(jnp.bfloat16), operands())
    with use_layout(layout):
        jaxpr = str(jax.make_jaxpr(through_a_tensor_region)(halves))
    gathers = [line for line in jaxpr.splitlines() if "all_gather[" in line or "= all_gather" in line]
    assert len(gathers) == 1 + 3, "the residual, and each weight"
    assert all("bf16" in line.split("=")[0] for line in gathers)
